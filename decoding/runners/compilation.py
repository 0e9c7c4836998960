"""Regional compilation (`torch.compile`): one block is compiled, for all layers and all views of them.

Weights and varying sizes are inputs of the compiled code. A model of equal blocks needs two graphs, for one position
and for several; blocks without attention or without MLP, which draft one position at a time, need one more each; a
new skip set needs none. On a CPU the LM head on one position is compiled too. torch caches compiled code on disk.
"""

from __future__ import annotations

import importlib
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from decoding.cache.kv_cache import Slot
from decoding.kernels.calls import CompiledKernel, KernelCall, kernel_calls
from decoding.kernels.choice import register_kernels
from decoding.runners.contract import BlockCall
from decoding.runners.graphs import OutputsT

Note = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any], Any], None]
"""Receives a call: the function, its arguments, its keyword arguments and its results."""

PREPARING = threading.RLock()
"""Held while passes are compiled or recorded: torch's settings for this, and its guards, are those of the whole process."""

MAX_GRAPHS = 64
"""Maximum number of compiled variants: (block kinds and skipped sublayers) x (one position, several)."""


def call_block(block: nn.Module, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return block(hidden_states, *args, **kwargs)


class CompiledBlocks:
    """Calls blocks through one compiled function.

    If a block cannot be compiled, a warning is issued, `problem` holds the reason, and all blocks run uncompiled from
    then on.
    """

    def __init__(self, device: torch.device) -> None:
        self.problem: str | None = None
        self.is_new = False
        """True if the coming passes may be of a kind that is not compiled yet."""
        # torch counts compiled graphs per code object. By the code's name it remembers numbers that differed between calls, and
        # compiles them as inputs, which no tape can record. So each model gets a copy with its own name.
        code = _call_block.__code__.replace(co_name=f"call_block_{uuid4().hex}")
        own = types.FunctionType(code, _call_block.__globals__)
        self._listener = _Listener()
        compiler = partial(_compile_audibly, self._listener, compiler_options(device))
        self._compiled: BlockCall = torch.compile(own, fullgraph=True, backend=compiler)

    def __call__(self, block: nn.Module, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.problem is not None:
            return block(hidden_states, *args, **kwargs)
        if self.is_new:
            _mark_dynamic_sizes(hidden_states, [*args, *kwargs.values()])
        try:
            with nullcontext() if self._listener.note is None else _disable_current_modes():
                return self._compiled(block, hidden_states, args, kwargs)
        except _compiler_errors() as cause:
            self.problem = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
            warnings.warn(f"the layers run uncompiled, slower than they could: {self.problem}", stacklevel=2)
            return block(hidden_states, *args, **kwargs)

    @contextmanager
    def noted_by(self, note: Note) -> Iterator[None]:
        """Pass every call of compiled code to `note`, and hide what it computes from dispatch modes."""
        self._listener.note = note
        try:
            yield
        finally:
            self._listener.note = None


class _Listener(threading.local):
    """Who hears of calls of compiled code, in each thread by itself. The code holds it, and not the object that owns the code."""

    note: Note | None = None

    def __init__(self) -> None:
        self.kernels: dict[tuple[Any, tuple[float | None, ...]], CompiledKernel] = {}
        """Compiled kernels by their code and the numbers among their inputs: the same call is the same function."""

    def __repr__(self) -> str:  # part of the compiler's errors
        return "_Listener()"

    def heard(self, compiled: Callable[..., Any], call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return the outputs of `compiled`, and note the shortest call that computes them again.

        On the way to the kernel, `compiled` handles gradients, aliases and profiling. On small blocks this takes a tenth of
        the time. If it neither changes inputs nor outputs, the kernel alone is noted.
        """
        assert self.note is not None
        with kernel_calls() as made:
            outputs = compiled(*args)
        if len(made) == 1 and made[0].returned(outputs):
            self.note(self._kernel(made[0]), made[0].tensors, {}, outputs)
        else:
            self.note(call, args, {}, outputs)
        return outputs

    def _kernel(self, made: KernelCall) -> CompiledKernel:
        key = made.compute, made.numbers
        if key not in self.kernels:
            self.kernels[key] = CompiledKernel(made)
        return self.kernels[key]


def _compile_audibly(
    listener: _Listener, options: dict[str, Any], module: Any, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile by inductor; the listener hears of each call of the compiled code."""
    compile_fx = importlib.import_module("torch._inductor.compile_fx").compile_fx
    compiled = compile_fx(module, inputs, config_patches=options)

    def call(*args: Any) -> Any:
        return compiled(*args) if listener.note is None else listener.heard(compiled, call, args)

    return call


def _call_block(block: nn.Module, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the block: the code that is compiled."""
    return block(hidden_states, *args, **kwargs)


def _mark_dynamic_sizes(hidden_states: Tensor, others: Sequence[Any]) -> None:
    """Mark the sizes that vary between passes: batch size, positions and slots.

    All other sizes are constants of the compiled code, because each dynamic size adds a little to the cost of every
    call.
    """
    _mark(hidden_states, [-3, -2])
    extents = set()
    for slot in [value for value in others if isinstance(value, Slot)]:
        if slot.extent is not None:
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
    """Apply the settings for compiling blocks, which only the first pass of a kind needs. One thread at a time."""
    # A layer's index is an attribute of its modules: as a constant, it would cause one compilation per layer.
    dynamo = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=MAX_GRAPHS)
    # Sizes that happen to be equal, such as heads and positions, would be assumed always equal.
    shapes = importlib.import_module("torch.fx.experimental._config").patch(use_duck_shape=False)
    register_kernels()
    with PREPARING, dynamo, shapes:
        if isinstance(call, CompiledBlocks):
            call.is_new = True
        try:
            yield
        finally:
            if isinstance(call, CompiledBlocks):
                call.is_new = False


def without_guards(run: Callable[[], OutputsT]) -> Callable[[], OutputsT]:
    """Return `run` without torch's guard checks.

    `run` must have run before with the same shapes, memory and modes. On small blocks the checks take a tenth of the
    time. Guards that tell compiled variants apart are still evaluated.
    """

    def prepared() -> OutputsT:
        with PREPARING, torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            return run()

    return prepared


def compiler_options(device: torch.device) -> dict[str, Any]:
    """Return inductor's options for blocks on `device`.

    Asks the device, not the machine: a model on the CPU of a machine with a GPU is compiled like any other on a CPU.
    """
    # The C++ wrapper halves the time of a small block; on a GPU recording has the same effect.
    return {} if device.type == "cuda" else {"cpp_wrapper": True, "size_asserts": False}


def _compiler_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    return TorchDynamoException, FailOnRecompileLimitHit, CppCompileError, InvalidCxxCompiler
