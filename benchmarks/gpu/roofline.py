"""The bound of decoding with one token per pass: the bytes that a pass must read over the memory bandwidth of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn

from decoding.target import Target
from decoding.timing.passes import Stopwatch

BUFFER_BYTES = {"cpu": 2**29, "cuda": 2**32}
"""Size of the buffer that is read: much larger than the caches, and large enough to hide the start of a read."""
NUM_READS = 15


def time_reads(device: torch.device) -> tuple[int, list[float]]:
    """Return the bytes of a buffer and the seconds of each read of it, in torch's number of threads.

    A read is the sum of the buffer: it was the fastest of sum, maximum, matrix times vector and copy. The first read is not
    counted. On CUDA the buffer takes at most half of the free memory, and events on the device tell, as a launch and a wait of
    the host would count otherwise.
    """
    size, time_read = BUFFER_BYTES[device.type], Stopwatch(device).time
    if device.type == "cuda":
        size, time_read = min(size, torch.cuda.mem_get_info(device)[0] // 2), partial(seconds_by_events, device)
    buffer = torch.ones(size // 4, device=device)
    return buffer.numel() * 4, [time_read(buffer.sum) for _ in range(NUM_READS + 1)][1:]


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


@torch.inference_mode()
def bytes_per_token(target: Target, contexts: Sequence[float]) -> float:
    """Return the bytes that a pass of one token reads of the weights, and of the cache at the mean of `contexts`.

    One pass finds the modules whose weights count. An embedding counts only where it is the output layer too: a pass reads a
    single row of it.
    """
    ran: dict[int, nn.Module] = {}
    cache: Any = target.new_cache(1)
    with ExitStack() as hooks:
        for module in target.model.modules():
            note = module.register_forward_hook(lambda each, *_: ran.__setitem__(id(each), each))
            hooks.callback(note.remove)
        target.forward(torch.zeros((1, 1), dtype=torch.long, device=target.device), cache, 0)
    counted = [module for module in ran.values() if not isinstance(module, nn.Embedding)]
    weights = {id(each): each for module in counted for each in module.parameters(recurse=False)}
    states = [each[0, :, 0] for layer in cache.layers for each in (layer.keys, layer.values)]
    per_position = sum(each.numel() * each.element_size() for each in states)
    return sum(each.numel() * each.element_size() for each in weights.values()) + per_position * fmean(contexts)
