"""A whole search over early exits on a tiny model, with heads made beforehand or distilled on the way."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding.deploy import load_decoder
from decoding.drafts import EarlyExit
from decoding.exit_heads import file_sha256, head_name, prompt_sha256, read_facts
from decoding.profile import DraftProfile
from decoding.target import Target
from studies.contract import TrialRecord, TrialState
from tests.support.benches import charge, per_token
from tests.support.commands import SearchCommand
from tests.support.heads import training, write_heads
from tests.support.stored_trials import stored_records
from tests.support.tiny import tiny_target, tiny_tokenizer
from tuner.cli.main import main
from tuner.fields import PromptSettings
from tuner.inputs.prompts import load_prompts
from tuner.measuring.paired import Bench

ExitSearch = Callable[..., Result]
HEADS = {"exit_layer": {"exit_layers": [4, 5], "heads": ["block"], "max_tokens": 4}}


@pytest.fixture
def search(workplace: Path, run_search: SearchCommand) -> ExitSearch:
    """`sdtune search --study exit_layer` with these settings of the study and keys of the configuration."""
    small = yaml.safe_load((workplace.parent / "small.yaml").read_text())

    def run(
        studies: dict[str, Any] = HEADS, *switches: str, keys: dict[str, Any] | None = None, **flags: Any
    ) -> Result:
        config = workplace.parent / "exits.yaml"
        config.write_text(yaml.safe_dump({**small, "heads": "../heads", **(keys or {}), "studies": studies}))
        return run_search(*switches, config=str(config), **{"study": "exit_layer", **flags})

    return run


@pytest.fixture
def rigged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charge plain decoding three times as much as drafts, so that a draft wins on a model too small to gain from one."""
    charge(monkeypatch, per_token(plain=3.0, drafted=1.0))


def _records(workplace: Path) -> list[TrialRecord]:
    return stored_records(workplace / "sdtune.db", "tiny/exit_layer")


