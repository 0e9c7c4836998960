"""A whole search on a tiny model, from the command to the profile that `generate` loads."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding.deploy import load_decoder
from decoding.profile import DraftProfile
from studies.contract import Candidate, TrialRecord
from tests.support.benches import charge, per_token
from tests.support.commands import SearchCommand
from tests.support.stored_trials import stored_records
from tests.support.tiny import write_tiny_prompts
from tuner.cli.main import main
from tuner.measuring.paired import Bench
from tuner.review.document import SearchResult
from tuner.search import decision


@pytest.fixture
def rigged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charge plain decoding three times as much as drafts, so that a draft wins on a model too small to gain from one."""
    charge(monkeypatch, per_token(plain=3.0, drafted=1.0))


def _runs(workplace: Path) -> tuple[Any, list[Any]]:
    """The parent run and the nested ones."""
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{workplace.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1
    return parents[0], [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]


def _records(workplace: Path) -> list[TrialRecord]:
    return stored_records(workplace / "sdtune.db")


@pytest.mark.usefixtures("rigged", "drawn_pictures")
def test_from_the_command_to_a_profile_that_generate_loads_and_everything_in_mlflow(
    run_search: SearchCommand, workplace: Path, checkpoint: Path
) -> None:
    """One search for all: what it prints, its profile in use, and what it leaves behind."""
    result = run_search(stock="yes")
    assert result.exit_code == 0, result.output
    for word in (
        "transformers' own generation, all in turns on 4 of these prompts",
        "hf-prompt-lookup",
        "plain decoding",
        "conf_layers",
        "draft_length",
        "3.00 [3.00, 3.00]",
        "4/4",
        "mlflow ui",
        "verdict  ",
    ):
        assert word in result.stdout

    profile = DraftProfile.load("profile.yaml")
    assert profile.draft.kind in {"layer_skip", "early_exit"}
    assert profile.measured is not None
    assert profile.measured.speedup.value == pytest.approx(3.0)
    assert profile.measured.exact.identical == profile.measured.exact.prompts == 4
    assert profile.measured.dataset.held_out_prompts == 4
    assert {name: each.prompts for name, each in profile.measured.stock.items()} == {"hf": 4, "hf-prompt-lookup": 4}

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    inputs = AutoTokenizer.from_pretrained(checkpoint)("w1 w2 w3", return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    drafted = model.generate(**inputs, max_new_tokens=20, do_sample=False, custom_generate=load_decoder("profile.yaml"))
    assert torch.equal(plain, drafted)

    shown = CliRunner().invoke(main, ["show", "profile.yaml"])
    assert shown.exit_code == 0
    assert "3.00x, 95 % interval 3.00 to 3.00" in shown.stdout
    assert "over hf" in shown.stdout
    data = json.loads(CliRunner().invoke(main, ["show", "profile.yaml", "--json"]).stdout)
    assert DraftProfile.model_validate(data) == profile
    _check_mlflow(workplace)


def _check_mlflow(workplace: Path) -> None:
    parent, nested = _runs(workplace)
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["speedup"] == pytest.approx(3.0)
    assert "hip" in parent.data.tags["verdict"]
    assert {"end_to_end_speedup", "time_to_first_token_seconds", "speedup_low"} <= set(parent.data.metrics)
    assert parent.data.metrics["search_seconds"] > 0
    assert {"model", "dataset", "device_name", "git_revision", "version.torch", "seed"} <= set(parent.data.params)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{workplace.parent / 'mlflow.db'}")
    experiment = [parent.info.experiment_id]
    ranked = client.search_runs(experiment, filter_string="metrics.speedup > 0", order_by=["metrics.speedup DESC"])
    assert [each.info.run_id for each in ranked] == [parent.info.run_id], "a ranking has the search once"
    steps = [each.step for each in client.get_metric_history(parent.info.run_id, "best_speedup")]
    assert steps == sorted(set(steps))
    assert len(steps) > 1
    assert "| hf-prompt-lookup |" in parent.data.tags["mlflow.note.content"]
    assert {"stock/hf_tokens_per_second", "stock/profile_over_hf-prompt-lookup"} <= set(parent.data.metrics)
    assert [run.info.run_id for run in nested if "sdtune.winner" in run.data.tags] == [
        parent.data.tags["sdtune.winner"]
    ]
    (logged,) = client.search_logged_models([parent.info.experiment_id])
    assert (logged.source_run_id, str(logged.status)) == (parent.info.run_id, "READY")
    store = ["--tracking-uri", f"sqlite:///{workplace.parent / 'mlflow.db'}"]
    promotion = CliRunner().invoke(
        main, ["promote", parent.info.run_id, "--name", "of-searches", "--why", "a test", *store]
    )
    assert "models:/of-searches@champion, version 1" in promotion.output
    champion = client.get_model_version_by_alias("of-searches", "champion")
    assert (champion.tags["sdtune.model_id"], champion.run_id) == (logged.model_id, parent.info.run_id)
    assert parent.inputs.dataset_inputs[0].dataset.name.endswith("prompts.jsonl")
    assert len(nested) == len(_records(workplace))
    for run in nested:
        of_kind = {"layer_skip": {"skip_attention"}, "early_exit": {"exit_layer", "exit_head"}, "none": set()}
        assert {"study", "kind", "rule"} | of_kind[run.data.params["kind"]] <= set(run.data.params)
        assert run.data.tags["state"] in {"COMPLETE", "PRUNED", "FAIL"}
        assert {"tuning_speedup", "tokens_per_second", "draft_acceptance_rate", "tokens_per_round", "exact"} <= set(
            run.data.metrics
        )
        assert {"tuning_end_to_end_speedup", "time_to_first_token_seconds", "mean_acceptance_length"} <= set(
            run.data.metrics
        )
    folder = Path(parent.info.artifact_uri.removeprefix("file://"))
    assert {path.name for path in folder.iterdir()} == {
        "profile.yaml",
        "trials.csv",
        "held_out.csv",
        "race.csv",
        "config.yaml",
        "search.json",
        "report.html",
    }
    made = CliRunner().invoke(
        main,
        ["report", "profile.yaml", "--tracking-uri", f"sqlite:///{workplace.parent / 'mlflow.db'}", "--out", "r.html"],
    )
    assert made.exit_code == 0, made.output
    assert Path("r.html").read_text() == (folder / "report.html").read_text()
    Path("r.html").unlink()
    review = SearchResult.model_validate_json((folder / "search.json").read_text())
    assert review.run_id == parent.info.run_id
    assert review.comparison is not None
    assert {name: (each.texts, each.identical) for name, each in review.comparison.contenders.items()} == dict.fromkeys(
        ("profile", "hf", "hf-prompt-lookup"), (4, 4)
    )
    samples = list(csv.DictReader((folder / "held_out.csv").read_text().splitlines()))
    assert [sample["prompt"] for sample in samples if sample["trial"] == review.winner.trial] == ["0", "1", "2", "3"]
    rows = list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))
    assert len(rows) == len(nested)
    # One lock is of the search, the other of logging a trial.
    assert sorted(path.suffix for path in workplace.iterdir()) == [".db", ".lock", ".lock", ".yaml"]


