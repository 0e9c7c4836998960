"""Memory that a draft holds beside the model, and the seconds of making it, each draft by itself.

Memory is the size of all tensors that come into being with the draft's passes: packed weights, heads, rows of an LM head.
The keys and values of a head, one layer's for each position, are not among them: they are made with each sequence.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from decoding.decoder import Decoder
from decoding.head_folder import HeadFolder
from studies.contract import Candidate
from tuner.evaluation.kinds.document import Footprint
from tuner.search.task import Task


def footprints(task: Task, candidates: Sequence[Candidate]) -> Iterator[Footprint]:
    """Yield what each draft takes; its passes are made anew, and dropped before the next. No other draft may be in memory."""

    def new_decoder(candidate: Candidate) -> Decoder:
        heads = HeadFolder(task.target, task.head_folder.folder)  # a new one, which has read no head yet
        return Decoder(task.target, candidate.draft, candidate.draft_length, task.decoding, heads=heads)

    gc.collect()
    known = set(_tensor_bytes())
    for candidate in candidates:
        yield _footprint(partial(new_decoder, candidate), known)


def _footprint(make: Callable[[], object], known: set[int]) -> Footprint:
    """Return the time of `make`, and the bytes of the tensors that what it makes holds and that are not `known`."""
    gc.freeze()  # a collection and a list of objects then concern the new ones alone, not the millions of all imports
    try:
        start = time.perf_counter()
        made = make()
        seconds = time.perf_counter() - start
        gc.collect()
        held = sum(size for address, size in _tensor_bytes().items() if address not in known)
        del made
        gc.collect()
    finally:
        gc.unfreeze()
    return Footprint(memory_bytes=held, packing_seconds=seconds)


def _tensor_bytes() -> dict[int, int]:
    """Return the bytes of the memory behind all tensors that the garbage collector lists, by address."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        # Subclasses, such as the fake tensors of torch.compile, and functional tensors have no memory.
        if type(each) not in (torch.Tensor, nn.Parameter) or each.is_meta or torch._is_functional_tensor(each):
            continue
        if each.is_mkldnn:  # packed by oneDNN: no storage of its own to ask
            found[id(each)] = each.numel() * each.itemsize
        else:
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return found
