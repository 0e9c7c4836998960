"""Roofline of decoding with one token per pass: the bytes that a pass must read over the memory bandwidth of the device.

Decoding may exceed the bound if a pass gives several tokens, or if the model fits the processor's caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from pydantic import Field
from torch import nn

from decoding.documents.strict_yaml import Document
from decoding.target import Target
from decoding.timing.stopwatch import ReadSeconds, Stopwatch
from tuner.bench.sample import TextSample

BUFFER_BYTES = {"cpu": 2**29, "cuda": 2**32}
"""Size of the buffer that is read: much larger than the caches, and large enough to hide the start of a read.

4 GiB take more than a millisecond on any GPU of today, against a few microseconds between two events.
"""
NUM_READS = 15


class Bandwidth(Document):
    """Measured memory bandwidth of the device: the seconds of each read of a buffer."""

    buffer_bytes: int
    seconds: tuple[float, ...] = Field(min_length=1)

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of the median read."""
        return self.buffer_bytes / median(self.seconds)

    def and_also(self, other: Bandwidth) -> Bandwidth:
        """Return these reads together with the reads of another time; both buffers must have the same size."""
        assert self.buffer_bytes == other.buffer_bytes, "seconds of reads of different sizes are not comparable"
        return Bandwidth(buffer_bytes=self.buffer_bytes, seconds=(*self.seconds, *other.seconds))


class Reading(Document):
    """Bytes that a pass of one token per sequence must read."""

    weights: int
    keys_and_values: float = Field(description="keys and values of one sequence at the mean context, over all layers")
    mean_context: float = Field(description="mean number of positions attended to, including the one being computed")
    experts: tuple[int, int] | None = Field(
        None, description="mixture of experts: number of experts per token and in total; only the former are counted"
    )

    batch_size: int = Field(1, description="sequences per pass: weights are read once for all of them")

    @property
    def total(self) -> float:
        """Bytes of weights, keys and values for all sequences."""
        return self.weights + self.batch_size * self.keys_and_values


class Roofline(Document):
    """Upper bound of the decoding rate and the measurements behind it."""

    bandwidth: Bandwidth
    reading: Reading

    @property
    def tokens_per_second(self) -> float:
        """Upper bound in tokens per second over all sequences, at one token per sequence and pass."""
        return self.reading.batch_size * self.bandwidth.bytes_per_second / self.reading.total


def measure_bandwidth(
    device: torch.device,
    *,
    buffer_bytes: int | None = None,
    num_reads: int = NUM_READS,
    clock: ReadSeconds = time.perf_counter,
) -> Bandwidth:
    """Time reads of a float32 buffer on `device`, in torch's number of threads.

    A read is the sum of the buffer: it was the fastest of sum, maximum, matrix times vector and copy. The first read is not
    counted. `clock` gives seconds on a CPU; on CUDA events on the device do, as a launch and a wait of the host would count
    otherwise. There the buffer takes at most half of the free memory.
    """
    size = buffer_bytes or BUFFER_BYTES.get(device.type, BUFFER_BYTES["cpu"])
    if buffer_bytes is None and device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 2)
    buffer = torch.ones(max(size // 4, 1), device=device)
    time_read = partial(seconds_by_events, device) if device.type == "cuda" else Stopwatch(device, clock).time
    seconds = [time_read(buffer.sum) for _ in range(num_reads + 1)]
    return Bandwidth(buffer_bytes=buffer.numel() * buffer.element_size(), seconds=tuple(seconds[1:]))


def seconds_by_events(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds that queued `work` takes on a CUDA device, without the host's launch and wait."""
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        work()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3


def reading(target: Target, contexts: Sequence[float], *, batch_size: int = 1) -> Reading:
    """Return the bytes that a pass of one token for each of `batch_size` sequences reads of the weights and the cache.

    Reads of the cache are the mean over `contexts` (positions, each at least 1).

    One pass is run to find the modules whose weights count. An embedding counts only where it is the output layer too: a pass
    reads a single row of it. Of a stack of experts (three-dimensional weights) only the experts of one token count, because the
    sequences of a batch may share them. Keys and values count in the data type of the cache, back to the layer's window.
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
    """Return the bytes of weights that a pass reads, its experts (used, total), and the cache bytes per position and layer."""
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


def mean_context(samples: Sequence[TextSample], counted: Sequence[int]) -> list[float]:
    """Return the mean number of positions that a plain pass attends to, for each prompt of the `counted` batches."""
    of_prompts = {sample.prompt: sample for sample in samples if sample.batch in counted}
    return [sample.prompt_tokens + (sample.decode_tokens + 1) / 2 for sample in of_prompts.values()]


def _window(config: Any, index: int) -> int | None:
    """Return the most positions that a layer attends to, or None for all."""
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[index] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None
