"""Regional compilation: one block is compiled, for all layers and all views of them (`torch.compile`).

Weights are inputs of the compiled code, and so are the shapes but for passes of a single position: a model of equal blocks needs
two graphs, blocks without their attention or their MLP, which draft a position at a time, need one more each, and a new skip
set needs none. Compiled code is kept on disk by torch.
"""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from decoding.runners.contract import BlockCall, Outputs

MOST_GRAPHS = 64
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
        # torch counts the graphs of a piece of code, whoever compiles it: each model gets a piece of its own.
        own = types.FunctionType(call_block.__code__.replace(), call_block.__globals__)
        self._compiled: BlockCall = torch.compile(own, dynamic=True, fullgraph=True, options=_options())

    def __call__(self, block: nn.Module, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `BlockCall`."""
        if self.problem is not None:
            return block(hidden_states, *args, **kwargs)
        try:
            return self._compiled(block, hidden_states, args, kwargs)
        except _compiler_errors() as cause:
            self.problem = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
            warnings.warn(f"the layers run uncompiled, slower than they could: {self.problem}", stacklevel=2)
            return block(hidden_states, *args, **kwargs)


@contextmanager
def compiling() -> Iterator[None]:
    """The settings under which blocks are compiled: a first pass of a kind goes under this, later ones need not."""
    # A layer's index is an attribute of its modules: taken for a constant, every layer would be compiled by itself.
    dynamo = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=MOST_GRAPHS)
    # Sizes that happen to be equal, as of heads and of positions, would be taken to be equal always.
    shapes = importlib.import_module("torch.fx.experimental._config").patch(use_duck_shape=False)
    with dynamo, shapes:
        yield


def as_prepared(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """`run`, which has run before with the same shapes, memory and modes, without asking whether its code still fits.

    On small blocks torch's questions take a tenth of the time. Those that tell compiled variants apart are still asked.
    """

    def prepared() -> Outputs:
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
