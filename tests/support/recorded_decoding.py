"""Decoding in every way that needs recordings of its own, on any device and with any recorder."""

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
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PlainDecoding, PromptLookup, SuffixDraft
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.features import NO_FEATURES, SpeedFeatures
from decoding.runners.graphs import PassRecorder
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from tests.support.families import SUPPORTED, VOCABULARY, build
from tests.support.heads import write_heads

FAMILIES = [family for family in SUPPORTED if family != "bloom"]
"""All that the static runner does not refuse."""

EXIT_LAYER = 3
HEAD, QUANTISED_HEAD = "exit with a head", "int8 exit with a head"
DRAFTS: dict[str, Draft] = {
    "plain": PlainDecoding(),
    "blocks": LayerSkip.blocks((2, 3)),
    "half blocks": LayerSkip(skip_attention=(0, 2, 3), skip_mlp=(1, 3)),
    "exit": EarlyExit(exit_layer=EXIT_LAYER),
    "lookup": PromptLookup(),
    "suffix automaton": SuffixDraft(),
    "lookup, then blocks": LayerSkip(skip_attention=(2, 3), skip_mlp=(2, 3), lookup=Lookup(max_tokens=4)),
    "lookup, then exit": EarlyExit(exit_layer=EXIT_LAYER, lookup=Lookup(min_ngram=2)),
    HEAD: EarlyExit(exit_layer=EXIT_LAYER),
    "int8": LayerSkip(bits=8),
    QUANTISED_HEAD: EarlyExit(exit_layer=EXIT_LAYER, bits=8),
}
SIZES = ((5, 10), (9, 6), (3, 14))
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
    *,
    features: SpeedFeatures = NO_FEATURES,
    **settings: Any,
) -> Target:
    """Load a family with the static runner as on a GPU, but uncompiled, and with this recorder or the device's own."""
    runner = functools.partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=recorder, features=features)
    return Target(build(family, **settings).to(device), runner)


@functools.cache
def heads_of(target: Target, folder: Path) -> tuple[EarlyExit, HeadFolder]:
    """Write the head of an exit, and return the draft that uses it."""
    return write_heads(target, folder, [EXIT_LAYER])[EXIT_LAYER], HeadFolder(target, folder)


def decoder_of(
    target: Target, draft: str, rule: DraftLengthRule, folder: Path, *, prefix_reuse: bool = True
) -> Decoder:
    """Return a decoder with one of the drafts above; `folder` is where it writes a head if it needs one."""
    decoding = Decoding(prefix_reuse=prefix_reuse)
    if draft not in (HEAD, QUANTISED_HEAD):
        return Decoder(target, DRAFTS[draft], rule, decoding)
    document, heads = heads_of(target, folder)
    bits = DRAFTS[draft].parts.bits
    return Decoder(target, document.model_copy(update={"bits": bits}), rule, decoding, heads=heads)


def alone_and_together(decoder: Decoder, **settings: Any) -> list[tuple[int, ...]]:
    """Decode the last request by itself, then all of them in lockstep."""
    alone = decoder.generate(requests(**settings)[-1]).tokens
    return [alone, *(each.tokens for each in decoder.generate_batch(requests(**settings)).generations)]
