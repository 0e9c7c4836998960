"""Checks of false claims and coverage, on a tiny model and with made-up measurements."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from decoding.draft_length import Fixed, RoundCosts
from decoding.drafts import LayerSkip, PlainDecoding
from decoding.target import Target
from studies.contract import Candidate
from studies.measurement import Measurement
from tests.support.benches import ScriptedBench, bench_on, noisy
from tests.support.records import measurement, sample
from tests.support.refusals import refused
from tests.support.tiny import tiny_target
from tuner.cli.main import main
from tuner.config import SearchConfig
from tuner.evaluation.integrity.coverage import Configuration, Confirmation, CoverageCheck, confirmations_from
from tuner.evaluation.integrity.null_benches import Bank, Family, FreshBench, ResampledBench, families
from tuner.evaluation.integrity.nulls import NullCheck, NullRun, search_among
from tuner.measuring.machine import MachineNoise
from tuner.measuring.paired import Bench

CONFIG = SearchConfig(model="m", dataset="d", prompts_per_trial=4, finalists=3)
Check = Callable[..., Result]


def noisy_bench(num_prompts: int, true: float = 1.0, seed: int = 0) -> ScriptedBench:
    """A bench with random times: every candidate is `true` times as fast as plain decoding, with log-normal noise."""
    return ScriptedBench(noisy(true, seed=seed), num_prompts)


def claims(family: Family, true: float, runs: int = 30) -> int:
    """Return how many of `runs` searches claim a speed-up if candidates are `true` times as fast as plain decoding."""
    stream = np.random.default_rng(1)
    banks = [Bank.fill(noisy_bench(20, true, seed=seed), family.decoded, 6) for seed in (0, 1)]
    found = 0
    for _ in range(runs):
        tuning, held_out = (ResampledBench(bank, family, 20, stream) for bank in banks)
        found += search_among(family, tuning, held_out, CONFIG).claims
    return found


def test_true_speedups_are_claimed_and_others_hardly_ever() -> None:
    disguised = families(8)["disguised"]
    assert claims(disguised, 1.0) <= 3
    assert claims(disguised, 1.1) == 30
    assert claims(disguised, 0.9) == 0


def test_selection_biases_the_best_trial_but_not_the_confirmation() -> None:
    family = families(16)["idle"]
    stream = np.random.default_rng(0)
    runs = [
        search_among(family, *(noisy_bench(16, seed=int(stream.integers(1 << 30))) for _ in range(2)), CONFIG)
        for _ in range(20)
    ]
    assert np.mean([run.best_trial for run in runs]) > 1.02
    assert np.mean([run.confirmed.value for run in runs]) == pytest.approx(1.0, abs=0.01)


def test_candidates_look_like_drafts_but_decode_as_their_family() -> None:
    made = families(5)
    assert {name: len(family.candidates) for name, family in made.items()} == {"disguised": 5, "idle": 5, "whole": 3}
    for family in made.values():
        assert len({candidate.key for candidate in family.candidates}) == len(family.candidates)
        assert all(candidate.draft == LayerSkip() for candidate in family.candidates)
    assert [candidate.draft for candidate in made["disguised"].decoded] == [PlainDecoding()]
    assert len(made["idle"].decoded) == 1
    assert made["whole"].decoded == list(made["whole"].candidates)


@pytest.fixture(scope="module")
def bench() -> Bench:
    prompts = [[(seed * 11 + index * 5) % 60 + 2 for index in range(5 + seed)] for seed in range(3)]
    return bench_on(tiny_target(4), prompts, max_new_tokens=10)


def test_idle_candidates_never_draft_and_whole_models_are_accepted(bench: Bench) -> None:
    made = families(2)
    (idle,) = made["idle"].decoded
    measured = bench.measure(idle, [0, 1])
    assert all((s.rounds, s.drafted, s.identical) == (s.draft_tokens, 0, True) for s in measured.samples)
    for whole, length in zip(made["whole"].decoded, (1, 2, 4), strict=True):
        (found,) = bench.measure(whole, [0]).samples
        assert found.identical
        assert found.drafted == found.accepted
        assert found.rounds == -(-found.draft_tokens // (length + 1))


@pytest.mark.parametrize("num_prompts", [4, 5])
@pytest.mark.parametrize("repetitions", [2, 3])
def test_a_bank_has_every_prompt_in_both_orders(num_prompts: int, repetitions: int) -> None:
    family = families(3)["whole"]
    made = noisy_bench(num_prompts)
    bank = Bank.fill(made, family.decoded, repetitions)
    for candidate in family.decoded:
        pools = bank.samples[candidate.key]
        assert set(pools) == {(prompt, first) for prompt in range(num_prompts) for first in (True, False)}
        assert all(each.prompt == prompt for (prompt, _), samples in pools.items() for each in samples)
        per_prompt = Counter(s.prompt for s in bank.all_of(candidate).samples)
        assert per_prompt == dict.fromkeys(range(num_prompts), repetitions)
    order = [candidate for candidate, _ in made.measured]
    assert order == family.decoded * repetitions, "pass by pass, so that repetitions are apart in time"


def test_a_bank_needs_both_orders() -> None:
    with pytest.raises(ValueError, match="two repetitions at least"):
        Bank.fill(noisy_bench(3), families(1)["idle"].decoded, 1)


def test_resampled_measurements_keep_prompts_and_order() -> None:
    family = families(4)["disguised"]
    bank = Bank.fill(noisy_bench(6), family.decoded, 4)
    drawn = ResampledBench(bank, family, 10, np.random.default_rng(0))
    assert len(drawn.prompts) == 10
    assert len(set(drawn.prompts)) < 7
    measured = drawn.measure(family.candidates[0], [7, 2, 9])
    assert [s.prompt for s in measured.samples] == [7, 2, 9]
    pools = bank.samples[family.decoded[0].key]
    for turn, each in enumerate(measured.samples):
        there = [s.ratio for s in pools[drawn.prompts[each.prompt], turn % 2 == 0]]
        assert each.ratio in there


def test_fresh_measurements_decode_the_family_s_candidate() -> None:
    family = families(4)["disguised"]
    made = noisy_bench(6)
    fresh = FreshBench(made, family, 5, np.random.default_rng(0))
    seen: list[int] = []
    measured = fresh.measure(family.candidates[3], [4, 0], on_sample=lambda s: seen.append(s.prompt))
    assert made.measured == [
        (Candidate(draft=PlainDecoding(), draft_length=Fixed()), (fresh.prompts[4], fresh.prompts[0]))
    ]
    assert [s.prompt for s in measured.samples] == seen == [4, 0]


def test_the_share_of_claims_has_an_exact_interval() -> None:
    interval = measurement([1.1, 1.2]).speedup_interval()
    runs = tuple(
        NullRun(best_trial=1.1, confirmed=interval, noise=MachineNoise(cores=2), claims=number < 2)
        for number in range(40)
    )
    check = NullCheck(family="idle", truth="1", num_candidates=3, in_bank=(), runs=runs)
    assert (check.num_claims, check.share.value) == (2, 0.05)
    assert check.share.ci95 == pytest.approx((0.0061, 0.1692), abs=1e-3)


def test_confirmations_of_one_pass_are_compared_with_unused_samples() -> None:
    passes = [measurement([1.2] * 40), measurement([2.0] * 40), measurement([2.0] * 40)]
    found = confirmations_from(passes, 4, np.random.default_rng(0))
    assert len(found) == 15
    first_pass = found[:5]  # the truth lacks the samples in use, up to four of the 40 in this pass
    for each in first_pass:
        assert each.interval.value == pytest.approx(1.2, abs=0.21), "a prompt drawn again uses another pass's sample"
        assert 1.2 + 0.8 * 2 / 3 < each.truth < 1.8
        assert each.is_below
        assert not each.is_covered
    assert all(each.is_above for each in found[5:10])


def test_no_sample_is_used_twice_or_in_the_truth() -> None:
    seconds = iter(range(1, 1000))
    passes = [
        Measurement(samples=tuple(sample(1.0, p, plain_seconds=float(next(seconds))) for p in range(3)))
        for _ in range(4)
    ]
    everything = sum(s.plain_seconds for measured in passes for s in measured.samples)
    for each in confirmations_from(passes, 9, np.random.default_rng(0)):
        # Every prompt is used three times and has one unused sample, so used and unused values add up to all.
        assert 9 * each.interval.value + 3 * each.truth == pytest.approx(everything)


def test_intervals_cover_the_truth_under_independent_noise() -> None:
    stream = np.random.default_rng(0)
    of_prompts = stream.normal(0, 0.15, size=48)
    configurations = []
    for _ in range(12):
        passes = [measurement(np.exp(of_prompts + stream.normal(0, 0.03, size=48)).tolist()) for _ in range(5)]
        configurations.append(
            Configuration(
                candidate=families(1)["idle"].candidates[0],
                kind="exit",
                passes=tuple(passes),
                confirmations=tuple(confirmations_from(passes, 24, stream)),
            )
        )
    check = CoverageCheck(configurations=tuple(configurations), num_prompts=48, num_drawn=24)
    assert 0.88 < check.share < 0.99
    assert check.spread_of_passes == pytest.approx(0.03 / 48**0.5, rel=0.5)
    assert {name: len(found) for name, found in check.by_kind().items()} == {"all": 300, "exit": 300}


def test_an_interval_contains_its_edges() -> None:
    interval = measurement([1.5, 1.5]).speedup_interval()
    assert Confirmation(interval=interval, truth=interval.ci95[0]).is_covered


@pytest.fixture
def check(
    tmp_path: Path, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch, target: Target
) -> Iterator[Check]:
    """Return the integrity check with small sizes, run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    cheap = RoundCosts(draft_step=0.2, verify=(1.0, 1.05, 1.1, 1.15))
    monkeypatch.setattr("decoding.timing.draft_costs.measure_round_costs", lambda *_, **__: cheap)
    (tmp_path / "small.yaml").write_text(
        f"model: {checkpoint}\ndataset: {prompts_file}\nmax_new_tokens: 10\ntuning_prompts: 3\nheld_out_prompts: 2\n"
        "prompts_per_trial: 2\ngroup_column: file\n"
    )

    def run(*switches: str, **flags: Any) -> Result:
        sizes = {"config": "small.yaml", "repetitions": 2, "runs": 3, "configurations": 0, "copies": 2, **flags}
        arguments = [part for key, value in sizes.items() for part in (f"--{key}", str(value))]
        return CliRunner().invoke(main, ["evaluate", "integrity", *arguments, *switches])

    return run


