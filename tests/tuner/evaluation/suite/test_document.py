"""The file of a suite: what it gives to each search, and that every mistake in it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT
from tuner.errors import ConfigError
from tuner.evaluation.suite.configurations import configuration
from tuner.evaluation.suite.contract import Place
from tuner.evaluation.suite.document import Suite, merged
from tuner.evaluation.suite.methods import METHODS

WHOLE: dict[str, Any] = {
    "models": {"tiny": {"model": "somewhere/tiny"}},
    "tasks": {"math": {"dataset": "questions.jsonl#task=math"}, "qa": {"dataset": "qa.jsonl", "max_new_tokens": 16}},
    "methods": {"joint": {"timeout": "8m"}, "swift": {}},
    "search": {"max_new_tokens": 128, "timeout": "5m"},
}


def load(folder: Path, document: Any) -> Suite:
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return Suite.load(path)


def test_the_settings_of_a_search_are_those_of_all_then_of_the_task_then_of_the_method(tmp_path: Path) -> None:
    place = Place(load(tmp_path, WHOLE), tmp_path / "out")
    swift = configuration(place, "tiny", "bfloat16", "qa", "swift")
    assert (swift.model, swift.dtype, swift.dataset) == ("somewhere/tiny", "bfloat16", "qa.jsonl")
    assert (swift.max_new_tokens, swift.timeout, swift.study) == (16, 300.0, ("skip_sets",))
    assert swift.study_settings("skip_sets").method == "swift"
    joint = configuration(place, "tiny", "float32", "math", "joint")
    assert (joint.max_new_tokens, joint.timeout, joint.study) == (128, 480.0, ("joint",))


def test_settings_of_a_study_are_merged_with_those_of_the_method() -> None:
    changed = merged([METHODS["swift"], {"studies": {"skip_sets": {"skip_ratio": 0.3}}}])
    assert changed["studies"] == {"skip_sets": {"method": "swift", "skip_ratio": 0.3}}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_with_a_name_is_a_valid_search(tmp_path: Path, name: str) -> None:
    place = Place(load(tmp_path, {**WHOLE, "methods": [name]}), tmp_path)
    assert configuration(place, "tiny", "float32", "math", name).study


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "suites").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    assert Suite.load(path).tasks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {}}, "unknown key 'model'; did you mean 'models'"),
        ({"models": {"tiny": {"model": "x", "head": "y"}}}, "unknown key 'models.tiny.head'"),
        ({"models": {"a/b": {"model": "x"}}}, "models: 'a/b' is no name for a folder"),
        ({"precisions": ["float8"]}, "precisions.0"),
        ({"search_precision": "bfloat16"}, "search_precision: 'bfloat16' is not one of the precisions: float32"),
        ({"tasks": {"math": {}}}, "key 'tasks.math.dataset' is missing"),
        ({"tasks": {"math": {"dataset": "x", "tunning_prompts": 3}}}, "tasks.math: unknown key 'tunning_prompts'"),
        ({"tasks": {"bench": {"dataset": "x"}}}, "tasks: 'bench' is no name"),
        ({"search": {"max_new_tokens": 0}}, "search: max_new_tokens"),
        ({"search": {"model": "x"}}, "search: key 'model' is set by the suite"),
        ({"search": {"temperature": 1.0}}, "search: temperature: a suite is measured with 0.0, got 1.0"),
        ({"search": {"runner": "auto"}}, "search: runner: a suite compares by one runner"),
        ({"methods": {"joint": {"out": "x"}}}, "methods.joint: key 'out' is set by the suite"),
        ({"methods": ["conf_layer"]}, "methods.conf_layer: unknown method; did you mean 'conf_layers'"),
        ({"methods": {"joint": {"studies": {"joint": {"kind": 1}}}}}, "methods.joint: .*unknown key 'kind'"),
        ({"tuning": {"tuning_prompts": 3}}, "key 'tuning.dataset' is missing"),
        ({"tuning": {"dataset": "x", "tunning_prompts": 3}}, "tuning: unknown key 'tunning_prompts'"),
        ({"tuning": {"dataset": "x"}, "tasks": {"tuning": {"dataset": "y"}}}, "tasks: 'tuning' is the data set of all"),
        ({"tuning": {"dataset": "x"}, "transfer": ["swift"]}, "transfer: with `tuning` every draft is"),
        ({"transfer": ["conf_layers"]}, "transfer: unknown method 'conf_layers'"),
        ({"baselines": ["hf-lookup"]}, "baselines: unknown contender 'hf-lookup'; did you mean 'hf-prompt-lookup'"),
        ({"baselines": ["profile-eager"]}, "baselines: 'profile-eager' needs a profile"),
    ],
)
def test_every_mistake_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load(tmp_path, {**WHOLE, **change})
    assert "\n" not in str(refused.value)
