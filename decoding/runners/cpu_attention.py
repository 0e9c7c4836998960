"""Attention of few positions on a CPU: one pass over the used part of the cache, in place (our formulation).

torch's attention on a CPU converts masks, packs keys and values block by block and calls a matrix product for each head.
For a few positions that costs several times as much as reading the cache. The kernel in `cpu_attention.cpp` reads each
key and value once for all query heads that share them. It takes each position's index as data in place of a mask, reads
no slot beyond the last position, and sums in float32.

A position's result does not depend on the other positions of the pass: plain and verifying passes round alike. The kernel
needs AVX-512, and AVX-512 BF16 for bfloat16. Elsewhere torch's attention takes over.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.runners.cpu_kernels import call_class, compiled_library, has_instructions

SOURCE = Path(__file__).with_suffix(".cpp")

MAX_SIZE = 256
"""Maximum head size."""
ALL = 0
"""Window of a layer that attends to all earlier positions."""


@torch.library.custom_op("sdtune::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int) -> Tensor:
    """Attend to the slots before each position, and to the query's own.

    `query` is [batch, heads, width, size]; `key` and `value` are [batch, key-value heads, num_slots, size], all of one
    precision, float32 or bfloat16. `positions` [batch or 1, 1, 1 or 2, width] are the positions of the queries, in a second row
    their own slots; without it they are the positions. `window` is the number of slots that each sees, or `ALL`. Return [batch,
    width, heads, size].
    """
    library = _library()
    assert library is not None, "checked by `has_attention_kernel` when the block was prepared"
    states = [each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value)]
    batch, heads, width, size = query.shape
    outputs = query.new_empty((batch, width, heads, size))
    strides = [_numbers(each.stride()) for each in states]
    positions = positions.contiguous()
    num_rows = positions.shape[2]
    library.sdtune_attend(
        (ctypes.c_void_p * 3)(*(each.data_ptr() for each in states)),
        (ctypes.c_void_p * 3)(*map(ctypes.addressof, strides)),
        positions.data_ptr(),
        0 if positions.shape[0] == 1 else num_rows * width,
        (num_rows - 1) * width,
        outputs.data_ptr(),
        _numbers(query.shape),
        _numbers(key.shape),
        scale,
        window,
        query.itemsize,
    )
    return outputs


def _numbers(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int) -> Tensor:
    batch, heads, width, size = query.shape
    return query.new_empty((batch, width, heads, size))


def has_attention_kernel(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Return True if the kernel attends on this device in this precision."""
    if device.type != "cpu" or dtype is None or not has_instructions(dtype):
        return False
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None with a warning if it cannot be compiled."""
    library = compiled_library(SOURCE)
    if library is None:
        return None
    pointer = ctypes.c_void_p
    numbers = ctypes.POINTER(ctypes.c_int64)
    library.sdtune_attend.argtypes = [
        *(ctypes.POINTER(pointer), ctypes.POINTER(pointer), pointer, ctypes.c_int64, ctypes.c_int64),
        *(pointer, numbers, numbers),
        *(ctypes.c_double, ctypes.c_int64, ctypes.c_int64),
    ]
    library.sdtune_attend.restype = None
    return library


def compile_attention() -> None:
    """Make inductor call the kernel directly, without going through Python."""
    lowering = importlib.import_module("torch._inductor.lowering")
    operator = torch.ops.sdtune.attend.default
    if operator in lowering.lowerings:
        return
    ir = importlib.import_module("torch._inductor.ir")
    name = "aoti_torch_cpu_sdtune_attend"
    kernel = call_class(name, ["AtenTensorHandle"] * 4 + ["double", "int64_t"])

    def lowered(query: Any, key: Any, value: Any, positions: Any, scale: float, window: int) -> Any:
        inputs = [kernel.require_contiguous(kernel.realize_input(each)) for each in (query, key, value, positions)]
        batch, heads, width, size = query.get_size()
        layout = ir.FixedLayout(query.get_device(), query.get_dtype(), [batch, width, heads, size])
        call = kernel(layout, inputs, (scale, window), op_overload=operator, cpp_kernel_name=name)
        return ir.TensorBox.create(call)

    lowering.register_lowering(operator, type_promotion_kind=None)(lowered)
