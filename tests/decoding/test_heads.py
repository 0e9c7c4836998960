"""Exit heads: files that are read back or refused in one line, folders of them, and the head that goes with a profile."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding.drafts import EarlyExit
from decoding.errors import ExitHeadError
from decoding.exit_heads import (
    METADATA_KEY,
    HeadFacts,
    check_head_file,
    file_sha256,
    head_name,
    load_exit_head,
    new_exit_head,
    prompt_sha256,
    read_facts,
    save_head,
)
from decoding.fingerprint import fingerprint
from decoding.head_folder import HeadFolder
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
    assert facts.training is not None
    assert facts.training == training(prompts_sha256=("0" * 16,))
    assert folder.facts(1) is None
    assert found[5].head_sha256 == file_sha256(tmp_path / head_name(5))
    assert folder.missing((4, 1, 2, 5)) == (1, 4)
    assert folder.distillation_seconds([1, 2, 3]) == folder.distillation_seconds([2]) == facts.training.seconds, "once"
    assert folder.distillation_seconds([]) == 0.0
    nowhere = HeadFolder(target, tmp_path / "nowhere")
    assert nowhere.drafts((1, 2), held_out=HELD_OUT) == {}
    assert nowhere.missing((2, 1)) == (1, 2)


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
    with pytest.raises(ExitHeadError, match="its contents differ"):
        HeadFolder(target, tmp_path).copy_beside(draft, tmp_path / "other.yaml")
    assert not list(tmp_path.glob("other.*"))


def test_folder_and_its_heads_are_gone_as_soon_as_they_are_dropped(target: Target, tmp_path: Path) -> None:
    draft = write_heads(target, tmp_path, [2])[2]
    folder = HeadFolder(target, tmp_path)
    left = weakref.ref(folder), weakref.ref(folder.get(draft))
    with without_garbage_collection():
        del folder
        assert [each() for each in left] == [None, None]


def facts_of(target: Target, exit_layer: int = 2) -> HeadFacts:
    found = fingerprint(target.model)
    return HeadFacts(
        exit_layer=exit_layer,
        num_layers=target.num_layers,
        architecture="LlamaForCausalLM",
        config_sha256=found.config_sha256,
        weights_sha256=found.weights_sha256,
    )


@pytest.fixture
def path(target: Target, tmp_path: Path) -> Path:
    path = tmp_path / head_name(2)
    save_head(path, new_exit_head(target), facts_of(target))
    return path


def test_head_is_read_back_as_it_was_written(target: Target, tmp_path: Path) -> None:
    head = new_exit_head(target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.uniform_()
    path = tmp_path / "h.safetensors"
    sha256 = save_head(path, head, facts_of(target))
    assert sha256 == file_sha256(path)
    assert read_facts(path) == facts_of(target)
    again = load_exit_head(path, target, 2)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert [file.name for file in tmp_path.iterdir()] == ["h.safetensors"], "nothing is left beside it"


def test_head_that_drafts_from_some_tokens_only_is_refused(target: Target, path: Path) -> None:
    stored = facts_of(target).model_dump(mode="json", by_alias=True)
    for size, refusal in (
        (None, nullcontext()),
        (4, pytest.raises(ExitHeadError, match=r"from 4 tokens only.*distil it anew")),
    ):
        save_file(load_file(path), path, metadata={METADATA_KEY: json.dumps({**stored, "draft_vocabulary": size})})
        with refusal:
            load_exit_head(path, target, 2)


def test_head_of_another_model_or_exit_is_refused(target: Target, path: Path) -> None:
    with pytest.raises(ExitHeadError, match=r"belongs to another model .* of 6 layers\): distil one for this model"):
        load_exit_head(path, tiny_target(seed=1), 2)
    with pytest.raises(ExitHeadError, match="is for exit layer 2, not 3"):
        load_exit_head(path, target, 3)


def test_head_of_a_version_that_recorded_more_of_its_training_is_read(target: Target, path: Path) -> None:
    facts = facts_of(target).model_copy(update={"training": training()})
    stored = facts.model_dump(mode="json", by_alias=True)
    stored["training"]["after_by_step"] = []
    save_file(load_file(path), path, metadata={METADATA_KEY: json.dumps(stored)})
    assert read_facts(path) == facts
    load_exit_head(path, target, 2)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _garble(path: Path) -> None:
    path.write_bytes(b"not a head at all")


def _poison(path: Path) -> None:
    tensors = load_file(path)
    next(iter(tensors.values())).fill_(float("nan"))
    facts = read_facts(path)
    save_file(tensors, path, metadata={METADATA_KEY: facts.model_dump_json(by_alias=True)})


def _rename_a_weight(path: Path) -> None:
    tensors = {f"other.{name}": tensor for name, tensor in load_file(path).items()}
    facts = read_facts(path)
    save_file(tensors, path, metadata={METADATA_KEY: facts.model_dump_json(by_alias=True)})


def _spoil_metadata(path: Path) -> None:
    save_file(load_file(path), path, metadata={METADATA_KEY: "{"})


@pytest.mark.parametrize("damage", [_cut, _garble, _poison, _rename_a_weight, _spoil_metadata])
def test_damaged_head_is_refused_in_one_line(target: Target, path: Path, damage: Callable[[Path], None]) -> None:
    damage(path)
    with pytest.raises(ExitHeadError, match="is damaged") as refused:
        load_exit_head(path, target, 2)
    assert "\n" not in str(refused.value)


def test_other_files_are_refused(target: Target, tmp_path: Path) -> None:
    other = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, other)
    with pytest.raises(ExitHeadError, match="is no exit head"):
        load_exit_head(other, target, 2)
    with pytest.raises(ExitHeadError, match="no such exit head"):
        load_exit_head(tmp_path / "missing.safetensors", target, 2)
    save_file({"weight": torch.zeros(2)}, other, metadata={METADATA_KEY: json.dumps({"schema": "sdtune-exit-head/v9"})})
    with pytest.raises(ExitHeadError, match="schema"):
        load_exit_head(other, target, 2)


def test_folder_gives_the_head_that_a_draft_means(target: Target, path: Path) -> None:
    heads = HeadFolder(target, path.parent)
    draft = EarlyExit(exit_layer=2, head=path.name, head_sha256=file_sha256(path))
    assert heads.get(draft) is heads.get(draft), "read once"
    with pytest.raises(ExitHeadError, match="its contents differ"):
        heads.get(EarlyExit(exit_layer=2, head=path.name, head_sha256="0" * 64))
    with pytest.raises(ExitHeadError, match="belongs beside the profile"):
        check_head_file(path.parent / "gone.safetensors", "0" * 64)
