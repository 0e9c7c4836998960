"""Comparison of rules on a tiny model: all rules and fixed lengths, on one or several kinds of text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from decoding.draft_length import AdaEdl, DraftLengthRule, Fixed, RoundCosts
from decoding.drafts import LayerSkip, PlainDecoding
from decoding.target import Target
from studies.measurement import Measurement
from tests.support.heads import write_heads
from tests.support.records import sample
from tests.support.refusals import refused
from tests.support.tiny import save_tiny_checkpoint, write_tiny_prompts
from tuner.cli.main import main
from tuner.evaluation.rules.compare import RuleComparison, RuleEntry, TextKind
from tuner.measuring.baseline import Baseline, decode_baseline

LEARNING = ("beta_thompson", "calibrated_thompson")
LABELS = [
    *(f"fixed {length}" for length in range(1, 4)),
    *("top_probability", "ada_edl", "ada_edl_published", "max_confidence", "adaptive_exit"),
    *(label for name in LEARNING for label in (name, f"{name}, warm")),
    "the profile's own",
]
Compare = Callable[..., Result]


@pytest.fixture
def compare(workplace: Path) -> Compare:
    """Return the comparison of rules with small sizes."""

    def run(profile: Path, datasets: list[Path], **flags: Any) -> Result:
        sizes = {"prompts": 3, "warm-up-prompts": 2, "max-tokens": 3, "max-new-tokens": 12, **flags}
        arguments = ["evaluate", "rules", "--profile", str(profile)]
        arguments += [part for dataset in datasets for part in ("--dataset", str(dataset))]
        return CliRunner().invoke(main, [*arguments, *(p for k, v in sizes.items() for p in (f"--{k}", str(v)))])

    return run


def test_all_rules_and_fixed_lengths_on_two_kinds_of_text(
    workplace: Path,
    target: Target,
    checkpoint: Path,
    write_profile: Callable[..., Path],
    compare: Compare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = write_profile(write_heads(target, workplace, [4])[4], AdaEdl(initial_threshold=0.7, max_tokens=3))
    datasets = [write_tiny_prompts(workplace / "code.jsonl"), write_tiny_prompts(workplace / "prose.jsonl", 30)]
    cheap = RoundCosts(draft_step=0.1, verify=(1.0,) * 4)  # at the costs of so small a model no adaptive rule drafts
    monkeypatch.setattr("decoding.timing.draft_costs.measure_round_costs", lambda *_, **__: cheap)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sdtune", "evaluate", "rules", "a b"])
    result = compare(profile, datasets, out="c.json")
    assert result.exit_code == 0, result.output
    written = json.loads((workplace / "c.json").read_text())
    assert written["provenance"]["command"] == "sdtune evaluate rules 'a b'"
    assert (written["model"], written["dtype"], written["max_new_tokens"]) == (str(checkpoint), "float32", 12)
    assert written["provenance"]["device"]
    assert {"torch", "transformers", "sdtune"} <= set(written["provenance"]["versions"])
    assert [row["label"] for row in written["rules"]] == list(written["samples"]) == LABELS
    prompts = [each["prompt"] for each in written["samples"]["fixed 1"]]
    assert len(set(prompts)) == 6
    for row in written["rules"]:
        samples = written["samples"][row["label"]]
        assert [each["prompt"] for each in samples] == prompts
        assert all(each["identical"] and each["draft_tokens"] == 11 for each in samples)
        columns = row["columns"]
        assert {name: column["prompts"] for name, column in columns.items()} == {"code": 3, "prose": 3, "mixed": 6}
        for name, column in columns.items():
            low, high = column["speedup"]["ci95"]
            assert low <= column["speedup"]["value"] <= high
            best = next(each for each in written["rules"] if each["label"] == written["best_fixed"][name])
            of_fixed = [each["columns"][name]["speedup"]["value"] for each in written["rules"][:3]]
            assert best["columns"][name]["speedup"]["value"] == max(of_fixed)
            assert best["columns"][name]["over_best_fixed"] == {"value": 1.0, "ci95": [1.0, 1.0]}
    rules = {row["label"]: row["rule"] for row in written["rules"]}
    assert all(rule["max_tokens"] == 3 for label, rule in rules.items() if not label.startswith("fixed"))
    for name in LEARNING:
        assert rules[name]["costs"] is None
        assert rules[f"{name}, warm"]["costs"] is not None
        assert rules[f"{name}, warm"]["prior"] != rules[name]["prior"], "warmed up on other prompts"
    for word in (*LABELS, "code", "prose", "mixed", "over best fixed (mixed)", "6/6", "exit at 4, trained head"):
        assert word in result.stdout
    assert "…" not in result.stdout
    lines = {
        label: next(line for line in result.stdout.splitlines() if line.strip().startswith(label)) for label in LABELS
    }
    assert sum(line.count("*") for line in lines.values()) == 3, "one best fixed length per column"
    by_label = {row["label"]: row["columns"] for row in written["rules"]}
    for column, label in written["best_fixed"].items():
        assert f"{by_label[label][column]['speedup']['value']:.2f} [" in lines[label]
        assert "*" in lines[label]


def test_one_kind_of_text_has_no_mixed_column_and_each_rule_one_line(
    workplace: Path, write_profile: Callable[..., Path], compare: Compare
) -> None:
    profile = write_profile(LayerSkip.blocks((3, 4)), Fixed(max_tokens=2))
    result = compare(profile, [write_tiny_prompts(workplace / "code.jsonl")])
    assert result.exit_code == 0, result.output
    assert "mixed" not in result.stdout
    assert "the profile's own" not in result.stdout
    assert "over best fixed (code)" in result.stdout
    assert sorted(path.name for path in workplace.iterdir()) == ["code.jsonl", "p.yaml"]


def test_rules_at_several_lengths_and_starts_on_parts_of_one_file(
    workplace: Path, write_profile: Callable[..., Path], compare: Compare
) -> None:
    rows = [json.loads(line) for line in write_tiny_prompts(workplace / "all.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "task": ("code", "prose")[index % 2]}) for index, row in enumerate(rows)]
    (workplace / "all.jsonl").write_text("\n".join(lines))
    profile = write_profile(LayerSkip.blocks((3, 4)), Fixed(max_tokens=2))
    arguments = ["evaluate", "rules", "--profile", str(profile), "--out", "c.json", "--prompts", "2"]
    arguments += ["--dataset", f"{workplace}/all.jsonl#task=code", "--dataset", f"{workplace}/all.jsonl#task=prose"]
    arguments += ["--warm-up-prompts", "1", "--max-new-tokens", "12", "--max-tokens", "4", "--max-tokens", "2"]
    arguments += ["--rules", "ada_edl_published", "--rules", "top_probability"]
    arguments += [
        "--initial-thresholds",
        "0.3",
        "--initial-thresholds",
        "0.6",
        "--temperature",
        "0.7",
        "--top-p",
        "0.9",
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((workplace / "c.json").read_text())
    assert (written["temperature"], written["top_p"]) == (0.7, 0.9)
    asked = ("ada_edl_published from 0.3", "ada_edl_published from 0.6", "top_probability")
    wanted = [f"{label}, K {length}" for length in (2, 4) for label in asked]
    assert [row["label"] for row in written["rules"]] == [*(f"fixed {n}" for n in range(1, 5)), *wanted]
    rules = {row["label"]: row["rule"] for row in written["rules"]}
    chosen = rules["ada_edl_published from 0.6, K 4"]
    assert (chosen["rule"], chosen["initial_threshold"], chosen["max_tokens"]) == ("ada_edl_published", 0.6, 4)
    assert set(written["rules"][0]["columns"]) == {"code", "prose", "mixed"}
    assert all(row["columns"]["mixed"]["identical"] == 4 for row in written["rules"])


def test_each_kind_of_text_has_its_own_best_fixed_length() -> None:
    def entry(label: str, rule: DraftLengthRule, seconds: tuple[float, ...]) -> RuleEntry:
        samples = (sample(1.0, prompt, draft_seconds=taken) for prompt, taken in enumerate(seconds))
        return RuleEntry(label, rule, Measurement(samples=tuple(samples)))

    entries = (
        entry("fixed 1", Fixed(max_tokens=1), (1.0, 1.0, 4.0, 4.0)),
        entry("fixed 2", Fixed(max_tokens=2), (3.0, 3.0, 1.0, 1.0)),
        entry("ada_edl", AdaEdl(), (1.0, 1.0, 1.0, 1.0)),
    )
    comparison = RuleComparison(PlainDecoding(), (TextKind("a", (), (0, 1)), TextKind("b", (), (2, 3))), entries, {})
    assert comparison.columns == {"a": (0, 1), "b": (2, 3), "mixed": (0, 1, 2, 3)}
    best = {column: comparison.best_fixed(column).label for column in comparison.columns}
    assert best == {"a": "fixed 1", "b": "fixed 2", "mixed": "fixed 2"}
    assert comparison.over_best_fixed(entries[2], "a").value == pytest.approx(1.0)
    assert comparison.over_best_fixed(entries[2], "mixed").value == pytest.approx(2.0)


def test_wrong_input_is_refused_in_one_line(
    workplace: Path, target: Target, write_profile: Callable[..., Path], compare: Compare
) -> None:
    code = write_tiny_prompts(workplace / "code.jsonl")
    drafting = write_profile(LayerSkip.blocks((3,)))
    refused(compare(write_profile(PlainDecoding(), name="plain.yaml"), [code]), "plain.yaml decodes plainly")
    (workplace / "other").mkdir()
    same_name = write_tiny_prompts(workplace / "other" / "code.jsonl", 30)
    refused(compare(drafting, [code, same_name]), "the datasets need distinct names", "code, code")
    mixed = write_tiny_prompts(workplace / "mixed.jsonl")
    refused(compare(drafting, [code, mixed]), "none of them 'mixed'")
    other = save_tiny_checkpoint(workplace / "model", seed=1)
    refused(compare(drafting, [code], model=other), "was tuned for", "other weights")
    for out, words in {
        "no/such/c.json": "there is no folder no/such",
        ".": "name a file such as comparison.json",
    }.items():
        refused(compare(drafting, [code], out=out), "cannot write the comparison", words)
    draft = write_heads(target, workplace / "elsewhere", [4])[4]
    without_head = compare(write_profile(draft, name="head.yaml"), [code])
    refused(without_head, "no such exit head", "exit_head_4.safetensors")
    assert "decoding" not in without_head.stderr, "reported before any computation"
    refused(compare(drafting, [workplace / "none.jsonl"]), "no such dataset")
    refused(compare(drafting, [code], prompts=30), "too few prompts")
    refused(compare(drafting, [code], rules="ada_edl_publishd"), "unknown rule", "did you mean 'ada_edl_published'")
    refused(compare(drafting, [code], **{"top-p": 0.9}), "top_p applies to sampling")
    refused(
        compare(drafting, [code], **{"initial-thresholds": 0.99}), "initial_thresholds", "less than or equal to 0.98"
    )


def test_prompts_that_end_too_soon_are_left_out_or_refused(
    workplace: Path,
    write_profile: Callable[..., Path],
    compare: Compare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = write_profile(LayerSkip.blocks((3,)))
    code = write_tiny_prompts(workplace / "code.jsonl")

    def ends_in(*rows: int) -> None:
        """Make the continuations of prompts `rows` end at once: rows 0 and 1 are for warm-up, 2 to 4 are measured."""

        def shortened(*given: Any, **settings: Any) -> Baseline:
            found = decode_baseline(*given, **settings)
            return found.reordered([index for index, row in enumerate(found.rows) if row not in rows])

        monkeypatch.setattr("tuner.evaluation.rules.compare.decode_baseline", shortened)

    with monkeypatch.context() as patch:
        monkeypatch = patch
        ends_in(0, 3)
        result = compare(profile, [code])
        assert result.exit_code == 0, result.output
        assert "code: 1 prompts end too soon to measure and are left out" in result.stderr
        assert "2/2" in result.stdout
    for rows, words in {
        (0, 1): "3 of 3 prompts of code, and 0 of 2 for warm-up",
        (2, 4): "1 of 3 prompts of code",
    }.items():
        with pytest.MonkeyPatch.context() as patch:
            monkeypatch = patch
            ends_in(*rows)
            refused(compare(profile, [code]), words, "at least 2 and 1 are needed")
