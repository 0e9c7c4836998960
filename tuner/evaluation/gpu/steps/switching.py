"""Seconds from a new draft to the first token that can be timed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import Draft, LayerSkip
from decoding.text import Ending
from decoding.timing.stopwatch import Stopwatch
from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.shared import NEW_TOKENS, Shared, without_head
from tuner.evaluation.gpu.side_by_side import prompts_of

NUM_SKIPS, NUM_PROMPTS = 4, 4
DRAFTED = 6


@dataclass(frozen=True)
class CandidateSwitch:
    """Step: new candidates one after another, each made ready and decoded twice."""

    name: str = "switch"
    question: str = "How long does a search wait for a new candidate, and for how many recordings?"
    limit_seconds: float = 15
    pessimistic_seconds: float = 13

    def run(self, shared: Shared, seconds: float) -> Result:
        """Time an exit with its head, an exit without one, and random skip sets."""
        bare = without_head(shared.exit_draft).model_copy(update={"exit_layer": shared.exit_draft.exit_layer + 1})
        drafts: list[Draft] = [shared.exit_draft, bare, *_random_skips(shared.static.num_layers)]
        candidates = [_measure(shared, draft) for draft in drafts]
        return {"candidates": candidates, "switch_seconds": median(each["switch_seconds"] for each in candidates)}

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield the median and each candidate."""
        yield f"{result['switch_seconds']:.2f} s to switch (median of {len(result['candidates'])})"
        for each in result["candidates"]:
            yield (
                f"{each['draft'][:60]}: {each['switch_seconds']:.2f} s, {each['recordings']} recordings in "
                f"{each['recording_seconds']:.2f} s"
            )


def _measure(shared: Shared, draft: Draft) -> dict[str, Any]:
    """Make a candidate ready as a search does, and decode the same prompt twice: both should take equally long."""
    known = len(shared.recorder.seconds) if shared.recorder else 0
    prompts = prompts_of(shared, NUM_PROMPTS)
    lengths = [len(prompt) for prompt in prompts]
    request = Request(prompts[0], Ending(NEW_TOKENS, shared.eos_token_ids))
    watch = Stopwatch(shared.device)
    start = watch.now()
    decoder = Decoder(shared.static, draft, Fixed(max_tokens=DRAFTED), heads=shared.heads)
    decoder.prepare(min(lengths), max(lengths) + NEW_TOKENS)
    ready = watch.now() - start
    first, second = (watch.time(lambda: decoder.generate(request)) for _ in range(2))
    recordings = shared.recorder.seconds[known:] if shared.recorder else []
    return {
        "draft": draft.describe(),
        "ready_seconds": ready,
        "first_seconds": first,
        "second_seconds": second,
        "switch_seconds": ready + max(first - second, 0.0),
        "recordings": len(recordings),
        "recording_seconds": sum(recordings),
        "each_recording_seconds": recordings,
    }


def _random_skips(num_layers: int) -> Iterator[LayerSkip]:
    stream = random.Random(0)
    for _ in range(NUM_SKIPS):
        attention, mlp = (tuple(sorted(stream.sample(range(num_layers), num_layers // 3))) for _ in range(2))
        yield LayerSkip(skip_attention=attention, skip_mlp=mlp)
