"""The heads that a search finds in its folder, those it refuses, and the one that goes with a profile."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from decoding.drafts import EarlyExit
from decoding.errors import ExitHeadError
from decoding.exit_heads import file_sha256, head_name, prompt_sha256
from decoding.fingerprint import fingerprint
from decoding.target import Target
from tests.support.heads import training, write_heads
from tests.support.tiny import tiny_target
from tuner.heads.found import find_heads, heads_in, missing_heads, place_beside
from tuner.inputs.prompts import Prompt

HELD_OUT = [Prompt(row, (row, row + 1, row + 2), "text") for row in range(3)]


def find(target: Target, folder: Path, exit_layers: tuple[int, ...]) -> dict[int, Any]:
    return find_heads(folder, exit_layers, fingerprint(target.model), HELD_OUT)


def test_heads_of_the_folder_are_found_and_the_others_are_missing(target: Target, tmp_path: Path) -> None:
    drafts = write_heads(target, tmp_path, [2, 3, 5], training=training(prompts_sha256=("0" * 16,)))
    found = find(target, tmp_path, (1, 2, 4, 5))
    assert {exit_layer: head.draft for exit_layer, head in found.items()} == {2: drafts[2], 5: drafts[5]}
    assert found[5].facts.training == training(prompts_sha256=("0" * 16,))
    assert found[5].draft.head_sha256 == file_sha256(tmp_path / head_name(5))
    assert missing_heads((4, 1, 2, 5), found) == (1, 4)
    assert find(target, tmp_path / "nowhere", (1, 2)) == {}


def test_head_of_another_model_is_refused(target: Target, tmp_path: Path) -> None:
    write_heads(tiny_target(seed=1), tmp_path, [2])
    with pytest.raises(ExitHeadError, match=r"exit_head_2.*belongs to another model: name another folder with --heads"):
        find(target, tmp_path, (2,))


def test_head_under_the_name_of_another_exit_is_refused(target: Target, tmp_path: Path) -> None:
    write_heads(target, tmp_path, [2])
    (tmp_path / head_name(2)).rename(tmp_path / head_name(3))
    with pytest.raises(ExitHeadError, match=r"exit_head_3.* is for exit layer 2, whatever its name says"):
        find(target, tmp_path, (3,))


def test_head_that_was_trained_on_held_out_prompts_is_refused(target: Target, tmp_path: Path) -> None:
    learnt = (*(prompt_sha256(prompt.token_ids) for prompt in HELD_OUT[:2]), prompt_sha256((9, 9)))
    write_heads(target, tmp_path, [2], training=training(prompts_sha256=learnt))
    with pytest.raises(ExitHeadError, match="trained on 2 of the 3 held-out prompts: distil with the same --dataset"):
        find(target, tmp_path, (2,))


def test_head_goes_beside_the_profile_under_its_name(target: Target, tmp_path: Path) -> None:
    draft = write_heads(target, tmp_path / "heads", [2])[2]
    (tmp_path / "out").mkdir()
    placed = place_beside(draft, tmp_path / "heads", tmp_path / "out" / "code.yaml")
    assert draft.head_sha256 is not None
    name = f"code.exit_head_2.{draft.head_sha256[:8]}.safetensors"
    assert placed == draft.model_copy(update={"head": name})
    assert file_sha256(tmp_path / "out" / name) == draft.head_sha256
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    without = EarlyExit(exit_layer=2)
    assert place_beside(without, tmp_path / "nowhere", tmp_path / "code.yaml") == without


def test_head_in_the_folder_of_the_profile_is_copied_too(target: Target, tmp_path: Path) -> None:
    """What is distilled there later must not break the profile."""
    draft = write_heads(target, tmp_path, [2])[2]
    placed = place_beside(draft, tmp_path, tmp_path / "code.yaml")
    write_heads(target, tmp_path, [2], training=training())
    assert placed.head is not None
    assert file_sha256(tmp_path / placed.head) == draft.head_sha256


def test_heads_of_a_folder_are_told_apart_by_exit(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ExitHeadError, match=r"there is no exit head in .*: `sdtune distill --out"):
        heads_in(tmp_path)
    write_heads(target, tmp_path, [3, 2])
    place_beside(EarlyExit(exit_layer=2), tmp_path, tmp_path / "code.yaml")
    assert list(heads_in(tmp_path)) == [2, 3]


def test_head_that_is_not_the_measured_one_any_more_is_not_given_away(target: Target, tmp_path: Path) -> None:
    draft = write_heads(target, tmp_path / "heads", [2])[2]
    write_heads(target, tmp_path / "heads", [2], training=training())
    with pytest.raises(ExitHeadError, match="its contents differ"):
        place_beside(draft, tmp_path / "heads", tmp_path / "code.yaml")
    (tmp_path / "heads" / head_name(2)).unlink()
    with pytest.raises(ExitHeadError, match="no such exit head"):
        place_beside(draft, tmp_path / "heads", tmp_path / "code.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_full_disk_leaves_no_part_of_a_head(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write_heads(target, tmp_path / "heads", [2])[2]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ExitHeadError, match=r"cannot write the exit head .*code\.exit_head_2.*No space left"):
        place_beside(draft, tmp_path / "heads", tmp_path / "code.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
