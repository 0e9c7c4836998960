"""A folder of exit heads: the heads it finds, those it refuses, and the one that goes with a profile."""

from __future__ import annotations

import errno
import gc
import weakref
from pathlib import Path

import pytest

from decoding.drafts import EarlyExit
from decoding.errors import ExitHeadError
from decoding.exit_heads import file_sha256, head_name, prompt_sha256
from decoding.head_folder import HeadFolder, list_heads
from decoding.memory import without_garbage_collection
from decoding.target import Target
from tests.support.heads import training, write_heads
from tests.support.tiny import tiny_target

HELD_OUT = [(row, row + 1, row + 2) for row in range(3)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(6)


def find(target: Target, folder: Path, exit_layers: tuple[int, ...]) -> dict[int, EarlyExit]:
    return HeadFolder(target, folder).drafts(exit_layers, held_out=HELD_OUT)


def test_heads_of_the_folder_are_found_and_the_others_are_missing(target: Target, tmp_path: Path) -> None:
    drafts = write_heads(target, tmp_path, [2, 3, 5], training=training(prompts_sha256=("0" * 16,)))
    folder = HeadFolder(target, tmp_path)
    found = find(target, tmp_path, (1, 2, 4, 5))
    assert found == {2: drafts[2], 5: drafts[5]}
    facts = folder.facts(5)
    assert facts is not None
    assert facts.training == training(prompts_sha256=("0" * 16,))
    assert folder.facts(1) is None
    assert found[5].head_sha256 == file_sha256(tmp_path / head_name(5))
    assert folder.missing((4, 1, 2, 5)) == (1, 4)
    nowhere = HeadFolder(target, tmp_path / "nowhere")
    assert nowhere.drafts((1, 2), held_out=HELD_OUT) == {}
    assert nowhere.missing((2, 1)) == (1, 2)


def test_seconds_of_one_distillation_count_once(target: Target, tmp_path: Path) -> None:
    write_heads(target, tmp_path, [2, 3], training=training())
    folder = HeadFolder(target, tmp_path)
    assert folder.distillation_seconds([1, 2, 3]) == folder.distillation_seconds([2]) == training().seconds
    assert folder.distillation_seconds([]) == 0.0


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
    seen = (*(prompt_sha256(prompt) for prompt in HELD_OUT[:2]), prompt_sha256((9, 9)))
    write_heads(target, tmp_path, [2], training=training(prompts_sha256=seen))
    with pytest.raises(ExitHeadError, match="trained on 2 of the 3 held-out prompts: distil with the same --dataset"):
        find(target, tmp_path, (2,))


def test_head_goes_beside_the_profile_under_its_name(target: Target, tmp_path: Path) -> None:
    draft = write_heads(target, tmp_path / "heads", [2])[2]
    (tmp_path / "out").mkdir()
    placed = HeadFolder(target, tmp_path / "heads").copy_beside(draft, tmp_path / "out" / "code.yaml")
    assert draft.head_sha256 is not None
    name = f"code.exit_head_2.{draft.head_sha256[:8]}.safetensors"
    assert placed == draft.model_copy(update={"head": name})
    assert file_sha256(tmp_path / "out" / name) == draft.head_sha256
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    without = EarlyExit(exit_layer=2)
    assert HeadFolder(target, tmp_path / "nowhere").copy_beside(without, tmp_path / "code.yaml") == without


def test_head_in_the_folder_of_the_profile_is_copied_too(target: Target, tmp_path: Path) -> None:
    """Heads that are distilled there later must not break the profile."""
    draft = write_heads(target, tmp_path, [2])[2]
    placed = HeadFolder(target, tmp_path).copy_beside(draft, tmp_path / "code.yaml")
    write_heads(target, tmp_path, [2], training=training())
    assert placed.head is not None
    assert file_sha256(tmp_path / placed.head) == draft.head_sha256


def test_heads_of_a_folder_are_told_apart_by_exit(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ExitHeadError, match=r"there is no exit head in .*: `sdtune distill --out"):
        list_heads(tmp_path)
    write_heads(target, tmp_path, [3, 2])
    HeadFolder(target, tmp_path).copy_beside(EarlyExit(exit_layer=2), tmp_path / "code.yaml")
    assert list(list_heads(tmp_path)) == [2, 3]


def test_head_that_is_not_the_measured_one_any_more_is_not_given_away(target: Target, tmp_path: Path) -> None:
    draft = write_heads(target, tmp_path / "heads", [2])[2]
    write_heads(target, tmp_path / "heads", [2], training=training())
    with pytest.raises(ExitHeadError, match="its contents differ"):
        HeadFolder(target, tmp_path / "heads").copy_beside(draft, tmp_path / "code.yaml")
    (tmp_path / "heads" / head_name(2)).unlink()
    with pytest.raises(ExitHeadError, match="no such exit head"):
        HeadFolder(target, tmp_path / "heads").copy_beside(draft, tmp_path / "code.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_full_disk_leaves_no_part_of_a_head(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write_heads(target, tmp_path / "heads", [2])[2]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ExitHeadError, match=r"cannot write the exit head .*code\.exit_head_2.*No space left"):
        HeadFolder(target, tmp_path / "heads").copy_beside(draft, tmp_path / "code.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_folder_and_its_heads_are_gone_as_soon_as_they_are_dropped(target: Target, tmp_path: Path) -> None:
    draft = write_heads(target, tmp_path, [2])[2]
    folder = HeadFolder(target, tmp_path)
    left = weakref.ref(folder), weakref.ref(folder.get(draft))
    with without_garbage_collection():
        del folder
        assert [each() for each in left] == [None, None]


def test_few_heads_are_kept_in_memory(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.head_folder.MAX_LOADED", 2)
    drafts = write_heads(target, tmp_path, [1, 2, 3])
    folder = HeadFolder(target, tmp_path)
    first = folder.get(drafts[1])
    second = weakref.ref(folder.get(drafts[2]))
    assert folder.get(drafts[1]) is first
    folder.get(drafts[3])
    assert folder.get(drafts[1]) is first, "it was used later than the one that was dropped"
    gc.collect()
    assert second() is None
