"""Exit heads on disk: what is written is read back, and any file but the right one is refused in one line."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
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
    prompt_sha256,
    read_facts,
    save_head,
)
from decoding.fingerprint import fingerprint
from decoding.head_folder import HeadFolder
from decoding.target import DraftVocabulary, Target
from decoding.target.heads import new_exit_head
from tests.support.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


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
        for parameter in head.block.parameters():
            parameter.uniform_()
    path = tmp_path / "h.safetensors"
    sha256 = save_head(path, head, facts_of(target))
    assert sha256 == file_sha256(path)
    assert read_facts(path) == facts_of(target)
    again = load_exit_head(path, target, 2)
    for name, tensor in head.block.state_dict().items():
        assert torch.equal(tensor, again.block.state_dict()[name])
    assert not any(parameter.requires_grad for parameter in again.block.parameters())
    assert [file.name for file in tmp_path.iterdir()] == ["h.safetensors"], "nothing is left beside it"


def test_vocabulary_of_a_head_is_read_back(target: Target, tmp_path: Path) -> None:
    chosen = DraftVocabulary((0, 3, 7, 12))
    path = tmp_path / head_name(2)
    save_head(path, new_exit_head(target, chosen), facts_of(target))
    assert read_facts(path).draft_vocabulary == 4
    assert load_exit_head(path, target, 2).vocabulary == chosen
    (draft,) = HeadFolder(target, tmp_path).drafts([2]).values()
    assert draft.draft_vocabulary == 4
    assert "4 tokens" in draft.describe()


@pytest.mark.parametrize(
    "token_ids", [(3, 0), (0, 0), (-1, 5), (5, 10**6)], ids=["order", "twice", "negative", "beyond"]
)
def test_vocabulary_of_another_model_is_refused(target: Target, tmp_path: Path, token_ids: tuple[int, ...]) -> None:
    path = tmp_path / head_name(2)
    save_head(path, new_exit_head(target, DraftVocabulary(token_ids)), facts_of(target))
    with pytest.raises(ExitHeadError, match="its draft vocabulary is not one of this model"):
        load_exit_head(path, target, 2)


def test_head_without_the_vocabulary_that_it_claims_is_refused(target: Target, path: Path) -> None:
    facts = facts_of(target).model_copy(update={"draft_vocabulary": 4})
    save_head(path, new_exit_head(target), facts)
    with pytest.raises(ExitHeadError, match="its draft vocabulary is not one of this model"):
        load_exit_head(path, target, 2)


def test_head_is_loaded_in_the_precision_of_the_target(target: Target, path: Path) -> None:
    half = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(half, path, metadata={METADATA_KEY: facts_of(target).model_dump_json(by_alias=True)})
    assert {parameter.dtype for parameter in load_exit_head(path, target, 2).block.parameters()} == {torch.float32}


def test_head_of_another_model_is_refused(path: Path) -> None:
    with pytest.raises(ExitHeadError, match=r"belongs to another model .* of 6 layers\): distil one for this model"):
        load_exit_head(path, tiny_target(seed=1), 2)


def test_head_of_another_exit_is_refused(target: Target, path: Path) -> None:
    with pytest.raises(ExitHeadError, match="is for exit layer 2, not 3"):
        load_exit_head(path, target, 3)


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


def test_full_disk_leaves_nothing_half_written(target: Target, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ExitHeadError, match=r"cannot write the exit head .*: No space left on device"):
        save_head(path, new_exit_head(target), facts_of(target, 3))
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_unwritable_path_is_one_line(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ExitHeadError, match=r"cannot write the exit head .*No such file"):
        save_head(tmp_path / "nowhere" / "h.safetensors", new_exit_head(target), facts_of(target))


def test_folder_gives_the_head_that_a_draft_means(target: Target, path: Path) -> None:
    heads = HeadFolder(target, path.parent)
    draft = EarlyExit(exit_layer=2, head=path.name, head_sha256=file_sha256(path))
    assert heads.get(draft) is heads.get(draft), "read once"
    with pytest.raises(ExitHeadError, match="its contents differ"):
        heads.get(EarlyExit(exit_layer=2, head=path.name, head_sha256="0" * 64))
    with pytest.raises(ExitHeadError, match="belongs beside the profile"):
        check_head_file(path.parent / "gone.safetensors", "0" * 64)


def test_prompts_are_told_apart_by_their_hash() -> None:
    assert prompt_sha256((1, 2, 3)) == prompt_sha256([1, 2, 3]) != prompt_sha256([1, 23])
