"""`sdtune tune` with a stand-in for llama.cpp: what is started, compared and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from decoding.drafts import LayerSkip
from tests.support.engine_stub import write_llama_cpp
from tests.support.profiles import save_profile
from tests.support.refusals import refused
from tests.support.tiny import write_tiny_prompts
from tuner.cli.main import main
from tuner.engines.bench import Crowd, EngineDecoding, LoadFigures

Tune = Callable[..., Result]
SKIP = LayerSkip.blocks((2, 3))


@pytest.fixture
def tune(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Run the command in a folder with prompts and the stand-in."""
    monkeypatch.chdir(tmp_path)
    write_tiny_prompts(Path("prompts.jsonl"))
    write_llama_cpp(Path("llama.cpp"))

    def run(*flags: str) -> Result:
        numbers = ("--tuning-prompts", "4", "--held-out-prompts", "4", "--max-new-tokens", "12")
        what = ("--profile", "profile.yaml") if Path("profile.yaml").exists() else ("--model", str(checkpoint))
        command = ["tune", *what, "--dataset", "prompts.jsonl", *numbers]
        return CliRunner().invoke(main, [*command, "--engine", "llama.cpp", "--engine-home", "llama.cpp", *flags])

    return run


def _document() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(Path("tune/tune.json").read_text()))


def test_each_load_is_measured_and_gets_its_flags(tune: Tune) -> None:
    done = tune("--sequences", "2", "--sequences", "1")
    assert done.exit_code == 0, done.output
    found = _document()
    assert {each["sequences"] for each in found["tried"]} == {1, 2}
    assert [each["sequences"] for each in found["chosen"]] == [1, 2]
    assert all(each["texts"] == each["identical"] == 8 for each in found["tried"]), "four groups of two"
    assert all("--spec-type ngram-simple" in use["flags"] for use in found["use"])
    assert found["provenance"]["revision"]
    table = " ".join(Path("tune/tune.txt").read_text().split())
    assert "speculation on held-out prompts" in table
    assert "use" in table


def test_a_draft_model_is_measured_at_two_lengths_first(tune: Tune) -> None:
    done = tune("--draft-model", "small.gguf")
    assert done.exit_code == 0, done.output
    settings = [each["setting"] for each in _document()["tried"]]
    assert {"draft model, 8 tokens", "draft model, 2 tokens"} <= set(settings)


def test_a_killed_tuning_goes_on_and_a_finished_one_measures_anew(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, measured, killed_after = Crowd.measure, list[str](), 2

    def counted(crowd: Crowd, plain: EngineDecoding, drafted: EngineDecoding, *rest: Any) -> LoadFigures:
        if len(measured) == killed_after:
            raise KeyboardInterrupt
        measured.append(drafted.name)
        return measure(crowd, plain, drafted, *rest)

    monkeypatch.setattr(Crowd, "measure", counted)
    flags = ("--draft-model", "small.gguf")
    assert tune(*flags).exit_code != 0
    before, killed_after = list(measured), -1
    with Path("tune/measured.jsonl").open("a") as file:
        file.write('{"key": "cut off')
    measured.clear()
    done = tune(*flags)
    assert done.exit_code == 0, done.output
    assert "going on from what tune holds (2 measured)" in done.output
    tried = [each["setting"] for each in _document()["tried"]]
    assert tried[:2] == before, "those of the killed run are among the result's"
    assert measured[: len(tried) - 2] == tried[2:], "nothing is measured twice; then comes the confirmation"
    measured.clear()
    assert tune(*flags).exit_code == 0
    assert measured[:2] == before, "a finished tuning is not gone on with"


def test_a_draft_that_does_not_start_is_named_and_left_out(tune: Tune) -> None:
    done = tune("--engine-args", "--refuse ngram-simple", "--draft-model", "small.gguf")
    assert done.exit_code == 0, done.output
    found = _document()
    assert any("n-grams" in name and "it has no ngram-simple" in reason for name, reason in found["failed"].items())
    assert {each["setting"].split(",")[0] for each in found["tried"]} == {"draft model"}


def test_an_engine_that_runs_no_draft_is_an_error(tune: Tune) -> None:
    refused(tune("--engine-args", "--refuse ngram-simple"), "it has no ngram-simple")


def test_the_draft_of_a_profile_gets_a_schedule_that_its_export_takes(tune: Tune, checkpoint: Path) -> None:
    save_profile(Path("profile.yaml"), checkpoint, SKIP)
    done = tune("--sequences", "2", "--sequences", "1")
    assert done.exit_code == 0, done.output
    found = _document()
    assert {each["setting"].split(",")[0] for each in found["tried"]} == {"the profile's export"}
    assert [load["sequences"] for load in found["schedule"]["loads"]] == [1, 2]
    assert found["schedule"]["draft"]["kind"] == "layer_skip"
    assert found["model"] == checkpoint.name


def test_a_changed_profile_is_measured_anew(tune: Tune, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, killed = Crowd.measure, KeyboardInterrupt

    def once(crowd: Crowd, plain: EngineDecoding, drafted: EngineDecoding, *rest: Any) -> LoadFigures:
        if Path("tune/measured.jsonl").read_text().count("\n") > 1:
            raise killed
        return measure(crowd, plain, drafted, *rest)

    monkeypatch.setattr(Crowd, "measure", once)
    save_profile(Path("profile.yaml"), checkpoint, SKIP)
    assert tune().exit_code != 0
    save_profile(Path("profile.yaml"), checkpoint, LayerSkip.blocks((1, 2)))
    assert "going on" not in tune().output
    monkeypatch.setattr(Crowd, "measure", measure)
    assert "going on from what tune holds (1 measured)" in tune().output


def test_settings_that_do_not_go_together_are_refused(tune: Tune, checkpoint: Path) -> None:
    save_profile(Path("profile.yaml"), checkpoint, SKIP)
    refused(tune("--draft-model", "small.gguf"), "draft_model and profile are both a draft")
    refused(tune("--sequences", "3"), "--sequences 3 needs at least 6 held-out prompts")
    command = ["tune", "--dataset", "prompts.jsonl", "--engine", "llama.cpp"]
    refused(CliRunner().invoke(main, command), "a model or a profile is needed")


def test_a_different_text_is_an_error(tune: Tune) -> None:
    refused(tune("--engine-args", "--wrong"), "texts differ", "llama.cpp's own plain decoding")
    assert _document()["use"] == []
