"""Shapes to which passes are padded."""

from __future__ import annotations

import pytest

from decoding.runners.buckets import CPU_BUCKETS, GPU_BUCKETS, Buckets

SMALL = Buckets(widths=(1, 2, 5), slot_step=8)


def test_width_is_the_narrowest_that_is_wide_enough() -> None:
    assert [SMALL.width(width) for width in range(1, 6)] == [1, 2, 5, 5, 5]
    assert SMALL.widest == 5


def test_reach_covers_the_request_in_few_steps() -> None:
    reaches = [SMALL.reach(end) for end in range(1, 4000)]
    assert all(reach >= end for end, reach in enumerate(reaches, start=1))
    assert all(reach % SMALL.slot_step == 0 for reach in reaches)
    assert reaches == sorted(reaches)
    assert len(set(reaches)) < 30
    assert all(
        reach <= max(SMALL.slot_step, 1.25 * end + SMALL.slot_step) for end, reach in enumerate(reaches, start=1)
    )


@pytest.mark.parametrize("buckets", [SMALL, CPU_BUCKETS, GPU_BUCKETS])
def test_cache_has_room_for_the_padding_of_a_pass_at_its_end(buckets: Buckets) -> None:
    for capacity in (1, 7, 64, 255, 256, 1000):
        room = buckets.capacity(capacity)
        for width in range(1, min(capacity, buckets.widest) + 1):
            assert buckets.reach(capacity - width + buckets.width(width)) <= room


def test_a_shared_pass_keeps_the_logits_of_a_bounded_number_of_positions() -> None:
    bounded = Buckets(widths=(1, 2, 5), slot_step=8, most_positions=8)
    assert bounded.fits(5), "a single sequence is bounded by the widest pass only"
    assert bounded.fits(2, num_rows=4)
    assert not bounded.fits(3, num_rows=2), "padded to 5 positions in each row"
    assert not bounded.fits(6)
    assert SMALL.fits(5, num_rows=100)


def test_few_recordings_cover_every_draft_on_a_gpu() -> None:
    assert len({GPU_BUCKETS.width(1 + num_drafted) for num_drafted in range(9)}) <= 5
    assert len({GPU_BUCKETS.width(1 + num_drafted) for num_drafted in range(65)}) <= 7, "every draft of a rule fits"
    gpu_memory = 16 * GPU_BUCKETS.width(65) * 128_256 * 2
    assert not GPU_BUCKETS.fits(65, num_rows=16), f"its logits would take {gpu_memory:,} bytes per recording"
