"""Seconds until a new candidate is ready with the static runner: its first sequence against its second."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from transformers import PreTrainedModel

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.target import Target
from decoding.text import Ending
from decoding.timing.stopwatch import Stopwatch
from tuner.tables import figures_table

if TYPE_CHECKING:
    from tuner.evaluation.passes.settings import PassesEvaluation

NUM_CANDIDATES = 6
DRAFTED = 4
"""Tokens of each draft."""
PROMPT_TOKENS, NEW_TOKENS = 64, 32


def measure(model: PreTrainedModel, settings: PassesEvaluation) -> dict[str, Any]:
    """Make random candidates ready and return the seconds of each."""
    measured = measure_readiness(Target(model, "static"), num_candidates=settings.candidates, seed=settings.seed)
    return {"candidates": measured}


def measure_readiness(target: Target, *, num_candidates: int = NUM_CANDIDATES, seed: int = 0) -> list[dict[str, Any]]:
    """Time the first and the second sequence of random skip sets, one after another.

    The first candidate compiles for all. The difference of the two is the cost of switching to the candidate.
    """
    stream = random.Random(seed)
    prompt = [stream.randrange(target.config.vocab_size) for _ in range(PROMPT_TOKENS)]
    measured = []
    for _ in range(num_candidates):
        attention, mlp = (sorted(stream.sample(range(target.num_layers), target.num_layers // 3)) for _ in range(2))
        skip = LayerSkip(skip_attention=tuple(attention), skip_mlp=tuple(mlp))
        first, second = _first_and_second(target, skip, prompt)
        measured.append(
            {
                "draft": skip.describe(),
                "first_seconds": first,
                "second_seconds": second,
                "switch_seconds": first - second,
            }
        )
    return measured


def _first_and_second(target: Target, skip: LayerSkip, prompt: list[int]) -> tuple[float, float]:
    watch = Stopwatch(target.device)
    start = watch.now()
    decoder = Decoder(target, skip, Fixed(max_tokens=DRAFTED))
    decoder.generate(Request(prompt, Ending(NEW_TOKENS)))
    middle = watch.now()
    decoder.generate(Request(prompt, Ending(NEW_TOKENS)))
    return middle - start, watch.now() - middle


def show(measured: Mapping[str, Any]) -> RenderableType:
    """Return the table of all candidates."""
    table = figures_table("Readiness of new candidates, static runner", "draft", "first s", "second s", "switch s")
    for each in measured["candidates"]:
        seconds = [f"{each[name]:.2f}" for name in ("first_seconds", "second_seconds", "switch_seconds")]
        table.add_row(each["draft"], *seconds)
    return table
