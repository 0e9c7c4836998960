"""Consecutive calls of compiled code on a CPU, made from C++ (our formulation).

Each call of a compiled block from Python converts its inputs, weights among them, and its outputs. On SmolLM2-135M, this takes a
fifth of the time of an int8 draft step. Here the inputs that do not change are converted once, and results go from call to call.
"""

from __future__ import annotations

import array
import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoding.kernels.compiled import CompiledFunction

MESSAGE_BYTES = 500
"""Room for the message of an error."""

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
PLAY = CompiledFunction(
    "calls.cpp",
    "sdtune_play",
    [_POINTER, _NUMBER, _NUMBER, *[_POINTER, _NUMBER] * 3, _POINTER, ctypes.c_char_p, _NUMBER],
    _NUMBER,
    keeps_lock=True,
)
"""Makes the calls, with Python's lock: compiled blocks release it."""


@dataclass(frozen=True)
class Call:
    """A call of compiled code: the address of its C++ function, and the slots of its inputs and outputs.

    An output without a slot (None) is not used.
    """

    entry: int
    inputs: Sequence[int]
    outputs: Sequence[int | None]


class ConsecutiveCalls:
    """A function of some tensors that makes several calls, one after another.

    Slots are numbered: first `constants`, then the `num_given` tensors that it is called with, then the outputs of the calls. It
    returns the tensors in the slots `returned`, each of which is an output. It may be called by several threads at once.

    Raises RuntimeError if a call fails.
    """

    __name__ = "consecutive_calls"  # in the source of a tape

    def __init__(
        self, calls: Sequence[Call], constants: Sequence[Tensor], num_given: int, returned: Sequence[int]
    ) -> None:
        self._num_calls, self._num_given = len(calls), num_given
        self._program = array.array("q", _program(calls, len(constants), set(returned)))
        self._returned = array.array("q", returned)
        outputs = [slot for call in calls for slot in call.outputs if slot is not None]
        self._num_slots = max([len(constants) + num_given - 1, *outputs]) + 1
        held = _handles(list(constants))
        # The capsules own nothing: the tensors behind them are freed by being taken.
        weakref.finalize(self, _tensors, held).atexit = False
        self._constants = array.array("Q", map(_pointer, held))

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """Return the tensors in the slots `returned`."""
        assert len(given) == self._num_given
        inputs = array.array("Q", map(_pointer, _handles(list(given))))
        results = (ctypes.c_void_p * len(self._returned))()
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        failed = PLAY(
            *(self._program.buffer_info()[0], self._num_calls, self._num_slots),
            *self._constants.buffer_info(),
            *inputs.buffer_info(),
            *self._returned.buffer_info(),
            *(results, message, MESSAGE_BYTES),
        )
        if failed:
            raise RuntimeError(f"a compiled block failed: {message.value.decode(errors='replace')}")
        return _tensors([_capsule(each, None, None) for each in results])


def _program(calls: Sequence[Call], num_constants: int, kept: set[int]) -> list[int]:
    """Return the numbers that `calls.cpp` reads. The last use of a slot that is neither a constant nor kept is marked."""
    last_use = {slot: (index, place) for index, call in enumerate(calls) for place, slot in enumerate(call.inputs)}
    numbers = []
    for index, call in enumerate(calls):
        numbers += [call.entry, len(call.inputs), len(call.outputs)]
        for place, slot in enumerate(call.inputs):
            is_last = last_use[slot] == (index, place) and slot >= num_constants and slot not in kept
            numbers.append(~slot if is_last else slot)
        numbers += [-1 if slot is None else slot for slot in call.outputs]
    return numbers


_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
"""Returns capsules of new handles of tensors. The caller has to free them."""

_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
"""Returns the tensors of capsules, and frees their handles."""

_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object


def _pointer(capsule: object) -> int:
    address: int = _get_pointer(capsule, None)
    return address


_get_pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes, _get_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
