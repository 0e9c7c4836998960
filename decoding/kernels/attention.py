"""Attention of few positions on a CPU: one pass over the used part of the cache, in place (our formulation).

torch's attention on a CPU converts masks, packs keys and values block by block and calls a matrix product for each head.
For a few positions that costs several times as much as reading the cache. The kernel in `attention.cpp` reads each
key and value once for all query heads that share them. It takes each position's index as data in place of a mask, reads
no slot beyond the last position, and sums in float32.

A position's result does not depend on the other positions of the pass: plain and verifying passes round alike.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from decoding.kernels.compiled import PRECISIONS, CompiledFunction, call_directly

ALL = 0
"""Window of a layer that attends to all earlier positions."""

_POINTER, _NUMBERS = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)
ATTEND = CompiledFunction(
    "attention.cpp",
    "sdtune_attend",
    [
        *(ctypes.POINTER(_POINTER), ctypes.POINTER(_POINTER), _POINTER, ctypes.c_int64),
        *(_POINTER, _NUMBERS, _NUMBERS),
        *(ctypes.c_double, ctypes.c_int64, ctypes.c_int64),
    ],
)


@torch.library.custom_op("sdtune::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int) -> Tensor:
    """Attend to the slots up to each position.

    `query` is [batch, heads, width, size]; `key` and `value` are [batch, key-value heads, num_slots, size], all of one
    precision. `positions` [batch or 1, 1, 1, width] are the slots of the queries. `window` is the number of slots that each
    sees, or `ALL`. Return [batch, width, heads, size].
    """
    states = [each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value)]
    batch, heads, width, size = query.shape
    outputs = query.new_empty((batch, width, heads, size))
    strides = [_numbers(each.stride()) for each in states]
    positions = positions.contiguous()
    ATTEND(
        (ctypes.c_void_p * 3)(*(each.data_ptr() for each in states)),
        (ctypes.c_void_p * 3)(*map(ctypes.addressof, strides)),
        positions.data_ptr(),
        0 if positions.shape[0] == 1 else width,
        outputs.data_ptr(),
        _numbers(query.shape),
        _numbers(key.shape),
        scale,
        window,
        PRECISIONS.index(query.dtype),
    )
    return outputs


def _numbers(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int) -> Tensor:
    batch, heads, width, size = query.shape
    return query.new_empty((batch, width, heads, size))


def register() -> None:
    call_directly(
        torch.ops.sdtune.attend.default,
        "aoti_torch_cpu_sdtune_attend",
        num_tensors=4,
        size=lambda query, *_: [query.get_size()[index] for index in (0, 2, 1, 3)],
        scalars=("double", "int64_t"),
    )
