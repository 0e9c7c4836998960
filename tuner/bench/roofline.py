"""How fast decoding could be at most with one token a pass and text: what a pass must read over how fast the device reads.

A decoder that gets several tokens out of a pass may be above it, and so may one whose model stays in the processor's caches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean, median
from typing import Any

import torch
from pydantic import Field
from torch import nn

from decoding.documents.strict_yaml import Document
from decoding.target import Target
from decoding.timing.stopwatch import Clock, Stopwatch

BUFFER_BYTES = {"cpu": 2**29, "cuda": 2**31}
"""Much more than the caches, and on an accelerator enough that starting a read is nothing beside it."""
NUM_READS = 15


class Bandwidth(Document):
    """What was measured of the device's memory: seconds of each read of a buffer."""

    buffer_bytes: int
    seconds: tuple[float, ...] = Field(min_length=1)

    @property
    def bytes_per_second(self) -> float:
        """Of the median read."""
        return self.buffer_bytes / median(self.seconds)

    def and_also(self, other: Bandwidth) -> Bandwidth:
        """This and the reads of another time, of a buffer as large."""
        assert self.buffer_bytes == other.buffer_bytes, "seconds of reads of different sizes are not comparable"
        return Bandwidth(buffer_bytes=self.buffer_bytes, seconds=(*self.seconds, *other.seconds))


class Reading(Document):
    """Bytes that a pass of one token a text must read."""

    weights: int
    keys_and_values: float = Field(description="of a text with the mean context, over all layers")
    mean_context: float = Field(description="positions, the one being computed among them")
    experts: tuple[int, int] | None = Field(
        None, description="of a mixture: how many a token is computed by, and of how many; only those are counted"
    )

    batch_size: int = Field(1, description="texts of a pass: weights are read once for all of them")

    @property
    def total(self) -> float:
        """All of it, for all texts."""
        return self.weights + self.batch_size * self.keys_and_values


class Roofline(Document):
    """The bound and what it is made of."""

    bandwidth: Bandwidth
    reading: Reading

    @property
    def tokens_per_second(self) -> float:
        """Most tokens a second, of all texts, of decoding that gets one token a text out of a pass."""
        return self.reading.batch_size * self.bandwidth.bytes_per_second / self.reading.total


def measure_bandwidth(
    device: torch.device,
    *,
    buffer_bytes: int | None = None,
    num_reads: int = NUM_READS,
    clock: Clock = time.perf_counter,
) -> Bandwidth:
    """Time reads of a float32 buffer on `device`: its sum, by as many threads as torch uses, so that each byte is read once.

    Of sum, maximum, matrix times vector and copy, the sum read fastest where this was written. The first read is not counted.
    `clock` gives seconds. On an accelerator the buffer takes at most half of the memory that is free.
    """
    size = buffer_bytes or BUFFER_BYTES.get(device.type, BUFFER_BYTES["cpu"])
    if buffer_bytes is None and device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 2)
    buffer = torch.ones(max(size // 4, 1), device=device)
    watch, seconds = Stopwatch(device, clock), list[float]()
    for _ in range(num_reads + 1):
        seconds.append(watch.time(buffer.sum))
    return Bandwidth(buffer_bytes=buffer.numel() * buffer.element_size(), seconds=tuple(seconds[1:]))


def reading(target: Target, contexts: Sequence[float], *, batch_size: int = 1) -> Reading:
    """What a pass of one token for each of `batch_size` texts reads of the model and of its cache.

    Of the cache, on average over `contexts` (positions, each at least 1).

    Weights are those of the modules that such a pass runs, found by running one. Of an embedding it reads one row, which is not
    counted; the same table counts where it is the output layer too. Of a stack of experts (weights of three dimensions) it
    reads those that the configuration routes a token to; those of several texts may be the same, so that no more are counted.
    Keys and values are counted in the type of the cache, as far back as a layer's window reaches.
    """
    weights, experts, per_position = _one_pass(target)
    windows = [_window(target.config, index) for index in range(len(per_position))]
    of_contexts = [
        sum(size * min(context, window or context) for size, window in zip(per_position, windows, strict=True))
        for context in contexts
    ]
    return Reading(
        weights=weights,
        keys_and_values=fmean(of_contexts),
        mean_context=fmean(contexts),
        experts=experts,
        batch_size=batch_size,
    )


@torch.inference_mode()
def _one_pass(target: Target) -> tuple[int, tuple[int, int] | None, list[int]]:
    """Bytes of weights that a pass reads, what of the experts is in them, and bytes of a position in the cache of each layer."""
    ran: dict[int, nn.Module] = {}
    cache = target.new_cache(1)
    with ExitStack() as hooks:
        for module in target.model.modules():
            handle = module.register_forward_hook(lambda each, *_: ran.__setitem__(id(each), each))
            hooks.callback(handle.remove)
        target.forward(torch.zeros((1, 1), dtype=torch.long, device=target.device), cache, 0)
    read = {
        id(weight): weight
        for module in ran.values()
        for weight in module.parameters(recurse=False)
        if not isinstance(module, nn.Embedding)
    }
    routed, experts, total = getattr(target.config, "num_experts_per_tok", None), None, 0
    for weight in read.values():
        size = weight.numel() * weight.element_size()
        if routed and weight.ndim == 3:
            experts = (routed, weight.shape[0])
            size = size * routed // weight.shape[0]
        total += size
    states: list[Any] = [(layer.keys, layer.values) for layer in cache.layers]
    per_position = [sum(each[0, :, 0].numel() * each.element_size() for each in pair) for pair in states]
    return total, experts, per_position


def _window(config: Any, index: int) -> int | None:
    """How many positions a layer attends to at most, or None for all."""
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[index] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None
