"""Predictions against decoding, on a tiny model and with made-up measurements."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner, Result

from decoding.draft_length import RULES, AdaEdl, DraftLengthRule, Fixed, RoundCosts
from decoding.drafts import BitWidth, EarlyExit
from decoding.target import Target
from studies.contract import Candidate
from studies.measurement import Measurement, ratio_interval
from tests.support.costs import made_up_costs
from tests.support.heads import write_heads
from tests.support.records import sample
from tests.support.refusals import refused
from tests.support.tiny import tiny_target
from tuner.cli.main import main
from tuner.evaluation.predictions.check import Compared, PredictionCheck
from tuner.evaluation.predictions.rule_tuning import tune_by_decoding

Check = Callable[..., Result]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def check(here: Path, target: Target, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return the prediction check with small sizes, two exit heads, and made-up costs."""

    def costs(_: Target, *, max_tokens: int, bits: tuple[BitWidth, ...], **options: Any) -> Any:
        return made_up_costs(target, max_tokens, bits)

    monkeypatch.setattr("tuner.evaluation.predictions.check.measure_cost_table", costs)
    monkeypatch.setattr("tuner.evaluation.predictions.rule_tuning.SKIP_SETS", 10)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cheap = RoundCosts(draft_step=0.2, verify=(1.0, 1.05, 1.1, 1.15))
    monkeypatch.setattr("decoding.timing.draft_costs.measure_round_costs", lambda *_, **__: cheap)
    (here / "small.yaml").write_text(
        f"model: {checkpoint}\ndataset: {prompts_file}\nmax_new_tokens: 12\ntuning_prompts: 4\nheld_out_prompts: 3\n"
        "prompts_per_trial: 2\ngroup_column: file\n"
    )
    write_heads(target, here / "exit_heads", [2, 4])

    def run(**flags: Any) -> Result:
        sizes = {"config": "small.yaml", "configurations": 10, "prompts": 2, "max-tokens": 3, "drafts": 0, **flags}
        arguments = [part for key, value in sizes.items() for part in (f"--{key}", str(value))]
        return CliRunner().invoke(main, ["evaluate", "predictions", *arguments])

    return run


