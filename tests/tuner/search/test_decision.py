"""The decision that a candidate is faster, and the choice of candidates to confirm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from decoding.draft_length import AdaEdl, Fixed
from decoding.drafts import LayerSkip, PlainDecoding
from studies.contract import Candidate
from studies.measurement import Measurement, PairedPrefill
from tests.support.benches import ScriptedBench, first_block
from tests.support.records import candidate, measurement, record, sample
from tuner.config import SearchConfig
from tuner.progress import Unwatched
from tuner.search.decision import Confirmed, claims_speedup, confirm, objection, race_best
from tuner.search.race import Finalist

FASTER = measurement([1.2, 1.3, 1.25, 1.22])
CONFIG = SearchConfig(model="m", dataset="d", prompts_per_trial=2, finalists=2)


def made_up_bench(num_prompts: int) -> ScriptedBench:
    """A bench whose speed-ups follow the first skipped block."""
    return ScriptedBench(lambda wanted, index: sample(1 + first_block(wanted) / 10 + index / 1000, index), num_prompts)


def measured(bench: ScriptedBench) -> dict[int, tuple[int, ...]]:
    """Return all measured indices by first skipped block."""
    found: dict[int, tuple[int, ...]] = {}
    for block, indices in bench.blocks_measured:
        found[block] = (*found.get(block, ()), *indices)
    return found


def test_an_interval_above_one_is_a_speedup() -> None:
    assert claims_speedup(candidate(), FASTER, FASTER)


@pytest.mark.parametrize("ratios", [[0.9, 1.3, 1.2, 0.95], [1.0, 1.0, 1.0], [0.8, 0.7]])
def test_an_interval_that_reaches_one_is_none(ratios: list[float]) -> None:
    assert not claims_speedup(candidate(), FASTER, measurement(ratios))


CLOSE = measurement([1.02, 1.2, 0.98, 1.15, 1.1, 0.97, 1.12, 1.06])
"""Its 95 % interval lies above 1, its 99.5 % interval does not."""


def test_on_a_busy_machine_more_is_asked() -> None:
    assert claims_speedup(candidate(), FASTER, CLOSE)
    assert claims_speedup(candidate(), FASTER, measurement([1.5, 1.6, 1.55, 1.4, 1.5, 1.6]), busy=True)
    assert objection(candidate(), FASTER, CLOSE, busy=True) == (
        "the machine was busy, and then its 99.5 % interval must lie above 1: measure again"
    )


@pytest.mark.parametrize(("waited", "claims"), [(None, True), (0.02, True), (0.2, False)])
def test_samples_that_had_to_wait_for_a_processor_make_it_busy(waited: float | None, claims: bool) -> None:
    samples = (s.model_copy(update={"waited_seconds": waited and waited * s.total_seconds}) for s in CLOSE.samples)
    assert claims_speedup(candidate(), FASTER, Measurement(samples=tuple(samples))) is claims


@pytest.mark.parametrize("num_prompts", [6, 16])
def test_noise_with_heavy_tails_is_seldom_claimed_on_a_busy_machine(num_prompts: int) -> None:
    """Plain decoding against itself; one decoding of twelve is interrupted for up to several times its length."""
    stream, claims, runs = np.random.default_rng(0), [0, 0], 1500
    for _ in range(runs):
        seconds = stream.lognormal(0, 0.08, (num_prompts, 2))
        seconds *= 1 + (stream.random(seconds.shape) < 1 / 12) * stream.exponential(1.5, seconds.shape)
        made = measurement((seconds[:, 0] / seconds[:, 1]).tolist())
        for busy in (False, True):
            claims[busy] += claims_speedup(candidate(), FASTER, made, busy=busy)
    assert claims[False] / runs < 0.04
    assert claims[True] / runs < 0.006


def test_another_text_or_no_draft_is_no_speedup() -> None:
    wrong = Measurement(samples=tuple(s.model_copy(update={"identical": False}) for s in FASTER.samples))
    assert not claims_speedup(candidate(), FASTER, wrong)
    assert not claims_speedup(candidate(), wrong, FASTER)
    assert not claims_speedup(Candidate(draft=PlainDecoding(), draft_length=Fixed()), FASTER, FASTER)


def test_a_prefill_that_eats_up_the_speedup_is_an_objection() -> None:
    prefill = PairedPrefill(plain_seconds=1.0, plain_tokens=1, draft_seconds=9.0, draft_tokens=1)
    slower = Measurement(samples=tuple(s.model_copy(update={"prefill": prefill}) for s in FASTER.samples))
    assert slower.speedup_interval().ci95[0] > 1.0
    assert not claims_speedup(candidate(), FASTER, slower)
    assert "end to end it is slower" in str(objection(candidate(), FASTER, slower))
    cheap = prefill.model_copy(update={"draft_seconds": 1.01})
    faster = Measurement(samples=tuple(s.model_copy(update={"prefill": cheap}) for s in FASTER.samples))
    assert objection(candidate(), FASTER, faster) is None


def test_the_best_of_all_and_of_each_study_race_on_unseen_prompts() -> None:
    trials = [
        record(1.5, blocks=(1,), number=0),
        record(1.4, blocks=(2,), number=1),
        record(1.3, blocks=(3,), number=2),
        record(1.1, blocks=(4,), study="exit_layer"),
    ]
    bench = made_up_bench(8)
    finalists = race_best(trials, ["conf_layers", "exit_layer"], bench, CONFIG, Unwatched())
    assert [finalist.trial.candidate.draft for finalist in finalists] == [
        LayerSkip.blocks((4,)),
        LayerSkip.blocks((2,)),
        LayerSkip.blocks((1,)),
    ]
    assert set(bench.warmed_up_on) == {(0, 1)}
    assert {min(indices) for indices in measured(bench).values()} == {2}
    held_out = made_up_bench(5)
    confirmed = confirm(finalists, trials, held_out, Unwatched())
    assert [(each.label, each.measurement.speedup > 1.15) for each in confirmed] == [
        ("exit_layer", True),
        ("conf_layers", True),
    ]
    assert measured(held_out) == {4: tuple(range(5)), 2: tuple(range(5))}


def test_trials_on_all_prompts_leave_all_to_the_race() -> None:
    bench = made_up_bench(2)
    race_best([record(1.5, blocks=(1,))], ["conf_layers"], bench, CONFIG, Unwatched())
    assert measured(bench) == {1: (0, 1)}


def test_no_complete_trial_gives_no_finalist() -> None:
    assert race_best([record(None)], ["conf_layers"], made_up_bench(4), CONFIG, Unwatched()) == []


def test_a_published_rule_is_confirmed_beside_the_winner() -> None:
    trials = [
        record(1.5, blocks=(1,), number=0),
        record(1.1, blocks=(2,), number=1, candidate=candidate((2,), AdaEdl())),
    ]
    bench = made_up_bench(6)
    config = CONFIG.model_copy(update={"finalists": 1})
    finalists = race_best(trials, ["conf_layers"], bench, config, Unwatched())
    labels = [each.label for each in confirm(finalists, trials, bench, Unwatched())]
    assert labels == ["conf_layers", "best ada_edl"]


def test_no_candidate_is_measured_twice_on_a_prompt_by_runs_of_one_search() -> None:
    trials = [record(1.5, blocks=(1,), number=0)]
    finalists = [Finalist(trials[0], FASTER)]
    kept: dict[str, Measurement] = {}

    def keep(confirmed: Confirmed) -> None:
        kept[confirmed.trial.candidate.key] = confirmed.measurement

    first = confirm(finalists, trials, made_up_bench(4), Unwatched(), keep=keep)
    held_out = made_up_bench(7)
    (second,) = confirm(finalists, trials, held_out, Unwatched(), known=kept, keep=keep)
    assert measured(held_out) == {1: (4, 5, 6)}
    assert [each.prompt for each in second.measurement.samples] == list(range(7))
    assert second.measurement.samples[:4] == first[0].measurement.samples
    again = made_up_bench(7)
    assert confirm(finalists, trials, again, Unwatched(), known=kept) == [second]
    assert measured(again) == {}


@pytest.mark.parametrize(("counts", "shared"), [((6, 4), [6, 4]), ((4, 6), [4, 4])])
def test_rivals_are_compared_on_the_prompts_of_the_winner(counts: tuple[int, int], shared: list[int]) -> None:
    trials = [record(1.5, blocks=(1,)), record(1.4, blocks=(2,), study="exit_layer")]
    finalists = [Finalist(trial, FASTER) for trial in trials]
    left = iter(counts)

    def pacer(num_left: int) -> Callable[[], bool]:
        answers = iter([True] * next(left))
        return lambda: next(answers, False)

    confirmed = confirm(finalists, trials, made_up_bench(8), Unwatched(), pacer, least=2)
    assert [len(each.measurement.samples) for each in confirmed] == shared
