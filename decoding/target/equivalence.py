"""Checks that a runner computes what the eager model computes.

They run on a few tokens when a target is made. Each shape of a pass runs twice, on other tokens at another position:
the first run prepares the pass, and only the second one uses what was prepared.

Rounding grows from block to block: on some tokens two correct computations in bfloat16 end with unrelated logits, and
in float32 with a thousand times the rounding of one block. No distance between logits tells that from an error.
So every block is judged by itself (our formulation). The runner's own passes record the states before and after each block.
From the recorded input a float32 copy of the block, and the eager block, compute the output for the whole sequence at once,
with the model's own masks and positions. A block is in error where its output is clearly further from the precise one than
the eager output is. If each block is right up to rounding, given its input, so is the model.

The copy takes the memory of one block in float32, never of the model. A model in float32 or float64 is its own reference:
the rounding of one block is far below any error.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from decoding.cache.kv_cache import KVCache, Storage
from decoding.errors import UnsupportedRunnerError, one_line
from decoding.runners.contract import PassRequest
from decoding.runners.eager import EagerRunner
from decoding.target.parts import ModelPart, run_whole, with_blocks, without
from decoding.target.stand_ins import Identity, PassState, StandIn, first_of
from decoding.target.views import DraftView

if TYPE_CHECKING:
    from decoding.target.target import Target
    from decoding.target.views import DraftView

PROMPT_TOKENS = 6
TOKENS_AFTER = 6
CHAIN_TOKENS = 2
RUNS = ("", " when it is repeated")
"""For messages: the run that prepares a pass, and the run that uses the preparation."""

FACTOR = 8
"""How much further from the reference than the eager output a block's output may be.

Correct kernels differ by the order of their sums and by where they round. On SmolLM2-135M in bfloat16, the worst block of the
static runner on a CPU has about a third of the error that this allows.
"""
ALWAYS_ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Error that an output may always have, relative to its size: two units in the last place in half precision, where an
eager block that only copies has none."""

FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a model's code may raise in passes that it does not take."""

Around = Callable[[nn.Module, int], nn.Module]
"""Makes a part's version of a block, given the block and its index."""


