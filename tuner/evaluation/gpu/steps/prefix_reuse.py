"""Prefix reuse on and off: verification from the first block that the draft changes, or from the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.profile import Decoding
from tuner.bench.contenders import PLAIN
from tuner.contest.contest import Contender
from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.shared import NEW_TOKENS, Shared
from tuner.evaluation.gpu.side_by_side import SideBySide, own, plain_static, prompts_of, ratio_text

NUM_PROMPTS = 4
DRAFTED = 4


@dataclass(frozen=True)
class PrefixReuse:
    """Step: one draft with and without prefix reuse, on the same prompts in turns."""

    name: str = "prefix-reuse"
    question: str = "Does prefix reuse pay for a single sequence, although a pass reads all weights either way?"
    limit_seconds: float = 10
    pessimistic_seconds: float = 9

    def run(self, shared: Shared, seconds: float) -> Result:
        """Measure an exit with its head, verified in both ways."""
        contenders: dict[str, Contender] = {PLAIN: plain_static(shared)}
        for name, reuses in (("on", True), ("off", False)):
            decoding = Decoding(runner="static", prefix_reuse=reuses)
            decoder = Decoder(shared.static, shared.exit_draft, Fixed(max_tokens=DRAFTED), decoding, heads=shared.heads)
            contenders[name] = own(shared, decoder, f"drafted, prefix reuse {name}")
        prompts = prompts_of(shared, NUM_PROMPTS)
        measured = SideBySide(shared.static, contenders, prompts, max_new_tokens=NEW_TOKENS, repeats=2)
        return {"gain": measured.ratio("on", "off"), "contenders": measured.figures(), "left_out": measured.left_out}

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield the gain."""
        yield f"{ratio_text(result['gain'])} on over off"