def test_random_configurations_are_predicted_and_decoded(here: Path, check: Check, checkpoint: Path) -> None:
    result = check()
    assert result.exit_code == 0, result.output
    out = here / "evaluate_predictions"
    assert sorted(path.name for path in out.iterdir()) == [
        f"predictions.{kind}" for kind in ("csv", "json", "png", "txt")
    ]
    found = json.loads((out / "predictions.json").read_text())
    assert (found["model"], found["max_new_tokens"]) == (checkpoint.name, 12)
    assert str(here) not in json.dumps(found), "no machine paths"
    pairs = found["pairs"]
    assert len(pairs) == found["predictions"]["all"]["count"] == 10
    kinds = {"skip set": 4, "exit": 2, "exit with head": 2, "lookup first": 1, "lookup alone": 1}
    assert {kind: found["predictions"][kind]["count"] for kind in kinds} == kinds
    assert {pair["candidate"]["draft_length"]["rule"] for pair in pairs} <= set(RULES)
    for pair in pairs:
        samples = pair["measurement"]["samples"]
        assert [each["prompt"] for each in samples] == [0, 1]
        assert all(each["identical"] for each in samples)
        assert pair["predicted"] == pytest.approx(pair["predicted_tokens_per_round"] / pair["predicted_round_cost"])
        value = pair["measured"]["value"]
        assert value == pytest.approx(pair["measured_tokens_per_round"] / pair["measured_round_cost"])
    fixed = [pair for pair in pairs if pair["candidate"]["draft_length"]["rule"] == "fixed"]
    exits = [pair for pair in fixed if pair["kind"] in ("exit", "lookup alone")]
    for pair in exits:  # a fixed rule and a draft that reads no rejected tokens: the replay is exact
        assert pair["predicted_tokens_per_round"] == pytest.approx(pair["measured_tokens_per_round"])
    rows = list(csv.DictReader((out / "predictions.csv").read_text().splitlines()))
    assert [float(row["predicted"]) for row in rows] == pytest.approx([p["predicted"] for p in pairs], abs=1e-4)
    assert (out / "predictions.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "predictions.txt").read_text()
    for words in ("Spearman", "measured / predicted", "leave one out", "cost per round", "0 of 20 differ from plain"):
        assert words in text
        assert words in result.stdout
    assert "…" not in text


def test_quantised_drafts_are_predicted_and_decoded_where_asked_for(here: Path, check: Check) -> None:
    assert check(configurations=6, bits=8).exit_code == 0
    found = json.loads((here / "evaluate_predictions" / "predictions.json").read_text())
    pairs = [pair for pair in found["pairs"] if pair["kind"] == "quantised"]
    assert len(pairs) == found["predictions"]["quantised"]["count"] == 1
    assert all(pair["candidate"]["draft"]["bits"] == 8 for pair in pairs)
    assert all(each["identical"] for pair in pairs for each in pair["measurement"]["samples"])


def test_predictions_are_compared_by_the_category_of_the_prompts(here: Path, check: Check) -> None:
    config = here / "small.yaml"
    config.write_text(config.read_text() + "category_column: file\n")
    assert check(configurations=4, prompts=4).exit_code == 0
    found = json.loads((here / "evaluate_predictions" / "predictions.json").read_text())
    names = sorted(found["pairs"][0]["categories"])
    assert len(names) > 1
    for name in names:
        assert found["predictions"][f"category {name}"]["count"] == 4
    for pair in found["pairs"]:
        samples = pair["measurement"]["samples"]
        ratios = [
            each["plain_seconds"] / each["plain_tokens"] * each["draft_tokens"] / each["draft_seconds"]
            for each in samples
        ]
        of_categories = [pair["categories"][name]["measured"] for name in names]
        rounding = 1e-9
        assert min(ratios) - rounding <= min(of_categories) <= max(of_categories) <= max(ratios) + rounding
        assert min(each["predicted"] for each in pair["categories"].values()) <= pair["predicted"] * 1.01
    assert "By category of the prompts" in (here / "evaluate_predictions" / "predictions.txt").read_text()


def test_rules_are_tuned_by_both_methods_and_compared_on_held_out_prompts(
    here: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {name: RULES[name] for name in ("fixed", "calibrated_thompson")}
    monkeypatch.setattr("tuner.evaluation.predictions.run.RULES", rules)
    result = check(configurations=2, drafts=3, replays=20, trials=2, out="there")
    assert result.exit_code == 0, result.output
    found = json.loads((here / "there" / "predictions.json").read_text())["tuning"]
    assert len(found["tuned"]) == 3 * len(rules)
    kinds = [(each["draft"]["kind"], bool(each["draft"].get("head"))) for each in found["tuned"][:: len(rules)]]
    assert kinds == [("early_exit", False), ("layer_skip", False), ("early_exit", True)]
    for each in found["tuned"]:
        assert each["replayed"]["rule"] == each["decoded"]["rule"]
        both = [Measurement.model_validate(each[f"{way}_measurement"]) for way in ("replayed", "decoded")]
        assert [s.prompt for s in both[0].samples] == [0, 1, 2]
        assert each["ratio"] == ratio_interval(*both).model_dump(mode="json")
        if each["replayed"] == each["decoded"]:
            assert each["ratio"]["value"] == 1.0
    seconds = [sum(each[key] for each in found["tuned"]) for key in ("replay_seconds", "decoding_seconds")]
    assert found["share_of_seconds"] == pytest.approx((seconds[0] + found["shared_seconds"]) / seconds[1])
    for words in ("tuned by replay vs by real decoding", "geometric mean", "of the time of tuning by decoding"):
        assert words in " ".join(result.stdout.split())


def test_tuning_by_decoding_begins_with_defaults_and_repeats_nothing() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    asked: list[DraftLengthRule] = []

    def measure(rule: DraftLengthRule) -> float:
        asked.append(rule)
        return 2.0 - abs(rule.max_tokens - 2)

    trials: list[None] = []
    best = tune_by_decoding(measure, "fixed", max_tokens=4, num_trials=20, seed=0, on_trial=lambda: trials.append(None))
    assert asked[0] == Fixed(max_tokens=4), "the default, clipped to the range"
    assert len(asked) == len({rule.max_tokens for rule in asked}) <= 4
    assert len(trials) == 20
    assert best == Fixed(max_tokens=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"configurations": 1}, ["--configurations", "evaluate predictions --help"]),
        ({"config": "nowhere.yaml"}, ["no such configuration"]),
        ({"model": "no/such-model"}, ["no such model"]),
        ({"out": "small.yaml"}, ["cannot write results into small.yaml"]),
        ({"out": "no/such/folder"}, ["cannot write results into no/such/folder"]),
        ({"tuning-prompts": 500}, ["too few prompts"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_input_is_refused_in_one_line(here: Path, check: Check, flags: dict[str, Any], words: list[str]) -> None:
    refused(check(**flags), *words)
    assert sorted(path.name for path in here.iterdir()) == ["exit_heads", "small.yaml"]


def test_a_head_of_another_model_is_refused(here: Path, check: Check, target: Target) -> None:
    write_heads(target, here / "exit_heads", [3], weights_sha256="0" * 64)
    refused(check(), "belongs to another model")


def test_each_group_has_its_own_accuracy() -> None:
    def pair(kind: str, rule: DraftLengthRule, predicted: float, measured: float) -> Compared:
        found = Measurement(samples=(sample(measured, 0), sample(measured, 1)))
        return Compared(
            candidate=Candidate(draft=EarlyExit(exit_layer=2), draft_length=rule),
            kind=kind,
            predicted=predicted,
            corrected=measured,
            measured=found.speedup_interval(),
            predicted_tokens_per_round=2 * predicted,
            measured_tokens_per_round=2 * measured,
            predicted_round_cost=2.0,
            measured_round_cost=2.0,
            measurement=found,
        )

    check = PredictionCheck(
        pairs=(pair("exit", Fixed(), 1.0, 1.1), pair("exit", AdaEdl(), 2.0, 2.0), pair("skip set", Fixed(), 1.0, 2.0)),
        costs=made_up_costs(tiny_target()),
        cost_seconds=1.0,
        prediction_seconds=2.0,
        decoding_seconds=3.0,
    )
    groups = check.by_group()
    assert {name: len(pairs) for name, pairs in groups.items()} == {
        "all": 3,
        "exit": 2,
        "skip set": 1,
        "ada_edl": 1,
        "fixed": 2,
    }
    assert check.raw(groups["skip set"]).worst_error == pytest.approx(0.5)
    assert check.raw(groups["exit"]).worst_error == pytest.approx(1 - 1 / 1.1)
    assert check.corrected(check.pairs).worst_error == pytest.approx(0.0)
    assert check.tokens_per_round(check.pairs).median_error == pytest.approx(check.raw(check.pairs).median_error)
    assert check.round_cost(check.pairs).worst_error == 0.0
