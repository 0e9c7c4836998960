"""Draft folders: some blocks of a target, and perhaps a trained head, as an ordinary checkpoint of the target's family.

Loaded from disk, a folder must compute the logits of the profile's draft, bit for bit.

Our formulation. Blocks before norm and LM head are renumbered from 0; lists in the configuration with an entry per layer
(`layer_types` and the like) keep the entries of the kept blocks, and a head that of the block it was copied from, the last.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from decoding.errors import first_line
from decoding.target import DraftView, ExitView, Target, agree
from decoding.target.parts import with_blocks
from decoding.target.stand_ins import Identity
from tuner.errors import ExportError
from tuner.export.shape import DraftShape, per_layer_settings
from tuner.inputs.models import quiet

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json")
CHAT_TEMPLATES = ("chat_template*",)
READABLE = 0o644


def draft_config(config: Any, shape: DraftShape) -> PreTrainedConfig:
    """Return the configuration of the draft; the target's stays as it is."""
    values, sources = config.to_dict(), shape.sources
    values |= {name: [each[source] for source in sources] for name, each in per_layer_settings(config).items()}
    values[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(sources)
    narrowed: PreTrainedConfig = type(config).from_dict(values)
    return narrowed


def write_checkpoint(target: Target, shape: DraftShape, head: nn.Module | None, folder: Path) -> int:
    """Write the draft into the new folder `folder`, as `save_pretrained` does, and return the bytes of its tensors.

    The weights are the target's own in memory until they are on disk. Raises `ExportError` for a model with parts beside its
    language model, and for one whose blocks cannot be renumbered.
    """
    draft = _draft_model(target, shape, head)
    with quiet():
        draft.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(READABLE)  # weights are written for their owner alone, and an engine may run as another user
    return sum(parameter.numel() * parameter.element_size() for parameter in draft.parameters())


def _draft_model(target: Target, shape: DraftShape, head: nn.Module | None) -> PreTrainedModel:
    model = target.model
    if model.config is not target.config:
        raise ExportError(
            f"{type(model).__name__} has parts beside its language model, which a draft folder would carry too: only --to folder "
            "can hold it"
        )
    try:
        with torch.device("meta"), quiet():
            draft: PreTrainedModel = type(model)(draft_config(model.config, shape))
        draft.requires_grad_(False)  # weights loaded in inference mode admit no gradients
        draft.load_state_dict(dict(_tensors(target, shape, head)), assign=True)
    except (RuntimeError, ValueError, TypeError, KeyError) as cause:
        raise ExportError(
            f"the blocks of {type(model).__name__} cannot be renumbered ({first_line(cause)}): only --to folder can hold the draft"
        ) from None
    draft.tie_weights()
    draft.generation_config = copy.deepcopy(model.generation_config)
    draft.generation_config._from_model_config = (
        False  # else `generate` may derive it anew, without an assistant's settings
    )
    return draft.eval()


def _tensors(target: Target, shape: DraftShape, head: nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of the draft: all that is outside the target's blocks, the kept blocks, and the head."""
    path = ".".join(target.anatomy.path)
    for name, tensor in target.model.state_dict().items():
        if not name.startswith(f"{path}."):
            yield name, tensor
    layers: Sequence[Any] = [target.blocks[index] for index in shape.blocks]
    for index, block in enumerate([*layers, *([head] if head else [])]):
        for name, tensor in block.state_dict().items():
            yield f"{path}.{index}.{name}", tensor


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files of a model folder, unchanged: an engine may read other versions than this transformers writes."""
    for pattern in (*TOKENIZER_FILES, *CHAT_TEMPLATES):
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


@torch.inference_mode()
def check_draft(target: Target, shape: DraftShape, head: nn.Module | None, folder: Path, text: Sequence[int]) -> float:
    """Compare the folder with the draft at every position of a text, in token ids.

    Return the bytes of keys and values that the draft keeps per position.

    The reference is the target's own modules without the blocks that the draft skips, run by transformers, so that a difference
    is one of weights or configuration and not of rounding. The view that decodes in production must agree with it too, up to
    rounding. Raises `ExportError` with the largest difference of the logits unless it is 0.
    """
    reloaded = _load(folder, target)
    token_ids = torch.tensor([list(text)], device=target.device)
    expected = _own_draft(target, shape, head)(input_ids=token_ids, use_cache=False).logits[0]
    most = _difference(reloaded(input_ids=token_ids, use_cache=False).logits[0], expected)
    if not agree(expected[-1:], _deployed_logits(target, shape, head, token_ids)):
        raise ExportError("the draft as decoded here and its blocks run by transformers differ by more than rounding")
    if most != 0.0:
        raise ExportError(
            f"the exported draft is not the profile's: reloaded from disk, its logits differ by up to {most:.3g} (0 is required); "
            "nothing was written"
        )
    return _cache_bytes(reloaded, token_ids) / len(text)


def _load(folder: Path, target: Target) -> PreTrainedModel:
    with quiet():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=target.dtype,
            attn_implementation=target.model.config._attn_implementation,
            trust_remote_code=False,
        )
    if model.dtype != target.dtype:
        raise ExportError(f"the exported draft loads as {model.dtype} and not as {target.dtype}")
    return model.to(target.device).eval()


def _own_draft(target: Target, shape: DraftShape, head: nn.Module | None) -> nn.Module:
    """Return the target with the draft's blocks in their places, and nothing in the others."""
    outputs = target.anatomy.block_outputs
    stack = [
        block if index in shape.blocks else Identity(block, num_outputs=outputs)
        for index, block in enumerate(target.blocks)
    ]
    if head is not None:
        stack[-1] = head
    return with_blocks(target.model, target.anatomy.path, stack).eval()


def _deployed_logits(target: Target, shape: DraftShape, head: nn.Module | None, token_ids: Tensor) -> Tensor:
    """Return the logits [1, vocabulary] of the view that decodes in production, after the last token."""
    cache = target.new_cache(token_ids.shape[1])
    if head is not None:
        return ExitView(target, len(shape.blocks), head).run(token_ids, cache, 0, None).logits
    skipped = [index for index in range(target.num_layers) if index not in shape.blocks]
    return DraftView(target, skipped, skipped, keep_boundary=False).run(token_ids, cache, 0).logits


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two sets of logits; infinity where one of them is not a number."""
    if torch.equal(found, expected):
        return 0.0
    largest = (found.float() - expected.float()).abs().max().item()
    return largest if largest == largest and largest > 0 else float("inf")


def _cache_bytes(model: PreTrainedModel, token_ids: Tensor) -> int:
    """Return the bytes of the keys and values of all positions but those that a window has forgotten."""
    layers = model(input_ids=token_ids, use_cache=True).past_key_values.layers
    return sum(each.nbytes for layer in layers for each in (layer.keys, layer.values))
