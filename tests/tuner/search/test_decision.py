"""The decision that a candidate is faster, and the choice of candidates to confirm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from decoding.draft_length import Fixed
from decoding.drafts import PlainDecoding
from studies.contract import Candidate
from studies.measurement import Measurement, PairedPrefill
from tests.support.benches import ScriptedBench, first_block
from tests.support.records import candidate, measurement, record, sample
from tuner.progress import Progress
from tuner.review.document import MeasuredCandidate
from tuner.search.budget import Budget
from tuner.search.decision import Confirmations, confirm, objection, to_confirm
from tuner.stage_clock import StageClock

FASTER = measurement([1.2, 1.3, 1.25, 1.22])
CLOSE = measurement([1.02, 1.2, 0.98, 1.15, 1.1, 0.97, 1.12, 1.06])
"""Its 95 % interval lies above 1, its 99.5 % interval does not."""


def with_each(measured: Measurement, **facts: object) -> Measurement:
    """The measurement with other facts of each sample."""
    return Measurement(samples=tuple(each.model_copy(update=facts) for each in measured.samples))


WRONG = with_each(FASTER, identical=False)
PLAIN = Candidate(draft=PlainDecoding(), draft_length=Fixed())


def prefilled(seconds: float) -> Measurement:
    charged = PairedPrefill(plain_seconds=1.0, plain_tokens=1, draft_seconds=seconds, draft_tokens=1)
    return with_each(FASTER, prefill=charged)


@pytest.mark.parametrize(
    ("tried", "raced", "confirmed", "words"),
    [
        (candidate(), FASTER, FASTER, None),
        (candidate(), FASTER, measurement([0.9, 1.3, 1.2, 0.95]), "its 95 % interval does not lie above 1"),
        (candidate(), FASTER, measurement([1.0, 1.0, 1.0]), "its 95 % interval does not lie above 1"),
        (candidate(), FASTER, WRONG, "its texts differ"),
        (candidate(), WRONG, FASTER, "its texts differ"),
        (PLAIN, FASTER, FASTER, "the best candidate decodes plainly"),
        (candidate(), FASTER, prefilled(9.0), "end to end it is slower"),
        (candidate(), FASTER, prefilled(1.01), None),
    ],
)
def test_a_speedup_is_claimed_unless_there_is_an_objection(
    tried: Candidate, raced: Measurement, confirmed: Measurement, words: str | None
) -> None:
    found = objection(tried, raced, confirmed)
    assert found is None if words is None else words in str(found)


def test_on_a_busy_machine_more_is_asked() -> None:
    assert objection(candidate(), FASTER, CLOSE) is None
    assert objection(candidate(), FASTER, measurement([1.5, 1.6, 1.55, 1.4, 1.5, 1.6]), busy=True) is None
    refused = "the machine was busy, and then its 99.5 % interval must lie above 1: measure again"
    assert objection(candidate(), FASTER, CLOSE, busy=True) == refused
    for share, expected in ((0.02, None), (0.2, refused)):
        waited = (s.model_copy(update={"waited_seconds": share * s.total_seconds}) for s in CLOSE.samples)
        assert objection(candidate(), FASTER, Measurement(samples=tuple(waited))) == expected


@pytest.mark.parametrize("num_prompts", [6, 16])
def test_noise_with_heavy_tails_is_seldom_claimed_on_a_busy_machine(num_prompts: int) -> None:
    """Plain decoding against itself; one decoding of twelve is interrupted for up to several times its length."""
    stream, claims, runs = np.random.default_rng(0), [0, 0], 800
    for _ in range(runs):
        seconds = stream.lognormal(0, 0.08, (num_prompts, 2))
        seconds *= 1 + (stream.random(seconds.shape) < 1 / 12) * stream.exponential(1.5, seconds.shape)
        made = measurement((seconds[:, 0] / seconds[:, 1]).tolist())
        for busy in (False, True):
            claims[busy] += objection(candidate(), FASTER, made, busy=busy) is None
    assert claims[False] / runs < 0.04
    assert claims[True] / runs < 0.007


def made_up_bench(num_prompts: int) -> ScriptedBench:
    """A bench whose speed-ups follow the first skipped block."""
    return ScriptedBench(lambda wanted, index: sample(1 + first_block(wanted) / 10 + index / 1000, index), num_prompts)


def raced(block: int, study: str = "conf_layers") -> MeasuredCandidate:
    return MeasuredCandidate.of(record(blocks=(block,), number=block, study=study))


def confirmed(
    chosen: list[MeasuredCandidate],
    bench: ScriptedBench,
    confirmations: Confirmations | None = None,
    budget: Budget | None = None,
) -> list[MeasuredCandidate]:
    kept = confirmations or Confirmations()
    return confirm(chosen, bench, budget or Budget(None, StageClock()), Progress(), kept)


def test_the_best_of_each_study_is_confirmed_once() -> None:
    race = [raced(4, "exit_layer"), raced(2), raced(1), raced(4, "draft_length")]
    chosen = to_confirm(race)
    assert [(each.study, each.trial) for each in chosen] == [
        ("exit_layer", "exit_layer/4"),
        ("conf_layers", "conf_layers/2"),
    ]
    bench = made_up_bench(5)
    assert [each.measurement.speedup > 1.15 for each in confirmed(chosen, bench)] == [True] * 2
    assert bench.blocks_measured == [(4, tuple(range(5))), (2, tuple(range(5)))]


def test_no_candidate_is_measured_twice_on_a_prompt_by_runs_of_one_search() -> None:
    kept = Confirmations()
    (first,) = confirmed([raced(1)], made_up_bench(4), kept)
    bench = made_up_bench(7)
    (second,) = confirmed([raced(1)], bench, kept)
    assert bench.blocks_measured == [(1, (4, 5, 6))]
    assert [each.prompt for each in second.measurement.samples] == list(range(7))
    assert second.measurement.samples[:4] == first.measurement.samples
    again = made_up_bench(7)
    assert confirmed([raced(1)], again, kept) == [second]
    assert again.blocks_measured == []


@pytest.mark.parametrize(("counts", "shared"), [((6, 4), [6, 4]), ((4, 6), [4, 4])])
def test_rivals_are_compared_on_the_prompts_of_the_winner(
    counts: tuple[int, int], shared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(counts)

    def share(budget: Budget, num_left: int, keep: float) -> Callable[[], bool]:
        answers = iter([True] * next(left))
        return lambda: next(answers, False)

    monkeypatch.setattr(Budget, "share", share)
    found = confirmed([raced(1), raced(2, "exit_layer")], made_up_bench(8))
    assert [len(each.measurement.samples) for each in found] == shared
