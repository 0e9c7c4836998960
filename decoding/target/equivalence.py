"""Checks that a runner computes what the eager model computes.

They run on a few tokens when a target is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.errors import UnsupportedRunnerError, one_line
from decoding.runners.contract import PassRequest
from decoding.runners.eager import EagerRunner

if TYPE_CHECKING:
    from decoding.target.target import Target

PROMPT_TOKENS = 6
TOKENS_AFTER = 6


@torch.inference_mode()
def check_runner(target: Target, eager: Target) -> None:
    """Raise `UnsupportedRunnerError` unless `target` reproduces the logits of `eager`, compiling everything on the way.

    In bit-exact mode, every token must also get the same bits at every position within a pass.
    """
    token_ids = torch.arange(PROMPT_TOKENS + TOKENS_AFTER, device=target.device)[None] % target.config.vocab_size
    expected = _logits(eager, token_ids, [TOKENS_AFTER - 1, 1])
    try:
        found = _logits(target, token_ids, [TOKENS_AFTER - 1, 1])
        _draft_once(target, token_ids)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as cause:
        reason = one_line(cause)
        raise UnsupportedRunnerError(
            f"{type(target.model).__name__} does not run with the runner {target.runner.name!r}: {reason}"
        ) from cause
    if not agree(found, expected):
        raise UnsupportedRunnerError(
            f"{type(target.model).__name__} gives different logits with the runner {target.runner.name!r} than without it"
        )
    if target.runner.exact_width is not None:
        _check_exactness(target, target.runner.exact_width)


def _draft_once(target: Target, token_ids: Tensor) -> None:
    """Run a view without one attention and one MLP, to compile such blocks beforehand.

    A search would time the compilation otherwise.
    """
    parts = target.anatomy.attention, target.anatomy.mlp
    attention, mlp = ([index for index, part in enumerate(kind) if part is not None] for kind in parts)
    cache = target.new_cache(token_ids.shape[1])
    target.forward(token_ids[:, :PROMPT_TOKENS], cache, 0)
    view = target.draft_view(attention[:1], mlp[1:2], keep_boundary=False)
    view.forward(token_ids[:, PROMPT_TOKENS : PROMPT_TOKENS + 1], cache, PROMPT_TOKENS)


def _check_exactness(target: Target, width: int) -> None:
    stream = torch.Generator().manual_seed(0)
    token_ids = torch.randint(target.config.vocab_size, (1, PROMPT_TOKENS + width), generator=stream).to(target.device)
    at_once = _logits(target, token_ids, [width])
    for first in range(1, width):
        if not torch.equal(_logits(target, token_ids, [first, width - first]), at_once):
            dtype = str(target.dtype).removeprefix("torch.")
            raise UnsupportedRunnerError(
                f"{type(target.model).__name__} in {dtype} has no bit-exact mode on this device: a token's logits depend on "
                "its position within a pass"
            )


def _logits(target: Target, token_ids: Tensor, widths: list[int]) -> Tensor:
    """Return the logits of the tokens after the prompt, computed in passes of these widths."""
    cache, start = target.new_cache(token_ids.shape[1]), PROMPT_TOKENS
    target.forward(token_ids[:, :start], cache, 0)
    parts = []
    for width in widths:
        parts.append(target.forward(token_ids[:, start : start + width], cache, start))
        start += width
    return torch.cat(parts)


@torch.inference_mode()
def find_shared_pass_difference(target: Target) -> str | None:
    """Return why sequences of the target cannot share a pass, or None.

    Two sequences of different lengths must get the logits that each gets by itself.
    """
    stream = torch.Generator().manual_seed(0)
    ids = torch.randint(target.config.vocab_size, (2, PROMPT_TOKENS + TOKENS_AFTER), generator=stream)
    ids = ids.to(target.device)
    lengths, widths = (PROMPT_TOKENS, PROMPT_TOKENS - 2), (2, TOKENS_AFTER - 1)
    # The runner's own memory, so that what it prepares for it does not outlive it.
    whole = target.runner.new_cache(target.num_layers, 3 * PROMPT_TOKENS + TOKENS_AFTER, num_rows=2)
    memory = whole.storage
    passes, expected = {}, {}
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        alone = target.new_cache(ids.shape[1])
        cache = KVCache(target.num_layers, ids.shape[1], memory.row(row))
        following = ids[row : row + 1, length : length + width]
        for each in (alone, cache):
            EagerRunner().run(target.whole, ids[row : row + 1, :length], each, 0)
        passes[row] = PassRequest(following, cache, length, last_only=False, states=None)
        expected[row] = target.forward(following, alone, length)
    try:
        found = target.runner.run_shared_pass(target.whole, passes, memory)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as cause:
        return f"a pass over several sequences fails: {' '.join(str(cause).split())}"
    if all(agree(found[row].logits, expected[row]) for row in passes):
        return None
    return "several sequences in one pass get different logits than each by itself"


def agree(a: Tensor, b: Tensor) -> bool:
    """Return True if two computations of the same logits are equal up to rounding."""
    tolerance = 1e-4 if a.dtype == torch.float32 else 0.08
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max().clamp_min(1e-6))
