"""The search's settings: file, flags, and what is wrong with them in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from decoding.documents.strict_yaml import parse_duration
from studies.samplers import DEFAULT_STUDIES, SAMPLERS
from tests.support.paths import ROOT
from tuner.cli.main import main
from tuner.cli.options import given
from tuner.config import SearchConfig, load_config
from tuner.errors import ConfigError

GIVEN = {"model": "m", "dataset": "d"}


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: a\ndataset: b\ntrials: 7\n")
    config = load_config(path, given(SearchConfig, {"model": "c", "trials": None}))
    assert (config.model, config.dataset, config.trials) == ("c", "b", 7)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), (45, 45), ("30", 30)])
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf"), 1e300, 10**4000, "inf", "1e400", "٣s"])
def test_no_duration_is_endless(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        parse_duration(value)
    with pytest.raises(ValueError, match="must be a duration"):
        SearchConfig(model="m", dataset="d", timeout=value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "which model"),
        ({"model": "m"}, "which dataset"),
        ({"modle": "m", "dataset": "d"}, "unknown key 'modle'; did you mean 'model'"),
        ({**GIVEN, "timeout": "10 parsecs"}, "timeout: must be a duration such as 90s, 10m or 1.5h"),
        ({**GIVEN, "timeout": float("inf")}, "timeout: must be a finite number"),
        ({**GIVEN, "timeout": "9000h"}, "timeout: must be a duration of at most 8760h"),
        ({**GIVEN, "studies": {"joint": {"patience": float("nan")}}}, "studies.joint.patience: must be a finite"),
        ({**GIVEN, "template": "{a}\ud800"}, r"template: '.ud800' is a control character or half of a pair"),
        ({**GIVEN, "system_prompt": "a\x1b[2J"}, r"system_prompt: '.x1b' is"),
        ({**GIVEN, "dataset": "a\u202eb"}, "dataset: must be one line"),
        ({**GIVEN, "exact_width": 4}, "give --exact bitwise as well"),
        ({**GIVEN, "study": ("conf_layer",)}, "unknown study 'conf_layer'; did you mean 'conf_layers'"),
        ({**GIVEN, "trials": 0}, "trials: .* greater than or equal to 1 .*0"),
        ({**GIVEN, "dtype": "float8"}, "dtype: .*'auto', 'float32', 'bfloat16' or 'float16'"),
        ({**GIVEN, "prompts_per_trial": 8, "tuning_prompts": 4}, "only 4 tuning prompts"),
        (
            {**GIVEN, "batch_size": 16, "tuning_prompts": 31},
            "tuning_prompts: 31 make 1 whole batch of 16, and 2 are needed: give 32 or more",
        ),
        (
            {**GIVEN, "batch_size": 32, "tuning_prompts": 64},
            "held_out_prompts: 24 make 0 whole batches of 32, and 2 are needed: give 64 or more",
        ),
        (
            {**GIVEN, "studies": {"conf_layers": {"patiense": 1}}},
            "studies.conf_layers: unknown key 'patiense'; did you mean 'patience'",
        ),
        (
            {**GIVEN, "studies": {"draft_length": {"rules": ["adaedl"]}}},
            "unknown rule 'adaedl'; did you mean 'ada_edl'",
        ),
    ],
)
def test_wrong_flags_are_one_line_that_says_what_would_be_right(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(None, flags)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: m\ndataset: d\nmodel: m\n", "unknown key 'modle'; did you mean 'model'"),
        ("model: [unclosed\n", "not valid YAML"),
        ("- a\n- b\n", "must be a mapping"),
        ("model: a\nmodel: b\n", "duplicate key"),
    ],
)
def test_wrong_files_are_one_line_with_the_file_in_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "search.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(path, {})
    assert "search.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    config = load_config(path, {})
    assert (ROOT / config.model).is_dir()
    assert (ROOT / config.dataset).is_file()


@pytest.mark.parametrize(("batch_size", "prompts_per_trial", "indices"), [(1, 6, 6), (2, 6, 3), (4, 9, 3), (8, 6, 2)])
def test_a_trial_is_of_whole_batches_and_two_at_least(batch_size: int, prompts_per_trial: int, indices: int) -> None:
    config = SearchConfig(**GIVEN, batch_size=batch_size, prompts_per_trial=prompts_per_trial)
    assert config.samples_per_trial == indices


def test_rivals_are_searched_only_when_asked_for() -> None:
    assert SearchConfig(**GIVEN).study == DEFAULT_STUDIES
    assert set(SAMPLERS) - set(DEFAULT_STUDIES) >= {"tpe"}
    shown = " ".join(CliRunner().invoke(main, ["search", "--help"]).stdout.split())
    assert f"[default: {', '.join(DEFAULT_STUDIES)}]" in shown
    asked = load_config(None, {**GIVEN, "study": ("tpe",)})
    assert asked.study == ("tpe",)


def test_addresses_of_stores_come_from_flags_then_the_file_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDTUNE_DATABASE", "postgresql://user:secret@host/trials")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@host")
    (tmp_path / "a.yaml").write_text("{model: m, dataset: d, storage: 'sqlite:///file.db'}")
    flags = {"model": "m", "dataset": "d"}
    assert load_config(None, flags).storage == "postgresql://user:secret@host/trials"
    assert load_config(tmp_path / "a.yaml", {}).storage == "sqlite:///file.db"
    assert load_config(tmp_path / "a.yaml", {"storage": "sqlite:///flag.db"}).storage == "sqlite:///flag.db"
    assert load_config(tmp_path / "a.yaml", {}).tracking_uri == "http://user:secret@host"
    monkeypatch.delenv("SDTUNE_DATABASE")
    assert load_config(None, flags).storage == "sqlite:///sdtune.db"