@torch.inference_mode()
def check_runner(target: Target, eager: Target) -> None:
    """Raise `UnsupportedRunnerError` unless `target` computes what `eager` does, compiling everything on the way.

    Checked are passes of the whole model over one and over several positions, and passes and chains of a view. The view
    lacks one attention and one MLP: such blocks are compiled here, because a search would time the compilation
    otherwise. Rounding is told from error block by block (`find_wrong_block`). Logits must then agree with
    those of the eager LM head on the same states. In bit-exact mode, every token must also get the same bits at every
    position within a pass.
    """
    parts = target.anatomy.attention, target.anatomy.mlp
    attention, mlp = ([index for index, part in enumerate(kind) if part is not None] for kind in parts)
    attention, mlp = attention[:1], mlp[1:2]
    view = DraftView(target, attention, mlp, keep_boundary=False)

    def without_some(block: nn.Module, index: int) -> nn.Module:
        return without(block, index, target.anatomy, index in attention, index in mlp)

    traced = [
        traced_part(target, target.stack, is_whole=True),
        traced_part(target, [without_some(block, index) for index, block in enumerate(target.stack)], is_whole=False),
    ]
    kept: list[Trace] = []
    for which, (token_ids, start) in zip(RUNS, _sequences(target), strict=True):
        with _running(target):
            logits = _logits_of_all(target, view, token_ids, start)
            traces = _traces(target, traced, without_some, token_ids, start)
            drafted = _draft_chain(target, view, token_ids, start)
        expected = [_logits_of_states(eager, trace, is_draft=index > 0) for index, trace in enumerate(traces)]
        kept += traces
        if not all(map(agree, logits, expected)):
            raise UnsupportedRunnerError(_difference(target, f"gives different logits{which}"))
        if not _is_chain_of(target, view, token_ids, start, drafted):
            raise UnsupportedRunnerError(_difference(target, f"drafts different tokens{which}"))
    if (wrong := find_wrong_block(target, kept)) is not None:
        which = RUNS[wrong[0] // len(traced)]
        raise UnsupportedRunnerError(_difference(target, f"gives different logits{which}"))
    if target.runner.exact_width is not None:
        _check_exactness(target, target.runner.exact_width)


def _traces(
    target: Target, traced: Sequence[ModelPart], of_view: Around, token_ids: Tensor, start: int
) -> tuple[Trace, Trace]:
    """Return the states of passes of the whole model, and of one position of the view after the same prompt."""
    whole, view = traced
    cache = target.new_cache(token_ids.shape[1])
    ends = [0, start, start + TOKENS_AFTER - 1, start + TOKENS_AFTER]
    states = [_states(target, whole, token_ids[:, a:b], cache, a) for a, b in itertools.pairwise(ends)]
    cache = _prompted(target, token_ids, start)
    seen = token_ids[:, : start + 1]
    after = _states(target, view, seen[:, start:], cache, start)
    return (
        Trace(token_ids[:, : ends[-1]], torch.cat(states, dim=-2), start, lambda block, index: block),
        Trace(seen, torch.cat([states[0], after], dim=-2), start, of_view),
    )


def _states(target: Target, part: ModelPart, token_ids: Tensor, cache: KVCache, start: int) -> Tensor:
    states = target.run(part, token_ids, cache, start).states
    assert states is not None, "the part is traced"
    return states


def _logits_of_states(eager: Target, trace: Trace, *, is_draft: bool) -> Tensor:
    """Return the logits of the checked positions by the model's own final norm and LM head, from the recorded states."""
    blocks, token_ids = eager.emitting(trace.states[-1]), trace.token_ids
    view = eager.part(blocks, drafts=is_draft)
    cache = KVCache(eager.num_layers, token_ids.shape[1])
    return EagerRunner().run(view, token_ids, cache, 0).logits[trace.first :]


@contextmanager
def _running(target: Target) -> Iterator[None]:
    """Turn a failure of the runner into an `UnsupportedRunnerError`."""
    try:
        yield
    except FAILURES as cause:
        if isinstance(cause, torch.OutOfMemoryError):
            raise
        raise UnsupportedRunnerError(
            f"{type(target.model).__name__} does not run with the runner {target.runner.name!r}: {one_line(cause)}"
        ) from cause


def _difference(target: Target, what: str) -> str:
    return f"{type(target.model).__name__} {what} with the runner {target.runner.name!r} than without it"


def _sequences(target: Target) -> Iterator[tuple[Tensor, int]]:
    """Yield two sequences [1, length] of equal lengths, each with the position at which its passes start."""
    length = PROMPT_TOKENS + TOKENS_AFTER + len(RUNS) - 1
    token_ids = torch.arange(length, device=target.device)[None] % target.config.vocab_size
    for index in range(len(RUNS)):
        yield (token_ids if index % 2 == 0 else token_ids.flip(1)), PROMPT_TOKENS + index


def _prompted(target: Target, token_ids: Tensor, start: int) -> KVCache:
    """Return a cache for all tokens, which holds the first `start`."""
    cache = target.new_cache(token_ids.shape[1])
    target.forward(token_ids[:, :start], cache, 0)
    return cache


def _logits_of_all(target: Target, view: DraftView, token_ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return logits of passes over several positions and over one, and of a view over one."""
    whole = _logits(target, token_ids, [TOKENS_AFTER - 1, 1], start)
    cache = _prompted(target, token_ids, start)
    return whole, view.run(token_ids[:, start : start + 1], cache, start).logits


def _draft_chain(target: Target, view: DraftView, token_ids: Tensor, start: int) -> Tensor:
    """Return `CHAIN_TOKENS` token ids that the view drafts after the first `start + 1` tokens."""
    cache = _prompted(target, token_ids, start)
    return view.write(token_ids[:, start : start + 1], cache, start, CHAIN_TOKENS).token_ids


def _is_chain_of(target: Target, view: DraftView, token_ids: Tensor, start: int, drafted: Tensor) -> bool:
    """Return True if each of `drafted` is the most likely token of `view` up to rounding."""
    cache = _prompted(target, token_ids, start)
    given = torch.cat([token_ids[0, start : start + 1], drafted])
    for index, token in enumerate(drafted):
        (logits,) = view.run(given[index : index + 1][None], cache, start + index).logits.float()
        if logits.max() - logits[token] > _tolerance(target.dtype) * logits.abs().max().clamp_min(1e-6):
            return False
    return True


def _check_exactness(target: Target, width: int) -> None:
    stream = torch.Generator().manual_seed(0)
    token_ids = torch.randint(target.config.vocab_size, (1, PROMPT_TOKENS + width), generator=stream).to(target.device)
    at_once = _logits(target, token_ids, [width], PROMPT_TOKENS)
    for first in range(1, width):
        if not torch.equal(_logits(target, token_ids, [first, width - first], PROMPT_TOKENS), at_once):
            dtype = str(target.dtype).removeprefix("torch.")
            raise UnsupportedRunnerError(
                f"{type(target.model).__name__} in {dtype} has no bit-exact mode on this device: a token's logits depend on "
                "its position within a pass"
            )


def _logits(target: Target, token_ids: Tensor, widths: list[int], start: int) -> Tensor:
    """Return the logits of the tokens from position `start` on, computed in passes of these widths."""
    cache = _prompted(target, token_ids, start)
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
    length = PROMPT_TOKENS + TOKENS_AFTER
    # The runner's own memory: what it prepares for other memory would outlive it.
    whole = target.runner.new_cache(target.num_layers, length + 1, 2)
    for seed, which in enumerate(RUNS):
        stream = torch.Generator().manual_seed(seed)
        ids = torch.randint(target.config.vocab_size, (2, length), generator=stream).to(target.device)
        passes, expected = _passes_of_two(target, ids, whole.storage, PROMPT_TOKENS - seed)
        try:
            found = target.runner.run_shared_pass(target.whole, passes, whole.storage)
        except FAILURES as cause:
            return f"its attention takes no mask for several sequences in one pass{which} ({one_line(cause)})"
        if not all(agree(found[row].logits, expected[row]) for row in passes):
            return f"several sequences in one pass get different logits than each by itself{which}"
    return None


def _passes_of_two(
    target: Target, ids: Tensor, memory: Storage, longer: int
) -> tuple[Mapping[int, PassRequest], Mapping[int, Tensor]]:
    """Return a pass of each of two sequences after prompts of different lengths, and the eager logits of each."""
    passes, expected = {}, {}
    for row, (length, width) in enumerate(((longer, 2), (longer - 2, TOKENS_AFTER - 1))):
        alone = target.new_cache(ids.shape[1])
        cache = KVCache(target.num_layers, ids.shape[1], memory.row(row))
        following = ids[row : row + 1, length : length + width]
        for each in (alone, cache):
            EagerRunner().run(target.whole, ids[row : row + 1, :length], each, 0)
        passes[row] = PassRequest(following, cache, length, last_only=False, states=None)
        expected[row] = EagerRunner().run(target.whole, following, alone, length).logits
    return passes, expected


def agree(a: Tensor, b: Tensor) -> bool:
    """Return True if two computations of the same logits are equal up to rounding."""
    return bool((a.float() - b.float()).abs().max() <= _tolerance(a.dtype) * b.float().abs().max().clamp_min(1e-6))


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 0.08


@dataclass(frozen=True)
class Trace:
    """A sequence [1, length], and the states that passes over it recorded: [blocks + 1, 1, length, hidden]."""

    token_ids: Tensor
    states: Tensor
    first: int
    """First position whose states are checked."""
    around: Around
    """Makes the traced part's version of a block."""


class Traced(StandIn):
    """Runs a block of a traced part and records its states in `trace`."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_first:
            self.trace[:] = [hidden_states]
        output = self.block(hidden_states, *args, **kwargs)
        self.trace.append(first_of(output))
        if self.is_last:
            self.current.tapped.append(torch.stack(self.trace))
            self.trace.clear()
        return output


class _Called(Identity):
    """Keeps the arguments with which the model calls a block, and runs nothing."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["call"] = hidden_states, args, kwargs
        return super().forward(hidden_states, *args, **kwargs)


def traced_part(target: Target, blocks: Sequence[nn.Module], *, is_whole: bool) -> ModelPart:
    """Return the part of these blocks; the states of its passes are [blocks + 1, .., width, hidden]."""
    current, trace, last = PassState(), list[Tensor](), len(blocks) - 1
    traced = [
        Traced(block, trace=trace, current=current, is_first=index == 0, is_last=index == last)
        for index, block in enumerate(blocks)
    ]
    return target.part(traced, current, is_whole=is_whole)


def find_wrong_block(target: Target, traces: Sequence[Trace]) -> tuple[int, int] | None:
    """Return the index of a trace and of its first wrong block, or None. The embeddings count as the first block's."""
    precision = torch.promote_types(target.dtype, torch.float32)
    precise, eager = ([_calls(target, trace) for trace in traces] for _ in range(2))
    for number, trace in enumerate(traces):
        embedded = eager[number][0][0]
        if not _only_rounded(trace.states[0], embedded, embedded.to(precision), trace.first):
            return number, 0
    for index, block in enumerate(target.blocks):
        reference = block if target.dtype is precision else copy.deepcopy(block).to(precision)
        for number, trace in enumerate(traces):
            given, found = trace.states[index], trace.states[index + 1]
            _, args, kwargs = precise[number][index]
            raised = {name: _raised(value, precision) for name, value in kwargs.items()}
            best = first_of(trace.around(reference, index)(*_raised((given, *args), precision), **raised))
            _, args, kwargs = eager[number][index]
            usual = first_of(trace.around(block, index)(given, *args, **kwargs))
            if not _only_rounded(found, usual, best, trace.first):
                return number, index
    return None


def _calls(target: Target, trace: Trace) -> list[tuple[Any, ...]]:
    """Return how the model calls each of its blocks on the whole sequence."""
    called = [_Called(block, num_outputs=target.anatomy.block_outputs) for block in target.blocks]
    run_whole(with_blocks(target.model, target.anatomy.path, called), trace.token_ids, trace.token_ids.shape[1] - 1)
    return [each.__dict__["call"] for each in called]


def _raised(value: Any, precision: torch.dtype) -> Any:
    """Return a block's argument in `precision`; what is no tensor of numbers stays the same object."""
    if isinstance(value, tuple):
        return tuple(_raised(each, precision) for each in value)
    return value.to(precision) if isinstance(value, Tensor) and value.is_floating_point() else value


def _only_rounded(found: Tensor, usual: Tensor, best: Tensor, first: int) -> bool:
    """Return True if `found` is about as near to `best` as `usual` is, at every position from `first` on.

    Two measures, of which each hides other errors: the root mean square, which a few huge states dominate, and the
    median, which ignores a few wrong states.
    """
    best = best[..., first:, :]
    errors, own = ((each[..., first:, :].to(best.dtype) - best).abs() for each in (found, usual))
    return all(
        bool((measure(errors) <= _allowed(measure(own), measure(best.abs()), found.dtype)).all())
        for measure in (_root_mean_square, _median)
    )


def _allowed(own: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error that an output of `size` may have at each position, given the eager one's own.

    Where one huge state dominates, the eager output may be exact at a position by luck. Every position is therefore allowed
    `FACTOR` times the eager output's usual error, which is the median over positions, relative to the size.
    """
    usual = size * (own / size.clamp_min(torch.finfo(size.dtype).tiny)).median(-1, keepdim=True).values
    return torch.maximum(FACTOR * torch.maximum(own, usual), ALWAYS_ALLOWED[dtype] * size)


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean(-1).sqrt()


def _median(values: Tensor) -> Tensor:
    return values.median(-1).values
