"""The replay of logged texts against decoding, on a tiny model with made-up costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, LayerSkip, PromptLookup
from decoding.target import Target
from studies.contract import Candidate
from tests.support.costs import made_up_costs
from tests.support.records import record
from tuner.cli.main import main
from tuner.evaluation.text_replay import run as evaluation

CANDIDATES = (
    Candidate(draft=LayerSkip.blocks((4, 5)), draft_length=Fixed(max_tokens=2)),
    Candidate(draft=EarlyExit(exit_layer=2), draft_length=Fixed(max_tokens=1)),
    Candidate(draft=PromptLookup(), draft_length=Fixed(max_tokens=3)),
)
SLOWER = Candidate(draft=EarlyExit(exit_layer=2), draft_length=Fixed(max_tokens=8))
"""The draft of another candidate, with a rule that is slower."""
OLD = {each.key: 1.5 - 0.2 * index for index, each in enumerate(CANDIDATES)}


@pytest.fixture
def evaluate(
    tmp_path: Path, target: Target, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tuner.search.problem.cost_table", lambda *_, **__: made_up_costs(target, 12))
    (tmp_path / "small.yaml").write_text(
        f"model: {checkpoint}\ndataset: {prompts_file}\nmax_new_tokens: 12\ntuning_prompts: 4\nheld_out_prompts: 2\n"
        "prompts_per_trial: 2\ngroup_column: file\n"
    )
    given = ["--config", "small.yaml", "--storage", "sqlite:///old.db", "--experiment", "old"]
    return lambda *more: CliRunner().invoke(main, ["evaluate", "text-replay", *given, *more])


def test_stored_candidates_are_replayed_and_decoded(
    evaluate: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = (*CANDIDATES, SLOWER)
    records = [record(OLD.get(each.key, 0.5), number=number, candidate=each) for number, each in enumerate(known)]
    monkeypatch.setattr(evaluation, "_stored", lambda settings: records)
    result = evaluate("--processor-time", "--threads", "1")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "evaluate_text_replay" / "text_replay.json").read_text())
    check = found["check"]
    assert check["replay"]["texts"] == 4
    assert check["replay"]["left_out"] == 0
    rows = check["candidates"]
    old = {Candidate.model_validate(row["candidate"]).key: row["old"] for row in rows if row["old"] is not None}
    assert old == pytest.approx(OLD)
    drafts = [json.dumps(row["candidate"]["draft"]) for row in rows]
    assert len(drafts) > len(set(OLD)), "lookups are tried beside them"
    assert len(drafts) == len(set(drafts)), "each draft is measured once"
    predicted = [row["predicted"] for row in rows]
    assert predicted == sorted(predicted, reverse=True)
    for row in rows:
        assert [each["prompt"] for each in row["measurement"]["samples"]] == [0, 1]
        assert all(each["identical"] for each in row["measurement"]["samples"])
    for words in ("Spearman", "old figures of these", "best of those measured first", "s for"):
        assert words in result.stdout
    assert str(tmp_path) not in json.dumps(found), "no machine paths"


def test_a_search_without_trials_is_refused(evaluate: Callable[..., Result]) -> None:
    result = evaluate()
    assert result.exit_code == 2
    assert "old: at least 2 finished trials are needed, and there are 0" in result.output


def test_processor_time_of_several_threads_is_refused(
    evaluate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_stored", lambda settings: [record(candidate=each) for each in CANDIDATES])
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    result = evaluate("--processor-time")
    assert result.exit_code == 2
    assert "--processor-time counts one thread of a CPU" in result.output
