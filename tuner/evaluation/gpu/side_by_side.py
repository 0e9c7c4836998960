"""Contenders on the widened model in turns: rates, ratios and equal outputs as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from decoding.decoder import Decoder, plain_decoder
from decoding.profile import Interval
from decoding.target import Target
from studies.ratios import Work, speed_ratio
from tuner.bench.collecting import SampleCollector
from tuner.bench.contenders import PLAIN
from tuner.bench.result import Entry, Phase, comparable
from tuner.bench.sample import TextSample
from tuner.contest.contest import Contender, Contest
from tuner.contest.own_decoding import OwnDecoding
from tuner.evaluation.gpu.roofline import mean_context
from tuner.evaluation.gpu.shared import Shared
from tuner.measuring.clock import WallClock


def own(shared: Shared, decoder: Decoder, description: str) -> OwnDecoding:
    """Return one of our decoders as a contender."""
    return OwnDecoding(decoder, shared.eos_token_ids, description, {})


def plain_static(shared: Shared) -> OwnDecoding:
    """Return plain decoding by the static runner without speed features: the reference of all ratios."""
    return own(shared, plain_decoder(shared.static), "plain, static runner")


def prompts_of(shared: Shared, count: int) -> list[tuple[int, ...]]:
    """Return token ids of tuning prompts, and of held-out ones if these are too few."""
    found = shared.prompts
    return [prompt.token_ids for prompt in (*found.tuning, *found.held_out)[:count]]


class SideBySide:
    """The samples of several contenders on the same prompts, in batches; one contender must be `plain`."""

    def __init__(
        self,
        target: Target,
        contenders: Mapping[str, Contender],
        prompts: Sequence[tuple[int, ...]],
        *,
        max_new_tokens: int,
        repeats: int = 1,
        batch_size: int = 1,
    ) -> None:
        contest = Contest(contenders, WallClock(target.device), needed=(PLAIN,))
        batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
        # A whole lap that nobody times, the longest prompt first: greedy decoding repeats itself, so every pass that the
        # timed laps will run has then been recorded, in memory that does not grow any more.
        longest = max(prompts, key=len)
        lap = [[longest] * batch_size, *batches]
        contest.hold(lap, max_new_tokens=max_new_tokens, on_batch=lambda index, repeat, results: None)
        collector = SampleCollector(target, prompts, contest.running, batch_size=batch_size)
        collector.hold(contest, batches, max_new_tokens=max_new_tokens, repeats=repeats)
        entries = [
            Entry(name, each.describe(), dict(each.settings), tuple(collector.samples[name]))
            for name, each in contest.running.items()
        ]
        self.entries, uncounted, self._counted = comparable(entries)
        self.left_out = {**contest.left_out, **uncounted}
        """Contenders that failed, with the reasons."""

    def contexts(self) -> list[float]:
        """Return the mean positions that a plain pass attends to, for each prompt."""
        return mean_context(self.entries[PLAIN].samples, self._counted)

    def rate(self, name: str) -> Interval:
        """Return decoded tokens per second, with the 95 % interval over prompts."""
        return self._work(name).rate()

    def ratio(self, name: str, reference: str, phase: Phase = Phase.DECODE) -> dict[str, Any]:
        """Return the speed of `name` over that of `reference`, with its interval, as plain data."""
        return speed_ratio(self._work(reference, phase), self._work(name, phase)).model_dump(mode="json")

    def figures(self) -> dict[str, Any]:
        """Return the figures of each contender as plain data."""
        return {
            name: {
                "tokens_per_second": self.rate(name).model_dump(mode="json"),
                "over_plain": self.ratio(name, PLAIN),
                "end_to_end_over_plain": self.ratio(name, PLAIN, Phase.END_TO_END),
                "tokens_per_pass": entry.tokens_per_pass,
                "prefill_seconds": entry.prefill_seconds,
                "identical": entry.num_identical,
                "ties": entry.num_ties,
                "texts": len(entry.samples),
            }
            for name, entry in self.entries.items()
        }

    def _work(self, name: str, phase: Phase = Phase.DECODE) -> Work:
        return self.entries[name].work(self._counted, phase)


def partial_result(samples: Mapping[str, Sequence[TextSample]], left_out: Mapping[str, str]) -> dict[str, Any]:
    """Return what an interrupted comparison has: rates over the batches that all contenders had continued, without intervals."""
    contenders = {}
    for name, found in samples.items():
        if found:
            entry = Entry(name, "", {}, tuple(found))
            work = entry.work(sorted({sample.batch for sample in found}), Phase.DECODE)
            contenders[name] = {
                "tokens_per_second": work.tokens_per_second if work.seconds.sum() else None,
                "tokens_per_pass": entry.tokens_per_pass,
                "identical": entry.num_identical,
                "ties": entry.num_ties,
                "texts": len(found),
            }
    return {"interrupted": contenders, "left_out": dict(left_out)}


def partial_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per contender of an interrupted comparison."""
    for name, each in result["interrupted"].items():
        rate = "-" if each["tokens_per_second"] is None else f"{each['tokens_per_second']:.1f}"
        yield f"{name}: {rate} tok/s, identical {each['identical']}/{each['texts']} + {each['ties']} ties, interrupted"


def ratio_text(interval: Mapping[str, Any]) -> str:
    """Return a ratio with its interval."""
    low, high = interval["ci95"]
    return f"{interval['value']:.3f} [{low:.3f}, {high:.3f}]"
