"""Capabilities of a loaded model, found by running it.

The probe finds which sublayers can be skipped, if the cache rolls back, if verification may resume after the shared
prefix, and if speculative decoding reproduces plain decoding. It goes through `decoding.target` and knows no model
family by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.errors import UnsupportedModelError
from decoding.losslessness import compare
from decoding.profile import Decoding
from decoding.target import Target
from decoding.target.anatomy import refusing
from decoding.target.soundness import check_skips, find_resume_difference, some_tokens
from decoding.text import Ending, Request

GENERATED_TOKENS, FEW_TOKENS = 24, 8
"""Tokens decoded plainly and speculatively: by a whole probe, and by one before a search, which checks its drafts anyway."""


@dataclass(frozen=True)
class Capabilities:
    """The findings of a probe.

    `refusal` is a one-line reason why speculative decoding is unsupported, or None.
    """

    architecture: str
    num_layers: int | None = None
    num_parameters: int = 0
    dtype: str = ""
    device: str = ""
    skippable_blocks: tuple[int, ...] = ()
    skippable_attention: tuple[int, ...] = ()
    skippable_mlp: tuple[int, ...] = ()
    prefix_reuse: bool = False
    refusal: str | None = None

    @property
    def is_supported(self) -> bool:
        return self.refusal is None


@torch.inference_mode()
def probe(model: PreTrainedModel, *, every_part: bool = True) -> Capabilities:
    """Probe `model` with a few tokens of its vocabulary, run whole and in part.

    An unsuitable model is reported in `Capabilities.refusal`, not raised. Without `every_part` every other block is left out at
    once where the model allows it, and fewer tokens are decoded: a draft is checked again before it is used.
    """
    known = {
        "architecture": type(model).__name__,
        "num_parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
    }
    try:
        target = Target(model)
        target.checks.cache()
    except UnsupportedModelError as refusal:
        return Capabilities(**known, refusal=str(refusal))
    layers = range(target.num_layers)
    parts, others, middle = layers if every_part else (), layers[1::2], target.num_layers // 2
    at_once = not every_part and bool(others) and _can_skip(target, others, others)
    blocks = tuple(others) if at_once else tuple(i for i in layers if _can_skip(target, [i], [i]))
    boundaries = ({1, middle} if every_part else {middle}) & {*layers[1:]}
    found = Capabilities(
        **known,
        num_layers=target.num_layers,
        skippable_blocks=blocks,
        skippable_attention=tuple(i for i in parts if _can_skip(target, [i], [])),
        skippable_mlp=tuple(i for i in parts if _can_skip(target, [], [i])),
        prefix_reuse=bool(boundaries) and not any(find_resume_difference(target, each) for each in boundaries),
    )
    return replace(found, refusal=_find_refusal(target, found, GENERATED_TOKENS if every_part else FEW_TOKENS))


def _can_skip(target: Target, attention: Sequence[int], mlp: Sequence[int]) -> bool:
    try:
        check_skips(target, attention, mlp)
    except UnsupportedModelError:
        return False
    return True


def _find_refusal(target: Target, found: Capabilities, num_tokens: int) -> str | None:
    if not found.skippable_blocks:
        return f"no block of {type(target.model).__name__} can be skipped: there is nothing to draft with"
    request = Request(some_tokens(target)[0].tolist(), Ending(num_tokens))
    draft = LayerSkip.blocks([index for index in found.skippable_blocks if index % 2])
    decoding = Decoding(prefix_reuse=found.prefix_reuse)
    try:
        with refusing(target.model, "does not decode"):
            plain = plain_decoder(target).generate(request).tokens
            drafted = Decoder(target, draft, Fixed(max_tokens=4), decoding).generate(request).tokens
    except UnsupportedModelError as refusal:
        return str(refusal)
    comparison = compare(target, request.prompt, plain, drafted)
    if comparison.is_lossless:
        return None
    return (
        f"speculative decoding of {type(target.model).__name__} differs from plain decoding at token "
        f"{comparison.first_difference} of {len(plain)}: its draft would not be lossless"
    )