def _runs(workplace: Path, kind: str = "search") -> list[Any]:
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{workplace.parent / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    return [run for run in runs if run.data.tags.get("sdtune") == kind]


@pytest.mark.usefixtures("rigged")
def test_profile_with_a_head_is_used_and_the_search_resumes_with_its_heads(
    search: ExitSearch, workplace: Path, target: Target, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = workplace.parent / "heads"
    drafts = write_heads(target, heads, [4, 5], training=training(seconds=20.0))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        result = search()
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith("sdtune: cannot write the exit head profile.exit_head_")
    assert result.stderr.rstrip().endswith("No space left on device")
    left = {path.name for path in workplace.iterdir() if path.suffix != ".lock"}
    assert left == {"sdtune.db"}, "no profile without its head"
    first = _records(workplace)
    assert [record.candidate.draft.kind for record in first] == ["early_exit", "none", "early_exit"]
    assert {"predicted_speedup", "predicted_agreement", "predicted_acceptance"} <= set(first[0].notes)

    result = search(trials="4")
    assert result.exit_code == 0, result.output
    assert "3 finished trials found" in result.stderr
    assert "no exit head" not in result.stderr
    assert _records(workplace)[:3] == first
    assert len(_records(workplace)) == 4
    assert "20 s of distilling exit heads" in " ".join(result.stdout.split()), "both were trained together"
    assert "ada_edl" not in {record.candidate.draft_length.rule for record in _records(workplace)}

    profile = DraftProfile.load("profile.yaml")
    assert isinstance(profile.draft, EarlyExit)
    draft = drafts[profile.draft.exit_layer]
    name = f"profile.exit_head_{draft.exit_layer}.{(draft.head_sha256 or '')[:8]}.safetensors"
    assert profile.draft == draft.model_copy(update={"head": name})
    assert file_sha256(workplace / name) == profile.draft.head_sha256
    left = {path.name for path in workplace.iterdir() if path.suffix != ".lock"}
    assert left == {name, "profile.yaml", "sdtune.db"}
    assert profile.measured is not None
    assert profile.measured.search.distillation_seconds == 20.0
    (run,) = _runs(workplace)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["distillation_seconds"] == 20.0
    assert name in {path.name for path in Path(run.info.artifact_uri.removeprefix("file://")).iterdir()}

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    inputs = AutoTokenizer.from_pretrained(checkpoint)("w1 w2 w3", return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    drafted = model.generate(**inputs, max_new_tokens=20, do_sample=False, custom_generate=load_decoder("profile.yaml"))
    assert torch.equal(plain, drafted)
    shown = CliRunner().invoke(main, ["show", "profile.yaml"])
    assert shown.exit_code == 0
    for words in (name, f"early exit at layer {profile.draft.exit_layer} (trained head)", "20 s to distil exit heads"):
        assert words in shown.stdout
    arguments = ["generate", "profile.yaml", "--prompt", "w3 w4", "--max-new-tokens", "10", "--compare"]
    generated = CliRunner().invoke(main, arguments)
    assert generated.exit_code == 0, generated.output
    assert "tokens   identical (10)" in generated.stderr
    (workplace / name).unlink()
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    assert f"no such exit head: {name}" in refused.stderr

    before = (workplace / "profile.yaml").read_text()
    write_heads(target, heads, [4], training=training(steps=11))
    result = search(trials="5")
    assert result.exit_code == 2
    assert "was a search with another space (head files): choose another --experiment" in result.stderr.splitlines()[-1]
    assert len(_records(workplace)) == 4, "no trial was spent on heads that are not there"
    assert (workplace / "profile.yaml").read_text() == before


@pytest.mark.usefixtures("rigged")
def test_ctrl_c_leaves_an_unconfirmed_profile_with_its_head(
    search: ExitSearch, workplace: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_heads(target, workplace.parent / "heads", [5])[5]
    honest = Bench.measure
    calls = iter(range(100))

    def interrupted(self: Bench, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return honest(self, *args, **kwargs)

    monkeypatch.setattr(Bench, "measure", interrupted)
    result = search()
    assert result.exit_code == 130, result.output
    assert "no exit head in ../heads for exit 4: searching without (--set distill=auto makes them)" in " ".join(
        result.stderr.split()
    )
    name = f"profile.unconfirmed.exit_head_5.{(draft.head_sha256 or '')[:8]}.safetensors"
    unconfirmed = DraftProfile.load("profile.unconfirmed.yaml")
    assert unconfirmed.draft == draft.model_copy(update={"head": name})
    assert unconfirmed.measured is None
    assert load_decoder("profile.unconfirmed.yaml").profile == unconfirmed
    assert not Path("profile.yaml").exists()


def test_missing_heads_are_distilled_first_and_their_seconds_counted_apart(search: ExitSearch, workplace: Path) -> None:
    few = {"steps": 6, "samples": 6, "response_tokens": 16, "checkpoint_every": 3, "prompts": 10}
    studies = {"exit_layer": {"exit_layers": [3], "max_tokens": 3}}
    result = search(studies, keys={"distill": "auto", "distillation": few}, trials="3")
    assert result.exit_code == 0, result.output
    assert "distilling exit heads for exit 3" in result.stderr
    head = read_facts(workplace.parent / "heads" / head_name(3))
    assert head.training is not None
    assert (head.training.steps, len(head.training.prompts_sha256)) == (6, 10), "spare prompts were trained on too"
    (run,) = _runs(workplace)
    assert run.data.metrics["distillation_seconds"] == pytest.approx(head.training.seconds)
    assert run.data.metrics["search_seconds"] >= sum(record.seconds for record in _records(workplace)) > 0
    (distillation,) = _runs(workplace, "distill")
    assert distillation.info.status == "FINISHED"
    drafts = [record.candidate.draft for record in _records(workplace)]
    assert {getattr(draft, "head", None) for draft in drafts} == {None, head_name(3)}
    assert {getattr(draft, "exit_layer", 3) for draft in drafts} == {3}


def test_when_drafting_nothing_is_best_the_profile_says_plain_decoding(
    search: ExitSearch, workplace: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_heads(target, workplace.parent / "heads", [4, 5])
    charge(monkeypatch, per_token(drafted=100.0))
    rules = {"exit_layer": {**HEADS["exit_layer"], "rules": ["ada_edl", "fixed"]}}
    # Four prompts a trial: with two, none is left when a candidate may be given up.
    result = search(rules, trials="4", tuning_prompts="6", prompts_per_trial="4")
    assert result.exit_code == 0, result.output
    assert "verdict  Do not ship: decode plainly" in result.stdout
    assert "now      try more prompts" in result.stdout
    profile = DraftProfile.load("profile.yaml")
    assert (profile.draft.kind, profile.measured) == ("none", None)
    assert not list(workplace.glob("*.safetensors"))
    tried = [(record.candidate.draft_length.rule, record.state) for record in _records(workplace)]
    assert tried[3] == ("ada_edl", TrialState.PRUNED)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("trained on held-out prompts", "was trained on 1 of the 4 held-out prompts"),
        ("of another model", "belongs to another model"),
        ("damaged", "is damaged"),
        ("a file as the folder", "is a file; name a folder"),
    ],
)
def test_unfit_head_is_refused_before_anything_is_run(
    search: ExitSearch, workplace: Path, target: Target, prompts_file: Path, made: str, words: str
) -> None:
    heads = workplace.parent / "heads"
    if made == "trained on held-out prompts":
        sizes: dict[str, Any] = {
            "num_tuning": 4,
            "num_held_out": 4,
            "max_new_tokens": 10,
            "context_length": 256,
            "seed": 0,
        }
        prompts = load_prompts(
            str(prompts_file), tiny_tokenizer(), settings=PromptSettings(group_column="file"), **sizes
        )
        trained_on = (prompt_sha256(prompts.held_out[3].token_ids),)
        write_heads(target, heads, [5], training=training(prompts_sha256=trained_on))
    elif made == "of another model":
        write_heads(tiny_target(seed=1), heads, [5])
    elif made == "damaged":
        write_heads(target, heads, [5])
        path = heads / head_name(5)
        path.write_bytes(path.read_bytes()[:-100])
    else:
        heads.write_text("no folder")
    result = search(keys={"distill": "auto"} if made == "a file as the folder" else None)
    assert result.exit_code == 2, result.output
    assert words in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize(
    "studies",
    [
        {"exit_layer": {"exit_layers": [2, 6]}},
        {"exit_layer": {"exit_layers": [6], "heads": ["none"]}},
        {"draft_length": {"draft": {"exit_layer": 6}}},
    ],
)
def test_exit_that_the_model_does_not_have_is_one_line(
    search: ExitSearch, workplace: Path, studies: dict[str, Any]
) -> None:
    (name,) = studies
    result = search(studies, study=name)
    assert result.exit_code == 2, result.output
    last = result.stderr.splitlines()[-1]
    assert last == f"sdtune: studies.{name}: draft exits at layer 6, but it must be 1 to 5"
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize(("distill", "then"), [("auto", "would be distilled first"), ("never", "are not used")])
def test_dry_run_says_which_heads_there_are(
    search: ExitSearch, workplace: Path, target: Target, distill: str, then: str
) -> None:
    write_heads(target, workplace.parent / "heads", [2])
    result = search({}, "--dry-run", distill=distill)
    assert result.exit_code == 0, result.output
    assert f"heads    ../heads: 1 found; 2 missing ones {then}" in result.stdout
    assert list(workplace.iterdir()) == []
