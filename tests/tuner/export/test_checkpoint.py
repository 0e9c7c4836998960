"""Draft folders: bit-equal logits in every family, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from decoding.exit_heads import new_exit_head
from decoding.target import Target
from tests.support.families import SUPPORTED, build, some_tokens, target_of
from tests.support.heads import untrained_head
from tests.support.tiny import tiny_target
from tuner.errors import ExportError
from tuner.export.checkpoint import check_draft, write_checkpoint
from tuner.export.shape import DraftShape, moved_settings

PER_LAYER_EMBEDDINGS = ("gemma3n", "gemma4")
EXPORTED = [family for family in SUPPORTED if family not in PER_LAYER_EMBEDDINGS]
SKIP, HEAD = DraftShape((0, 2, 4), has_head=False, num_target_layers=5), DraftShape((0, 1), True, 5)
CASES = [(family, shape) for index, family in enumerate(EXPORTED) for shape in [(SKIP, HEAD)[index % 2]]]


@pytest.mark.parametrize(("family", "shape"), [*CASES, ("llama", HEAD), ("gemma2", HEAD), ("mixtral", HEAD)])
def test_a_draft_folder_computes_the_drafts_logits_bit_for_bit(family: str, shape: DraftShape, tmp_path: Path) -> None:
    target = target_of(family)
    head = untrained_head(target) if shape.has_head else None
    num_bytes = write_checkpoint(target, shape, head, tmp_path / "draft")
    cache_bytes_per_token = check_draft(target, shape, head, tmp_path / "draft", some_tokens(12))
    assert cache_bytes_per_token > 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert loaded.config.get_text_config().num_hidden_layers == 3
    assert num_bytes == sum(weight.nbytes for weight in loaded.parameters())


def test_a_model_loaded_in_inference_mode_is_written_too(tmp_path: Path) -> None:
    with torch.inference_mode():
        target = Target(build("llama"))
    write_checkpoint(target, SKIP, None, tmp_path)
    check_draft(target, SKIP, None, tmp_path, some_tokens(12))


def test_the_gate_refuses_a_folder_with_another_weight(tmp_path: Path) -> None:
    target = target_of("llama")
    write_checkpoint(target, SKIP, None, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.5
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"differ by up to \d.*0 is required"):
        check_draft(target, SKIP, None, tmp_path, some_tokens(12))


def test_the_gate_refuses_a_head_written_as_another_block(tmp_path: Path) -> None:
    target = target_of("gemma2")
    head = untrained_head(target)
    write_checkpoint(target, HEAD, new_exit_head(target), tmp_path)
    with pytest.raises(ExportError, match="differ by up to"):
        check_draft(target, HEAD, head, tmp_path, some_tokens(12))


@pytest.mark.parametrize("family", PER_LAYER_EMBEDDINGS)
def test_blocks_that_share_an_embedding_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"cannot be renumbered.*--to folder"):
        write_checkpoint(target_of(family), SKIP, None, tmp_path / "draft")


def test_a_model_with_parts_beside_its_language_model_is_refused(tmp_path: Path) -> None:
    target = tiny_target(5)
    target.config = copy.copy(target.config)  # as of a model whose text configuration is a part of another one
    with pytest.raises(ExportError, match="parts beside its language model"):
        write_checkpoint(target, SKIP, None, tmp_path / "draft")


def test_tied_weights_are_written_once_and_the_target_keeps_its_own(tmp_path: Path) -> None:
    target = _tied_target()
    before = target.model.state_dict()["model.layers.4.mlp.up_proj.weight"].clone()
    write_checkpoint(target, SKIP, None, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    check_draft(target, SKIP, None, tmp_path, [1, 5, 9, 3])
    assert target.model.config.num_hidden_layers == 5
    assert torch.equal(target.model.state_dict()["model.layers.4.mlp.up_proj.weight"], before)


def _tied_target() -> Target:
    target = tiny_target(5)
    target.model.config.tie_word_embeddings = True
    target.model.lm_head.weight = target.model.model.embed_tokens.weight
    return target


def test_settings_by_layer_that_an_index_would_get_wrong() -> None:
    windows = target_of("gemma2").config  # sliding, full, sliding, sliding, full
    assert moved_settings(windows, SKIP) == ("layer_types",)
    assert moved_settings(windows, DraftShape((0, 1, 2), False, 5)) == ()
    assert moved_settings(windows, DraftShape((0,), True, 5)) == ()
    assert moved_settings(target_of("llama").config, SKIP) == ()
