"""Regional compilation: one block is compiled, for all layers and all views of them (`torch.compile`).

Weights are inputs of the compiled code, and so are the sizes that differ from pass to pass: a model of equal blocks needs two
graphs, for one position and for several; blocks without their attention or their MLP, which draft a position at a time, need one
more each, and a new skip set needs none. On a CPU the LM head on one position is compiled too. Compiled code is kept on disk by
torch.
"""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from decoding.cache.kv_cache import Slot
from decoding.runners.contract import BlockCall
from decoding.runners.cpu_one_position import OnePosition
from decoding.runners.cpu_packed import compile_packed_linear
from decoding.runners.graphs import Given

MAX_GRAPHS = 64
"""Compiled variants of the block: (kinds of blocks and of skipped sublayers) x (one position, several)."""


def call_block(block: nn.Module, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The block as it is."""
    return block(hidden_states, *args, **kwargs)


class CompiledBlocks:
    """Calls blocks through one compiled function, or as they are from the moment on that one cannot be compiled.

    `problem` then says why, and a warning has.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self.is_new = False
        """Whether the coming passes may be of a kind that is not compiled yet."""
        # torch counts the graphs of a piece of code, whoever compiles it: each model gets a piece of its own.
        own = types.FunctionType(_call_block.__code__.replace(), _call_block.__globals__)
        self._compiled: BlockCall = torch.compile(own, fullgraph=True, options=_options())

    def __call__(self, block: nn.Module, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `BlockCall`."""
        if self.problem is not None:
            return block(hidden_states, *args, **kwargs)
        if self.is_new:
            _mark_what_varies(hidden_states, [*args, *kwargs.values()])
        try:
            return self._compiled(block, hidden_states, args, kwargs)
        except _compiler_errors() as cause:
            self.problem = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
            warnings.warn(f"the layers run uncompiled, slower than they could: {self.problem}", stacklevel=2)
            return block(hidden_states, *args, **kwargs)


def _call_block(block: nn.Module, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is compiled."""
    with OnePosition(hidden_states.device):
        return block(hidden_states, *args, **kwargs)


def _mark_what_varies(hidden_states: Tensor, others: Sequence[Any]) -> None:
    """Tell torch which sizes differ from pass to pass: texts, positions, places. All others are constants of the compiled code:
    each that is not costs a little in every call.
    """
    _mark(hidden_states, [-3, -2])
    extents = set()
    for slot in [value for value in others if isinstance(value, Slot)]:
        extents.add(slot.extent.shape[0])
        _mark(slot.extent, [0])
        _mark(slot.slots, range(slot.slots.ndim))
        for kept in (slot.keys, slot.values):
            _mark(kept, [0, 2])
    for value in others:
        for tensor in value if isinstance(value, tuple) else (value,):
            if not isinstance(tensor, Tensor) or tensor.ndim < 2:
                continue
            if tensor.ndim == 4 and tensor.shape[-3] == 1 and tensor.shape[-1] in extents:
                _mark(tensor, [0, -2, -1])  # a mask
            else:
                _mark(tensor, [0, -1] if tensor.dtype in (torch.int32, torch.int64) else [-3, -2])


def _mark(tensor: Tensor, dims: Iterable[int]) -> None:
    torch._dynamo.maybe_mark_dynamic(tensor, [dim % tensor.ndim for dim in dims if -tensor.ndim <= dim])


@contextmanager
def compiling(call: BlockCall) -> Iterator[None]:
    """The settings under which blocks are compiled: a first pass of a kind goes under this, later ones need not."""
    if isinstance(call, CompiledBlocks):
        call.is_new = True
    # A layer's index is an attribute of its modules: taken for a constant, every layer would be compiled by itself.
    dynamo = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=MAX_GRAPHS)
    # Sizes that happen to be equal, as of heads and of positions, would be taken to be equal always.
    shapes = importlib.import_module("torch.fx.experimental._config").patch(use_duck_shape=False)
    compile_packed_linear()
    with dynamo, shapes:
        try:
            yield
        finally:
            if isinstance(call, CompiledBlocks):
                call.is_new = False


def as_prepared(run: Callable[[], Given]) -> Callable[[], Given]:
    """`run`, which has run before with the same shapes, memory and modes, without asking whether its code still fits.

    On small blocks torch's questions take a tenth of the time. Those that tell compiled variants apart are still asked.
    """

    def prepared() -> Given:
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            return run()

    return prepared


def _options() -> dict[str, Any]:
    # Wrapped in C++, a small block takes half the time that it takes wrapped in Python; on a GPU the recording does that.
    return {} if torch.cuda.is_available() else {"cpp_wrapper": True, "size_asserts": False}


def _compiler_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    return TorchDynamoException, FailOnRecompileLimitHit, CppCompileError, InvalidCxxCompiler