@pytest.mark.usefixtures("rigged")
def test_the_same_command_after_the_end_shows_its_result_and_measures_nothing(
    run_search: SearchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_search(study="conf_layers")
    assert first.exit_code == 0, first.output
    assert " 3.00 [3.00, 3.00] times as fast as plain decoding on held-out prompts (" in first.stdout
    assert "try      sdtune generate profile.yaml --prompt TEXT --compare" in first.stdout
    profile = Path("profile.yaml").read_bytes()
    Path("profile.yaml").unlink()
    with monkeypatch.context() as patches:
        patches.setattr("tuner.search.run.open_bench", lambda *_: pytest.fail("prompts are decoded"))
        again = run_search(study="conf_layers")
        elsewhere = run_search(study="conf_layers", out="elsewhere.yaml", quiet=True)
    assert elsewhere.stderr == ""
    assert again.exit_code == elsewhere.exit_code == 0, again.output
    assert "its result stands" in again.stderr
    assert again.stdout == first.stdout
    assert Path("profile.yaml").read_bytes() == Path("elsewhere.yaml").read_bytes() == profile
    # Other settings without another trial neither race nor measure again.
    monkeypatch.setattr("tuner.search.run.race", lambda *_, **__: pytest.fail("the finalists race again"))
    monkeypatch.setattr("tuner.search.decision._measured", lambda *_: pytest.fail("held-out prompts are decoded"))
    longer = run_search(study="conf_layers", timeout="20m")
    assert longer.exit_code == 0, longer.output
    found = DraftProfile.load("profile.yaml")
    before = DraftProfile.load("elsewhere.yaml")
    assert found.measured is not None
    assert before.measured is not None
    assert (found.draft, found.measured.speedup) == (before.draft, before.measured.speedup)
    assert found.measured.confirmations == 1


@pytest.mark.usefixtures("rigged")
def test_a_search_that_goes_on_pools_its_confirmations_and_counts_its_winners(
    run_search: SearchCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[str, int]] = []
    decode = decision._measured

    def watched(bench: Bench, candidate: Candidate, indices: Sequence[int], *rest: Any) -> Any:
        measured.extend((candidate.key, index) for index in indices)
        return decode(bench, candidate, indices, *rest)

    monkeypatch.setattr(decision, "_measured", watched)
    assert run_search(study="conf_layers", trials="2").exit_code == 0
    first = _records(workplace)
    result = run_search(study="conf_layers", trials="4")
    assert result.exit_code == 0, result.output
    assert "2 finished trials found" in result.stderr
    assert _records(workplace)[:2] == first
    assert len(_records(workplace)) == len(_runs(workplace)[1]) == 4
    assert len(measured) == len(set(measured)), "a candidate is decoded once on a held-out prompt, whatever the runs"
    confirmed = DraftProfile.load("profile.yaml").measured
    assert confirmed is not None
    assert confirmed.exact.prompts == 4
    num_winners = len({key for key, _ in measured})
    assert confirmed.confirmations <= num_winners
    said = f"winner number {confirmed.confirmations} " if confirmed.confirmations > 1 else "both are pooled"
    assert said in result.stdout


def test_ctrl_c_keeps_what_was_found(
    run_search: SearchCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Bench.measure
    calls = iter(range(100))

    def interrupted(self: Bench, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return honest(self, *args, **kwargs)

    monkeypatch.setattr(Bench, "measure", interrupted)
    result = run_search()
    assert result.exit_code == 130
    assert "best so far" in result.stderr
    assert "Traceback" not in result.output
    # A set that is selected again takes over its measurement and is kept as well.
    assert len([record for record in _records(workplace) if record.repeat_of is None]) == 2
    assert _runs(workplace)[0].info.status == "KILLED"
    assert not Path("profile.yaml").exists()


@pytest.mark.usefixtures("rigged")
def test_ctrl_c_never_overwrites_a_confirmed_profile(
    run_search: SearchCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_search(study="conf_layers", trials="1").exit_code == 0
    confirmed = Path("profile.yaml").read_text()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "measure", interrupted)
    assert run_search().exit_code == 130
    assert Path("profile.yaml").read_text() == confirmed
    unconfirmed = DraftProfile.load("profile.unconfirmed.yaml")
    assert unconfirmed.measured is None


def test_a_draft_that_changes_the_text_is_never_chosen(
    run_search: SearchCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_everything(drafted: Tensor, choices: Tensor) -> Tensor:
        return torch.cat([torch.tensor([drafted.shape[0]]), choices[-1:], drafted])

    monkeypatch.setattr("decoding.probe.compare", lambda *args: type("Same", (), {"is_lossless": True}))
    monkeypatch.setattr("decoding.decode.accept_greedy", accept_everything)
    result = run_search(study="conf_layers")
    assert result.exit_code == 2
    assert "no candidate could be measured" in result.stderr
    assert "differs from plain decoding" in result.stderr
    assert all(record.state == "FAIL" for record in _records(workplace))
    assert not Path("profile.yaml").exists()


def test_a_dry_run_of_few_prompts_writes_nothing(workplace: Path, checkpoint: Path) -> None:
    data = write_tiny_prompts(workplace.parent / "few.jsonl", count=12)
    result = CliRunner().invoke(main, ["search", str(checkpoint), str(data), "--max-new-tokens", "8", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "6 for tuning (3 per trial), 6 held out" in result.stdout
    assert "nothing was written" in result.stdout
    assert "joint" in result.stdout
    assert list(workplace.iterdir()) == []


@pytest.mark.usefixtures("rigged", "uncompiled")
def test_runner_of_the_search_is_that_of_the_profile(
    run_search: SearchCommand, workplace: Path, checkpoint: Path
) -> None:
    expected = ("static", 4)
    result = run_search(study="conf_layers", trials="2", exact="bitwise", exact_width="4")
    assert result.exit_code == 0, result.output
    profile = DraftProfile.load(workplace / "profile.yaml")
    assert (profile.decoding.runner, profile.decoding.exact_width) == expected
    assert profile.measured is not None
    assert profile.measured.exact.identical == profile.measured.exact.prompts
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    target = load_decoder(workplace / "profile.yaml").decoder_for(model).target
    assert (target.runner.name, target.runner.exact_width) == expected
    shown = CliRunner().invoke(main, ["show", str(workplace / "profile.yaml")]).output
    assert "runner static" in shown
    assert "bit-exact on 4 positions" in shown


def test_sampling_is_tuned_too(run_search: SearchCommand) -> None:
    result = run_search(temperature="0.8", study="conf_layers", trials="2")
    assert result.exit_code == 0, result.output
    assert DraftProfile.load("profile.yaml").decoding.temperature == pytest.approx(0.8)


def test_a_search_for_a_length_without_a_draft_says_what_to_do(run_search: SearchCommand) -> None:
    result = run_search(study="draft_length")
    assert result.exit_code == 2
    assert "no candidate could be measured in 0 trials; draft_length: there is no draft" in result.stderr
    assert "run conf_layers before it" in result.stderr
