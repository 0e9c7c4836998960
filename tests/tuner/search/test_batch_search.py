"""A search for batches, from the command to a lossless profile."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding.decoder import Decoder
from decoding.deploy import load_decoder
from decoding.profile import DraftProfile
from decoding.target import Target
from studies.contract import TrialRecord
from tests.support.benches import charge, per_token
from tests.support.commands import SearchCommand
from tests.support.stored_trials import stored_records
from tuner.cli.main import main

SMALL = "studies: {joint: {num_surveyed: 30, max_tokens: 4, num_drafts: 2, num_lookups: 1, kinds: [skip_set, lookup]}}"


@pytest.fixture
def run_joint(run_search: SearchCommand, workplace: Path) -> SearchCommand:
    """The default search, made small."""
    config = workplace.parent / "small.yaml"
    config.write_text(config.read_text().replace("study: [conf_layers, exit_layer, draft_length]\n", "") + SMALL + "\n")
    return run_search


@pytest.fixture
def rigged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charge plain decoding three times as much as drafts, so that a draft wins on a model too small to gain from one."""
    charge(monkeypatch, per_token(plain=3.0, drafted=1.0))


def _records(study: str) -> list[TrialRecord]:
    return stored_records(Path("sdtune.db"), f"tiny/{study}")


@pytest.mark.usefixtures("rigged")
def test_search_for_batches_yields_a_lossless_profile(
    run_joint: SearchCommand, workplace: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: set[int] = set()
    decode = Decoder.batch_steps
    monkeypatch.setattr(
        Decoder, "batch_steps", lambda self, requests: (sizes.add(len(requests)), decode(self, requests))[1]
    )
    result = run_joint(batch_size="2", held_out_prompts="5")
    assert result.exit_code == 0, result.output
    assert sizes == {2}
    assert "Held-out prompts in batches of 2" in result.stdout
    assert "4/4" in result.stdout
    assert "5 prompts make 2 batches of 2: 1 left out" in " ".join(result.stderr.split())
    assert "2 sequences in lockstep: a pass takes" in " ".join(result.stderr.split())

    for record in _records("joint"):
        assert record.measurement is not None
        assert [sample.prompt for sample in record.measurement.samples] == [0, 1], "4 prompts a trial"
        assert (record.measurement.num_prompts, record.measurement.num_identical) == (4, 4)
        assert record.notes["predicted_speedup"] > 0

    profile = DraftProfile.load("profile.yaml")
    assert profile.measured is not None
    assert profile.measured.batch_size == 2
    assert (profile.measured.exact.prompts, profile.measured.exact.identical) == (4, 4)
    assert profile.measured.dataset.held_out_prompts == 5
    assert profile.measured.speedup.value == pytest.approx(3.0)
    shown = CliRunner().invoke(main, ["show", "profile.yaml"])
    assert "2 prompts in lockstep" in " ".join(shown.stdout.split())

    runs = mlflow.MlflowClient(tracking_uri=f"sqlite:///{workplace.parent / 'mlflow.db'}")
    experiment = runs.get_experiment_by_name("tiny")
    (parent,) = [
        run for run in runs.search_runs([experiment.experiment_id]) if "mlflow.parentRunId" not in run.data.tags
    ]
    assert parent.data.params["batch_size"] == "2"
    assert parent.data.metrics["prompts"] == 4

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left", pad_token="<unk>")
    inputs = tokenizer(["w1 w2 w3", "w9 w4 w4 w7 w1"], return_tensors="pt", padding=True, return_token_type_ids=False)
    how = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    plain = model.generate(**inputs, **how)
    assert torch.equal(plain, model.generate(**inputs, **how, custom_generate=load_decoder("profile.yaml")))


def test_search_of_another_batch_size_is_not_mixed_in(run_search: SearchCommand, workplace: Path) -> None:
    settings = {"study": "conf_layers", "trials": "1"}
    assert run_search(**settings).exit_code == 0
    before = _records("conf_layers")
    refused = run_search(**settings, batch_size="2")
    assert refused.exit_code == 2
    assert "was a search with another batch size: choose another --experiment or --storage" in refused.stderr
    assert _records("conf_layers") == before


def test_texts_that_take_turns_are_said_to(
    run_search: SearchCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "unbatchable_reason", "for the sake of the test")
    result = run_search("--dry-run", batch_size="2")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "the 2 sequences of a batch take turns, as no pass can be shared: for the sake of the test" in said
    assert "take turns" not in run_search("--dry-run").stderr


def test_dry_run_says_what_a_trial_decodes(run_search: SearchCommand, workplace: Path) -> None:
    result = run_search("--dry-run", batch_size="3", tuning_prompts="8", held_out_prompts="6")
    assert result.exit_code == 0, result.output
    assert "8 for tuning (6 per trial), 6 held out, 10 tokens each, in batches of 3" in " ".join(result.stdout.split())
