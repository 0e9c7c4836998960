"""Compilation of the blocks that later steps run, cold or from torch's cache on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.target import Target
from decoding.text import Ending
from decoding.timing.stopwatch import Stopwatch
from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.shared import Shared

SKIP = LayerSkip(skip_attention=(1,), skip_mlp=(2,))
"""A draft with both kinds of partial blocks."""


@dataclass(frozen=True)
class Compilation:
    """Step: each kind of block on one position, on several, and for several sequences, so that no later step waits for it."""

    name: str = "compile"
    question: str = "How long does the compiler take, which no later step is to be charged for?"
    limit_seconds: float = 100
    pessimistic_seconds: float = 96

    def run(self, shared: Shared, seconds: float) -> Result:
        """Decode a few tokens with the tiny model in float32, then with the widened one, which is made here."""
        watch = Stopwatch(shared.device)
        tiny = watch.time(lambda: _decode(Target(shared.tiny(), "static")))
        wide = watch.time(lambda: _decode(shared.static))
        return {"tiny_seconds": tiny, "wide_seconds": wide, "made": dict(shared.seconds)}

    def lines(self, result: Mapping[str, float]) -> Iterator[str]:
        """Yield the seconds of both models."""
        yield f"tiny model {result['tiny_seconds']:.0f} s, widened model {result['wide_seconds']:.0f} s, making them included"


def _decode(target: Target) -> None:
    request = Request(range(5, 25), Ending(8))
    for decoder in (plain_decoder(target), Decoder(target, SKIP, Fixed(max_tokens=2))):
        decoder.generate(request)
        decoder.generate_batch([request] * 2)
