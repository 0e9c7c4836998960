"""Check of a runner's blocks against a more precise reference, one block at a time (our formulation).

Rounding grows from block to block: on some tokens two correct computations in bfloat16 end with unrelated logits, and
in float32 with a thousand times the rounding of one block. No distance between logits tells that from an error.
Here every block is judged by itself. The runner's own passes record the states before and after each block. From the
recorded input a float32 copy of the block, and the eager block, compute the output for the whole sequence at once, with
the model's own masks and positions. A block is in error where its output is clearly further from the precise one than
the eager output is. If each block is right up to rounding, given its input, so is the model.

The copy takes the memory of one block in float32, never of the model. A model in float32 or float64 is its own reference:
the rounding of one block is far below any error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from decoding.target.parts import ModelPart, run_whole, with_blocks
from decoding.target.stand_ins import Identity, PassState, StandIn, first_of

if TYPE_CHECKING:
    from decoding.target.target import Target

FACTOR = 8
"""How much further from the reference than the eager output a block's output may be.

Correct kernels differ by the order of their sums and by where they round. On SmolLM2-135M in bfloat16, the worst block of the
static runner on a CPU has about a third of the error that this allows.
"""
ALWAYS_ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Error that an output may always have, relative to its size: two units in the last place in half precision, where an
eager block that only copies has none."""


@dataclass(frozen=True)
class Trace:
    """A sequence [1, length], and the states that passes over it recorded: [blocks + 1, 1, length, hidden]."""

    token_ids: Tensor
    states: Tensor
    first: int
    """First position whose states are checked."""
    around: Callable[[nn.Module, int], nn.Module]
    """Makes the traced part's version of a block, given the block and its index."""


class Traced(StandIn):
    """Runs a block of a traced part and records its states."""

    def __init__(
        self, block: nn.Module, trace: list[Tensor], current: PassState, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__(block)
        self.is_first, self.is_last = is_first, is_last
        self.__dict__.update(trace=trace, current=current)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the block; the last one hands all states to the part."""
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
        Traced(block, trace, current, is_first=index == 0, is_last=index == last) for index, block in enumerate(blocks)
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
            raised, raised_kwargs = _raised((given, *args), precision), _raised_all(kwargs, precision)
            best = first_of(trace.around(reference, index)(*raised, **raised_kwargs))
            _, args, kwargs = eager[number][index]
            usual = first_of(trace.around(block, index)(given, *args, **kwargs))
            if not _only_rounded(found, usual, best, trace.first):
                return number, index
    return None


def _calls(target: Target, trace: Trace) -> list[tuple[Any, ...]]:
    """Return how the model calls each of its blocks on the whole sequence."""
    called = [_Called(block, target.anatomy.block_outputs) for block in target.blocks]
    run_whole(with_blocks(target.model, target.anatomy.path, called), trace.token_ids, trace.token_ids.shape[1] - 1)
    return [each.__dict__["call"] for each in called]


def _raised(value: Any, precision: torch.dtype) -> Any:
    """Return a block's argument in `precision`; what is no tensor of numbers stays the same object."""
    if isinstance(value, tuple):
        return tuple(_raised(each, precision) for each in value)
    return value.to(precision) if isinstance(value, Tensor) and value.is_floating_point() else value


def _raised_all(values: dict[str, Any], precision: torch.dtype) -> dict[str, Any]:
    return {name: _raised(value, precision) for name, value in values.items()}


def _only_rounded(found: Tensor, usual: Tensor, best: Tensor, first: int) -> bool:
    """Return True if `found` is about as near to `best` as `usual` is, at every position from `first` on.

    Two measures, of which each hides other errors: the root mean square, which a few huge states dominate, and the
    median, which ignores a few wrong states.
    """
    allowed = ALWAYS_ALLOWED[found.dtype]
    best = best[..., first:, :]
    errors, own = ((each[..., first:, :].to(best.dtype) - best).abs() for each in (found, usual))
    return all(
        bool((measure(errors) <= torch.maximum(FACTOR * measure(own), allowed * measure(best.abs()))).all())
        for measure in (_root_mean_square, _median)
    )


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean(-1).sqrt()


def _median(values: Tensor) -> Tensor:
    return values.median(-1).values
