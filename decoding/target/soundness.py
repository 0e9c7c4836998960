"""Checks that a model computes in parts what it computes at once: over its cache, without some sublayers, from a boundary on.

They run a few tokens eagerly. What the model's own code raises on the way is a reason like any other.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from decoding.cache.kv_cache import KVCache
from decoding.errors import ProfileWarning, UnsupportedModelError, UnsupportedRequestError
from decoding.runners.eager import EagerRunner
from decoding.target.anatomy import Anatomy, follow, refusing, run_two_tokens
from decoding.target.equivalence import agree
from decoding.target.parts import with_blocks, without
from decoding.target.views import DraftView, ResumeView

if TYPE_CHECKING:
    from decoding.target.target import Target

T = TypeVar("T")

CONTEXT_TOKENS = 12
FEWEST_TOKENS = 4
"""Two halves, each with a token whose prefix is known and one whose prefix is not."""
PADDING = 5


def some_tokens(target: Target) -> Tensor:
    """Return different token ids [1, an even number, CONTEXT_TOKENS if possible], the same for every check of a vocabulary.

    They end before the position where rotary frequencies change: frequencies that a pass computes stay in the model.
    """
    limits = (CONTEXT_TOKENS, target.config.vocab_size, target.context_length, target.widest_pass(0))
    num_tokens = max(FEWEST_TOKENS, min(limit for limit in limits if limit is not None) // 2 * 2)
    shuffled = torch.randperm(target.config.vocab_size, generator=torch.Generator().manual_seed(0))
    return shuffled[None, :num_tokens].to(target.device)


@torch.inference_mode()
def separable(model: PreTrainedModel, anatomy: Anatomy) -> Anatomy:
    """Return `anatomy` without the sublayers that the model does not run without.

    A block may need more of its attention than the branch that it adds: DBRX's returns the residual stream too.
    """

    def runs_without(attention: Sequence[int], mlp: Sequence[int]) -> bool:
        skips = [(index in attention, index in mlp) for index in range(len(anatomy.attention))]
        blocks = [
            without(block, index, anatomy, *skips[index]) for index, block in enumerate(follow(model, anatomy.path))
        ]
        try:
            with refusing(model, "does not run without some sublayers"):
                run_two_tokens(with_blocks(model, anatomy.path, blocks), KVCache(len(blocks), capacity=2))
        except UnsupportedModelError:
            return False
        return True

    attention, mlp = ([index for index, part in enumerate(kind) if part] for kind in (anatomy.attention, anatomy.mlp))
    if not runs_without(attention, []):
        attention = [index for index in attention if runs_without([index], [])]
    if not runs_without([], mlp):
        mlp = [index for index in mlp if runs_without([], [index])]
    return replace(
        anatomy,
        attention=tuple(part if index in attention else None for index, part in enumerate(anatomy.attention)),
        mlp=tuple(part if index in mlp else None for index, part in enumerate(anatomy.mlp)),
    )


@torch.inference_mode()
def check_cache(target: Target) -> None:
    """Raise `UnsupportedModelError` unless cached passes match one whole pass, also after a rollback."""
    name, ids = type(target.model).__name__, some_tokens(target)
    num_tokens = ids.shape[1]
    half = num_tokens // 2
    with refusing(target.model, "does not run several tokens at once on sdtune's key-value cache"):
        whole = target.forward(ids, target.new_cache(num_tokens), 0)
        if whole.ndim != 2 or whole.shape[0] != num_tokens or whole.shape[1] < target.config.vocab_size:
            raise UnsupportedModelError(
                f"{name} does not give next-token logits for each position: it is not a causal language model"
            )
        cache = target.new_cache(2 * num_tokens)
        target.forward(ids[:, :half], cache, 0)
        in_parts = target.forward(ids[:, half:], cache, half)
        if not agree(in_parts, whole[half:]):
            raise UnsupportedModelError(
                f"{name} gives different logits from a cache than from one pass: it keeps state outside the cache, or a token "
                "attends to later tokens"
            )
        target.forward(ids.flip(1)[:, :half], cache, half)  # tokens that will be rejected
        cache.roll_back(half)
        if not agree(target.forward(ids[:, half:], cache, half), whole[half:]):
            raise UnsupportedModelError(
                f"the cache of {name} does not roll back: its logits differ after a rejected draft"
            )
        _check_window(target)


def _check_window(target: Target) -> None:
    """Raise `UnsupportedModelError` if a sliding window is kept by dropping positions from transformers' cache alone.

    sdtune's cache keeps all positions, and masks must hide those before the window: with a window of one, the second of two tokens
    must get other logits. The two differ: attention over equal values is the same over any of them.
    """
    config, path, ids = target.config, target.anatomy.path, some_tokens(target)[:, :2]
    slides = any(getattr(layer, "is_sliding", False) for layer in DynamicCache(config=config).layers)
    if not slides or "sliding_window" not in vars(config) or config._attn_implementation not in ("sdpa", "eager"):
        return
    views = [with_blocks(target.model, path, list(target.blocks)) for _ in range(2)]
    narrow: Any = views[1]
    for name in ("", *path[:-1]):
        narrow = getattr(narrow, name) if name else narrow
        if hasattr(getattr(narrow, "config", None), "sliding_window"):
            narrow.config = copy.copy(narrow.config)
            narrow.config.sliding_window = 1
    given, narrowed = (run_two_tokens(view, KVCache(target.num_layers, capacity=2), ids) for view in views)
    if torch.equal(given, narrowed):
        raise UnsupportedModelError(
            f"{type(target.model).__name__} keeps its sliding window by dropping positions from the cache, not by a mask: they "
            "could not be brought back after a rejected draft"
        )


@torch.inference_mode()
def check_skips(target: Target, attention: Sequence[int], mlp: Sequence[int]) -> None:
    """Raise `UnsupportedModelError` unless the model runs without these sublayers.

    Its skipped attention must leave the cache untouched, and its logits must be finite.
    """
    view = DraftView(target, attention, mlp, keep_boundary=False)
    cache = target.new_cache(CONTEXT_TOKENS)
    skipped = f"attention {[*attention]}, MLP {[*mlp]}"
    with refusing(target.model, f"does not run without the skipped sublayers ({skipped})"):
        logits = view.run(some_tokens(target), cache, 0).logits
    expected = [0 if index in attention else 1 for index in range(target.num_layers)]
    if cache.updates_per_layer != expected or not bool(torch.isfinite(logits).all()):
        raise UnsupportedModelError(
            f"{type(target.model).__name__} cannot draft without the skipped sublayers ({skipped}): its logits are not finite, or "
            "a skipped attention still writes to the cache"
        )


@torch.inference_mode()
def find_resume_difference(target: Target, boundary: int) -> str | None:
    """Return why no verification may resume at block `boundary`, or None.

    Tested with the last position's prefix known and unknown.
    """
    ids = some_tokens(target)
    half = ids.shape[1] // 2
    draft, resume = DraftView(target, [boundary], [boundary], keep_boundary=True), ResumeView(target, boundary)
    try:
        with refusing(target.model, f"does not run from block {boundary} on"):
            whole = target.forward(ids, target.new_cache(CONTEXT_TOKENS), 0)[half:]
            for known in (half, half - 1):
                cache = target.new_cache(CONTEXT_TOKENS)
                target.forward(ids[:, :half], cache, 0)
                states = draft.run(ids[:, half : half + known], cache, half).states
                assert states is not None, "the boundary is kept"
                if not agree(resume.run(ids[:, half:], cache, half, states).logits, whole):
                    return (
                        f"{type(target.model).__name__} gives different logits from block {boundary} on than as a whole"
                    )
    except UnsupportedModelError as failure:
        return str(failure)
    return None


@torch.inference_mode()
def counts_padding(target: Target) -> bool:
    """Return True if the model computes something else for a sequence with padding on its left than without.

    Such a model counts positions by itself, and takes padding for positions.
    """
    model, ids = target.model, some_tokens(target)
    padded = torch.cat([ids[:, :PADDING], ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :PADDING] = 0
    inputs = {"input_ids": padded, "attention_mask": mask, "use_cache": False}
    if "position_ids" in signature(model.forward).parameters:  # as `generate` gives them
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    with refusing(model, "does not run on a padded sequence"):
        alone = model(input_ids=ids, use_cache=False).logits
        return not agree(model(**inputs).logits[:, -1], alone[:, -1])


class Checks:
    """What a target can do, each tested on a few tokens when it is first asked for. `known` keeps the answers, with the target."""

    def __init__(self, target: Target, known: dict[object, Any]) -> None:
        self._target, self._known = target, known

    def _once(self, what: object, check: Callable[[], T]) -> T:
        if what not in self._known:
            self._known[what] = check()
        answer: T = self._known[what]
        return answer

    @property
    def _plain(self) -> Target:
        """The model with the plain runner, for checks that no other runner need prepare for."""
        target = self._target
        return target if type(target.runner) is EagerRunner else self._once("plain", lambda: type(target)(target.model))

    def cache(self) -> None:
        """Raise `UnsupportedModelError` unless passes over a cache, also after a rollback, compute what one pass does."""
        self._once("cache", lambda: check_cache(self._plain))

    def skips(self, skip_attention: Sequence[int], skip_mlp: Sequence[int]) -> None:
        """Raise `UnsupportedModelError` unless a few tokens run without these sublayers."""
        known = tuple(skip_attention), tuple(skip_mlp)
        self._once(known, lambda: check_skips(self._plain, *known))

    def padding(self) -> None:
        """Raise `UnsupportedRequestError` if the output depends on padding on the left: sequences are decoded without it."""
        if self._once("padding", lambda: counts_padding(self._plain)):
            raise UnsupportedRequestError(
                f"{type(self._target.model).__name__} counts padding as positions, and its output depends on it: give prompts of "
                "different lengths one by one, without padding"
            )

    def resumes_at(self, boundary: int) -> bool:
        """Return True if a verification may resume at block `boundary`; one that may not runs the whole model, with a warning."""
        is_new = boundary not in self._known
        difference = self._once(boundary, lambda: find_resume_difference(self._plain, boundary))
        if is_new and difference is not None:
            warnings.warn(f"{difference}: each verification runs the whole model", ProfileWarning, stacklevel=2)
        return difference is None
