"""A clock that charges for recordings: a candidate whose true speed-up is known must measure exactly that.

Recording a pass takes as long as many replays. If that happened within a measurement, the candidate would be charged
for it and plain decoding, recorded long before, would not: a search would conclude that nothing beats plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch import nn

from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.runners.buckets import GPU_BUCKETS
from decoding.target import Target
from studies.contract import Candidate
from tests.support.benches import bench_on
from tests.support.recorders import SimulatedGPU, recorded_by
from tests.support.records import candidate, measurement, record
from tests.support.tiny import tiny_llama
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.race import race

TRUE_SPEEDUP = 1.5
USELESS = (1, 2, 3)
NUM_ROUNDS = 6
PROMPTS = [tuple((seed * 11 + index * 5) % 60 + 2 for index in range(50 + 9 * seed)) for seed in range(4)]
BUCKETS = replace(GPU_BUCKETS, slot_step=64)
"""Many steps on short sequences, which a CPU decodes quickly."""


def planted(*blocks: int) -> Candidate:
    """Skip two useless blocks of four: two drafts at half a pass each, all accepted, make three tokens for two passes."""
    assert set(blocks) <= set(USELESS)
    assert len(blocks) == 2
    return Candidate(draft=LayerSkip.blocks(blocks), draft_length=Fixed(max_tokens=2))


def decoys() -> list[Candidate]:
    """Return candidates that skip blocks which matter."""
    return [candidate((0, block), Fixed(max_tokens=1)) for block in USELESS]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench on a model with useless blocks, whose clock charges by what runs."""
    model = tiny_llama(4, seed=3)
    for index in USELESS:
        block = model.model.layers[index]
        for matrix in (block.self_attn.o_proj, block.mlp.down_proj):
            nn.init.zeros_(matrix.weight)
    gpu = SimulatedGPU()
    with gpu.charging(model.model.layers):
        target = Target(model, recorded_by(gpu, BUCKETS))
        monkeypatch.setattr(time, "perf_counter", gpu)
        yield bench_on(target, PROMPTS, max_new_tokens=1 + 3 * NUM_ROUNDS)


def test_first_and_last_trial_measure_the_true_speedup(simulated: Bench) -> None:
    trials = [planted(1, 2), *decoys(), planted(2, 3)]
    measured = [simulated.measure(each, range(2) if each in (trials[0], trials[-1]) else range(1)) for each in trials]
    assert measured[0].speedup == pytest.approx(TRUE_SPEEDUP, abs=0.05)
    assert measured[-1].speedup == pytest.approx(TRUE_SPEEDUP, abs=0.05)


def test_the_race_measures_the_true_speedup(simulated: Bench) -> None:
    chosen = [planted(1, 2), planted(2, 3)]
    trials = [
        record(number=number).model_copy(update={"candidate": each, "measurement": measurement([1.0])})
        for number, each in enumerate(chosen)
    ]
    ranking = race(trials, simulated, range(2), Progress())
    assert [each.measurement.speedup for each in ranking] == [pytest.approx(TRUE_SPEEDUP, abs=0.05)] * 2
