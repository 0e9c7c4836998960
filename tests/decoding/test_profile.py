"""The profile: read strictly, written whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from transformers import AutoModelForCausalLM

from decoding.deploy.custom_generate import check_target
from decoding.draft_length import RULES
from decoding.errors import ProfileError
from decoding.profile import DraftProfile, LayerSkip, Target, compact_indices, format_indices, parse_indices


def _profile(**changes: Any) -> DraftProfile:
    target = Target(model="m", architecture="A", num_layers=24, dtype="float32", config_sha256="a", weights_sha256="b")
    draft = LayerSkip(skip_attention=(7, 9, 12, 13, 14, 15), skip_mlp=(12, 13))
    return DraftProfile(**{"name": "demo", "target": target, "draft": draft, **changes})


@pytest.mark.parametrize("rule", RULES)
def test_what_is_saved_is_loaded(tmp_path: Path, rule: str) -> None:
    profile = _profile(draft_length={"rule": rule, "max_tokens": 3})
    profile.save(tmp_path / "p.yaml")
    assert DraftProfile.load(tmp_path / "p.yaml") == profile


def test_runs_of_layers_are_written_as_ranges(tmp_path: Path) -> None:
    _profile().save(tmp_path / "p.yaml")
    data = yaml.safe_load((tmp_path / "p.yaml").read_text())
    assert data["draft"] == {"kind": "layer_skip", "skip_attention": [7, 9, "12-15"], "skip_mlp": [12, 13]}
    assert data["schema"] == "sdtune/v1"


@pytest.mark.parametrize("indices", [(), (0,), (1, 2), (0, 1, 2), (3, 5, 6, 7, 20)])
def test_reading_indices_is_the_inverse_of_writing_them(indices: tuple[int, ...]) -> None:
    assert parse_indices(format_indices(indices)) == indices
    assert compact_indices(indices) == "-" or parse_indices(compact_indices(indices)) == indices


def test_the_json_schema_takes_a_profile_and_refuses_a_wrong_one() -> None:
    schema = DraftProfile.json_schema()
    good = _profile().model_dump(mode="json", by_alias=True)
    jsonschema.validate(good, schema)
    for wrong in ({**good, "extra": 1}, {**good, "schema": "sdtune/v2"}, {**good, "draft": {"kind": "guess"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema: sdtune/v1", "schema: sdtune/v2", "schema is 'sdtune/v2', this version of sdtune reads 'sdtune/v1'"),
        ("schema: sdtune/v1\n", "", "schema is None"),
        ("name: demo", "nme: demo", "unknown key 'nme'; did you mean 'name'"),
        ("kind: layer_skip", "kind: layer_skp", "draft.kind: unknown value 'layer_skp'; did you mean 'layer_skip'"),
        ("rule: fixed", "rule: fixt", "draft_length.rule: unknown value 'fixt'; did you mean 'fixed'"),
        ("rule: fixed", "rule: fixed, gamma: 1", "unknown key 'draft_length.gamma'"),
        ("max_tokens: 8", "max_tokens: 0", "draft_length.max_tokens: .*greater than or equal to 1"),
        ("12-15", "12-24", "draft skips layer 24, but the target has layers 0 to 23"),
        ("12-15", "15-12", "runs backwards"),
        ("12-15", "-3", "layer"),
        ("name: demo", "name: demo\nname: again", "'name' stands twice"),
        ("name: demo", "name: [demo", "not valid YAML"),
    ],
)
def test_a_wrong_profile_is_one_line_with_file_key_and_what_would_be_right(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "p.yaml"
    _profile().save(path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ProfileError, match=message) as refused:
        DraftProfile.load(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_profile_that_is_no_mapping_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ProfileError, match="must be a mapping"):
        DraftProfile.load(tmp_path / "list.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="cannot read"):
        DraftProfile.load(tmp_path / "binary.yaml")
    with pytest.raises(ProfileError, match="no such profile"):
        DraftProfile.load(tmp_path / "none.yaml")


def test_a_failed_write_leaves_the_old_profile_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.yaml"
    _profile().save(path)
    before = path.read_text()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ProfileError, match=r"cannot write the profile .*No space left"):
        _profile(name="other").save(path)
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.yaml"]


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot write the profile") as refused:
        _profile().save(tmp_path / "no" / "p.yaml")
    assert "\n" not in str(refused.value)


def test_a_saved_profile_is_readable_by_others(tmp_path: Path) -> None:
    _profile().save(tmp_path / "p.yaml")
    (tmp_path / "plain").touch()
    assert stat.S_IMODE((tmp_path / "p.yaml").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_the_committed_result_of_the_demo_is_for_the_model_that_ships() -> None:
    demo = Path(__file__).parents[2] / "configs" / "demo"
    profile = DraftProfile.load(demo / "result" / "profile.yaml")
    check_target(profile, AutoModelForCausalLM.from_pretrained(demo / "model"))
    assert profile.measured is not None
    assert profile.measured.exact.identical == profile.measured.exact.prompts
