"""Plain decoding against the memory roofline and against `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from decoding.decoder import plain_decoder
from tuner.bench.contenders import PLAIN
from tuner.contest.contest import Contender
from tuner.contest.stock_generation import StockGeneration
from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.roofline import Roofline, measure_bandwidth, reading
from tuner.evaluation.gpu.shared import NEW_TOKENS, Shared
from tuner.evaluation.gpu.side_by_side import SideBySide, own, plain_static, prompts_of, ratio_text

NUM_PROMPTS = 4


@dataclass(frozen=True)
class PlainRates:
    """Step: plain decoding by the static and the eager runner, `generate`, and the roofline."""

    name: str = "rates"
    question: str = "How close is plain decoding to the roofline, and how far from `generate`?"
    limit_seconds: float = 20
    pessimistic_seconds: float = 18

    def run(self, shared: Shared, seconds: float) -> Result:
        """Measure the bandwidth and the contenders in turns."""
        bandwidth = measure_bandwidth(shared.device)
        contenders: dict[str, Contender] = {
            PLAIN: plain_static(shared),
            "plain-eager": own(shared, plain_decoder(shared.eager), "plain, eager runner"),
            "hf": StockGeneration(shared.wide, shared.eos_token_ids, "transformers' generate, dynamic cache"),
        }
        prompts = prompts_of(shared, NUM_PROMPTS)
        measured = SideBySide(shared.static, contenders, prompts, max_new_tokens=NEW_TOKENS)
        bandwidth = bandwidth.and_also(measure_bandwidth(shared.device, buffer_bytes=bandwidth.buffer_bytes))
        roofline = Roofline(bandwidth=bandwidth, reading=reading(shared.eager, measured.contexts()))
        figures = measured.figures()
        return {
            "bytes_per_second": bandwidth.bytes_per_second,
            "bytes_per_token": roofline.reading.total,
            "roofline_tokens_per_second": roofline.tokens_per_second,
            "bandwidth": bandwidth.model_dump(mode="json"),
            "contenders": figures,
            "share_of_roofline": {name: measured.rate(name).value / roofline.tokens_per_second for name in figures},
            "plain_over_hf": measured.ratio(PLAIN, "hf") if "hf" in figures else None,
            "left_out": measured.left_out,
        }

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield the roofline, and each contender's rate and share."""
        yield (
            f"roofline {result['roofline_tokens_per_second']:.1f} tok/s: {result['bytes_per_token'] / 1e9:.2f} GB per token at "
            f"{result['bytes_per_second'] / 1e12:.2f} TB/s"
        )
        for name, each in result["contenders"].items():
            yield (
                f"{name}: {each['tokens_per_second']['value']:.1f} tok/s, {result['share_of_roofline'][name]:.0%} of the roofline, "
                f"identical {each['identical']}/{each['texts']} + {each['ties']} ties"
            )
        if result["plain_over_hf"]:
            yield f"plain over generate: {ratio_text(result['plain_over_hf'])}"
        for name, reason in result["left_out"].items():
            yield f"{name} left out: {reason}"
