"""The grid of losslessness: every kind of draft, alone and in lockstep, with any runner, device and recorder."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from decoding.acceptance import Acceptance, Greedy, Sampling
from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import DraftLengthRule
from decoding.drafts import (
    Draft,
    EarlyExit,
    LayerSkip,
    Lookup,
    PlainDecoding,
    PromptLookup,
    SuffixDraft,
    SuffixLookup,
)
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.graphs import PassRecorder
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from tests.support.families import NUM_LAYERS, SUPPORTED, VOCABULARY, build
from tests.support.heads import write_heads

FAMILIES = [family for family in SUPPORTED if family != "bloom"]
"""All that the static runner does not refuse."""

EXIT_LAYER = 3
HEAD = "exit with a head"
DRAFTS: dict[str, Draft] = {
    "plain": PlainDecoding(),
    "blocks": LayerSkip.blocks((2, 3)),
    "half blocks": LayerSkip(skip_attention=(0, 2, 3), skip_mlp=(1, 3)),
    "every attention": LayerSkip(skip_attention=tuple(range(NUM_LAYERS))),
    "first mlp": LayerSkip(skip_mlp=(0, 4)),
    "last block": LayerSkip.blocks((NUM_LAYERS - 1,)),
    "everything": LayerSkip.blocks(range(NUM_LAYERS)),
    "nothing": LayerSkip(),
    "exit": EarlyExit(exit_layer=EXIT_LAYER),
    "lookup": PromptLookup(),
    "suffix automaton": SuffixDraft(),
    "lookup, then blocks": LayerSkip(skip_attention=(2, 3), skip_mlp=(2, 3), lookup=Lookup(max_tokens=4)),
    "suffix automaton, then exit": EarlyExit(exit_layer=EXIT_LAYER, lookup=SuffixLookup(max_tokens=4)),
    "int8": LayerSkip(bits=8),
    "int4, half blocks": LayerSkip(skip_attention=(0, 2, 3), skip_mlp=(1, 3), bits=4),
    "lookup, then mlp": LayerSkip(skip_mlp=(1, 3), lookup=Lookup(max_tokens=2)),
    HEAD: EarlyExit(exit_layer=EXIT_LAYER),
    "lookup, then exit with a head": EarlyExit(exit_layer=EXIT_LAYER, lookup=Lookup(min_ngram=2)),
    "int8 exit with a head": EarlyExit(exit_layer=EXIT_LAYER, bits=8),
}
SIZES = ((5, 10), (9, 6), (1, 14))
"""Lengths of the prompts and of their continuations: the sequences of a batch end one after another."""


def requests(sizes: Sequence[tuple[int, int]] = SIZES, *, sampled: bool = False, device: str = "cpu") -> list[Request]:
    """Return a request of each size; sampled ones have a random generator of their own on `device`."""
    stream = torch.Generator().manual_seed(5)

    def acceptance(row: int) -> Acceptance:
        return Sampling(torch.Generator(device).manual_seed(row)) if sampled else Greedy()

    return [
        Request(torch.randint(VOCABULARY, (length,), generator=stream).tolist(), Ending(new_tokens), acceptance(row))
        for row, (length, new_tokens) in enumerate(sizes)
    ]


def recorded_target(
    family: str,
    recorder: PassRecorder | None,
    device: str = "cpu",
    **settings: Any,
) -> Target:
    """Load a family with the static runner as on a GPU, but uncompiled, and with this recorder or the device's own."""
    runner = functools.partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=recorder)
    return Target(build(family, **settings).to(device), runner)


@functools.cache
def head_of(target: Target, folder: Path) -> tuple[EarlyExit, HeadFolder]:
    """Write an exit head, and return the draft that uses it."""
    return write_heads(target, folder, [EXIT_LAYER])[EXIT_LAYER], HeadFolder(target, folder)


def decoder_of(
    target: Target, draft: str, rule: DraftLengthRule, folder: Path, *, prefix_reuse: bool = True
) -> Decoder:
    """Return a decoder with one of the drafts above; `folder` is where it writes a head if it needs one."""
    decoding, document = Decoding(prefix_reuse=prefix_reuse), DRAFTS[draft]
    if "head" not in draft:
        return Decoder(target, document, rule, decoding)
    trained, heads = head_of(target, folder)
    parts = {part: getattr(document.parts, part) for part in document.takes}
    return Decoder(target, trained.having(**parts), rule, decoding, heads=heads)


def alone_and_together(decoder: Decoder, **settings: Any) -> list[tuple[int, ...]]:
    """Decode the last request by itself, then all of them in lockstep."""
    alone = decoder.generate(requests(**settings)[-1]).tokens
    return [alone, *(each.tokens for each in decoder.generate_batch(requests(**settings)).generations)]
