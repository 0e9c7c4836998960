"""Capabilities of a loaded model, found by running it.

The probe finds which sublayers can be skipped, if the cache rolls back, if verification may resume after the shared
prefix, and if speculative decoding reproduces plain decoding. It goes through `decoding.target` and knows no model
family by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.cache.kv_cache import KVCache
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.errors import UnsupportedModelError
from decoding.losslessness import compare
from decoding.profile import Decoding
from decoding.target import Target, agree
from decoding.text import Ending

CONTEXT_TOKENS = 12
GENERATED_TOKENS = 24


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
        """True if sdtune can tune this model."""
        return self.refusal is None


@torch.inference_mode()
def probe(model: PreTrainedModel) -> Capabilities:
    """Probe `model` with a few tokens of its vocabulary, run whole and in part.

    An unsuitable model is reported in `Capabilities.refusal`, not raised.
    """
    known = {
        "architecture": type(model).__name__,
        "num_parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
    }
    try:
        target = Target(model)
        ids = _some_tokens(target)
        _check_cache(target, ids)
    except UnsupportedModelError as refusal:
        return Capabilities(**known, refusal=str(refusal))
    layers = range(target.num_layers)
    blocks = tuple(i for i in layers if _can_skip(target, ids, [i], [i]))
    reuse = bool(blocks) and _can_resume(target, ids)
    found = Capabilities(
        **known,
        num_layers=target.num_layers,
        skippable_blocks=blocks,
        skippable_attention=tuple(i for i in layers if target.anatomy.attention[i] and _can_skip(target, ids, [i], [])),
        skippable_mlp=tuple(i for i in layers if target.anatomy.mlp[i] and _can_skip(target, ids, [], [i])),
        prefix_reuse=reuse,
    )
    return replace(found, refusal=_find_refusal(target, ids, blocks, reuse))


def _find_refusal(target: Target, ids: Tensor, blocks: Sequence[int], reuse: bool) -> str | None:
    if not blocks:
        return f"no block of {type(target.model).__name__} can be skipped: there is nothing to draft with"
    request = Request(ids[0].tolist(), Ending(GENERATED_TOKENS))
    plain = plain_decoder(target).generate(request).tokens
    draft = LayerSkip.blocks([index for index in blocks if index % 2])
    drafted = Decoder(target, draft, Fixed(max_tokens=4), Decoding(prefix_reuse=reuse)).generate(request).tokens
    comparison = compare(target, request.prompt, plain, drafted)
    if comparison.is_lossless:
        return None
    return (
        f"speculative decoding of {type(target.model).__name__} differs from plain decoding at token "
        f"{comparison.first_difference} of {len(plain)}: its draft would not be lossless"
    )


def _some_tokens(target: Target) -> Tensor:
    """Return token ids [1, CONTEXT_TOKENS], the same for every probe of a vocabulary."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.config.vocab_size
    return torch.randint(vocabulary, (1, CONTEXT_TOKENS), generator=generator).to(target.device)


def _check_cache(target: Target, ids: Tensor) -> None:
    """Raise UnsupportedModelError unless cached passes match one whole pass, also after a rollback."""
    whole = target.forward(ids, target.new_cache(CONTEXT_TOKENS), 0)
    if whole.ndim != 2 or whole.shape[0] != CONTEXT_TOKENS or whole.shape[1] < target.config.vocab_size:
        raise UnsupportedModelError(
            f"{type(target.model).__name__} does not give next-token logits for each position: it is not a causal language model"
        )
    half = CONTEXT_TOKENS // 2
    cache = target.new_cache(2 * CONTEXT_TOKENS)
    target.forward(ids[:, :half], cache, 0)
    in_parts = target.forward(ids[:, half:], cache, half)
    if not agree(in_parts, whole[half:]):
        raise UnsupportedModelError(
            f"{type(target.model).__name__} gives different logits from a cache than from one pass: it keeps state "
            "outside the cache, or a token attends to later tokens"
        )
    _forget_and_repeat(target, ids, whole, cache, half)


def _forget_and_repeat(target: Target, ids: Tensor, whole: Tensor, cache: KVCache, half: int) -> None:
    target.forward(ids.flip(1)[:, :half], cache, half)  # tokens that will be rejected
    cache.roll_back(half)
    if not agree(target.forward(ids[:, half:], cache, half), whole[half:]):
        raise UnsupportedModelError(
            f"the cache of {type(target.model).__name__} does not roll back: its logits differ after a rejected draft"
        )


def _can_skip(target: Target, ids: Tensor, attention: list[int], mlp: list[int]) -> bool:
    """Return True if the view runs, leaves skipped attention's cache untouched, and gives finite logits."""
    cache = target.new_cache(CONTEXT_TOKENS)
    logits = target.draft_view(attention, mlp, keep_boundary=False).forward(ids, cache, 0)
    expected = [0 if index in attention else 1 for index in range(target.num_layers)]
    return cache.updates_per_layer == expected and bool(torch.isfinite(logits).all())


def _can_resume(target: Target, ids: Tensor) -> bool:
    """Return True if a resumed pass matches a whole pass.

    Tested with the last position's prefix known and unknown.
    """
    boundary = target.num_layers // 2
    half = CONTEXT_TOKENS // 2
    if boundary == 0:
        return False
    draft = target.draft_view([boundary], [boundary], keep_boundary=True)
    for known in (half, half - 1):
        cache = target.new_cache(CONTEXT_TOKENS)
        target.forward(ids[:, :half], cache, 0)
        states = draft.run(ids[:, half : half + known], cache, half).states
        assert states is not None, "the boundary is kept"
        try:
            resumed = target.resume_view(boundary).forward(ids[:, half:], cache, half, states)
        except (RuntimeError, TypeError, IndexError):
            return False  # a family whose blocks cannot be run on part of a pass: it verifies whole
        if not agree(resumed, target.forward(ids, target.new_cache(CONTEXT_TOKENS), 0)[half:]):
            return False
    return True
