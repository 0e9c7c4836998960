"""The gate of a draft folder: loaded from disk, it must compute the logits of the profile's draft, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.target import DraftView, ExitHead, ExitView, Target, agree
from decoding.target.parts import with_blocks
from decoding.target.stand_ins import Identity
from tuner.errors import ExportError
from tuner.export.shape import DraftShape
from tuner.inputs.models import quiet


@torch.inference_mode()
def check_draft(
    target: Target, shape: DraftShape, head: ExitHead | None, folder: Path, texts: Sequence[Sequence[int]]
) -> tuple[int, float]:
    """Return the positions that were compared, and the bytes of keys and values that the draft keeps per position.

    Compares the folder with the draft at every position of the `texts`, token ids of real prompts.

    The reference is the target's own modules without the blocks that the draft skips, run by transformers, so that a difference
    is one of weights or configuration and not of rounding. The view that decodes in production must agree with it too, up to
    rounding. Raises `ExportError` with the largest difference of the logits unless it is 0.
    """
    reloaded = _load(folder, target)
    cached, positions, most = 0, 0, 0.0
    own = _own_draft(target, shape, head)
    for text in texts:
        token_ids = torch.tensor([list(text)], device=target.device)
        expected = own(input_ids=token_ids, use_cache=False).logits[0]
        output = reloaded(input_ids=token_ids, use_cache=False)
        most = max(most, _difference(output.logits[0], expected))
        if not agree(expected[-1:], _deployed_logits(target, shape, head, token_ids)):
            raise ExportError(
                "the draft as decoded here and its blocks run by transformers differ by more than rounding"
            )
        positions += token_ids.shape[1]
        cached = _cache_bytes(reloaded, token_ids)
    if most != 0.0:
        raise ExportError(
            f"the exported draft is not the profile's: reloaded from disk, its logits differ by up to {most:.3g} (0 is required); "
            "nothing was written"
        )
    return positions, cached / len(texts[-1])


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


def _own_draft(target: Target, shape: DraftShape, head: ExitHead | None) -> torch.nn.Module:
    """Return the target with the draft's blocks in their places, and nothing in the others."""
    outputs = target.anatomy.block_outputs
    stack = [
        block if index in shape.blocks else Identity(block, num_outputs=outputs)
        for index, block in enumerate(target.blocks)
    ]
    if head is not None:
        stack[-1] = head.block
    return with_blocks(target.model, target.anatomy.path, stack).eval()


def _deployed_logits(target: Target, shape: DraftShape, head: ExitHead | None, token_ids: Tensor) -> Tensor:
    """Return the logits [1, vocabulary] of the view that decodes in production, after the last token."""
    cache = target.new_cache(token_ids.shape[1])
    if head is not None:
        return ExitView(target, len(shape.blocks), head).forward(token_ids, cache, 0, None)[0]
    skipped = [index for index in range(target.num_layers) if index not in shape.blocks]
    return DraftView(target, skipped, skipped, keep_boundary=False).forward(token_ids, cache, 0)


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