def test_one_command_checks_families_and_intervals(tmp_path: Path, check: Check) -> None:
    result = check(configurations=2, passes=3, **{"max-tokens": 2})
    assert result.exit_code == 0, result.output
    out = tmp_path / "evaluate_integrity"
    assert sorted(path.name for path in out.iterdir()) == ["integrity.json", "integrity.txt"]
    text = (out / "integrity.json").read_text()
    assert str(tmp_path) not in text, "no machine paths"
    found = json.loads(text)
    assert [each["family"] for each in found["nulls"]] == ["disguised", "idle", "whole"]
    for each in found["nulls"]:
        assert len(each["runs"]) == 3
        assert each["share"]["value"] == sum(run["claims"] for run in each["runs"]) / 3
        assert all(len(measured["samples"]) == 2 * 2 for measured in each["in_bank"])
    coverage = found["coverage"]
    assert (coverage["num_prompts"], coverage["num_drawn"]) == (5, 5)
    assert len(coverage["configurations"]) == 2
    for each in coverage["configurations"]:
        assert [len(measured["samples"]) for measured in each["passes"]] == [5, 5, 5]
        assert len(each["confirmations"]) == 15
        assert each["candidate"]["draft_length"]["max_tokens"] <= 2
    for words in ("disguised", "claims", "held-out prompts", "covered", "too high"):
        assert words in result.stdout
        assert words in (out / "integrity.txt").read_text()


def test_fresh_runs_decode_every_measurement(tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bank, "fill", None)
    result = check("--fresh", family="idle", runs=1, out="there")
    assert result.exit_code == 0, result.output
    (found,) = json.loads((tmp_path / "there" / "integrity.json").read_text())["nulls"]
    assert (found["family"], found["in_bank"], len(found["runs"])) == ("idle", [], 1)
    assert "decoded afresh" in result.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"family": "idel"}, ["unknown family 'idel'", "did you mean 'idle'"]),
        ({"repetitions": 1}, ["repetitions", "evaluate integrity --help"]),
        ({"config": "nowhere.yaml"}, ["no such configuration"]),
        ({"out": "small.yaml"}, ["cannot write results into small.yaml"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_input_is_refused_in_one_line(
    tmp_path: Path, check: Check, flags: dict[str, Any], words: list[str]
) -> None:
    refused(check(**flags), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
