"""What a distillation is asked to do, and the exits that it trains heads for if none are named."""

from __future__ import annotations

from pydantic import Field

from decoding.documents import Document, Duration
from decoding.profile import Layers

MOST_EXITS = 12


class DistillSettings(Document):
    """How heads are distilled: the `distill:` mapping of a configuration, and flags of `sdtune distill`."""

    exit_layers: Layers | None = Field(
        None, min_length=1, description="exits to train heads for, in one pass; default: spread over the first half"
    )
    lessons: str | None = Field(
        None,
        description="dataset of prompts to learn from; default: rows of the search's that are in neither of its parts",
    )
    lessons_column: str | None = Field(None, description="column of the prompts in the dataset of `lessons`")
    prompts: int = Field(1024, ge=1, description="prompts to write texts from at most")
    samples: int = Field(8, ge=1, description="texts written from each prompt; one if the temperature is 0")
    temperature: float = Field(1.0, ge=0.0, description="at which the texts are written; 0 is greedy")
    response_tokens: int = Field(64, ge=1, description="most tokens of a text behind its prompt")
    steps: int = Field(600, ge=1, description="training steps")
    timeout: Duration | None = Field(
        None, description="training time (90s, 10m, 1h), resumed runs included; the schedule is compressed to fit"
    )
    batch_size: int = Field(4, ge=1, description="texts a training step")
    writing_batch_size: int = Field(32, ge=1, description="texts written at a time")
    learning_rate: float | None = Field(
        None, gt=0.0, description="at its height, behind the warm-up; default: 1 over the hidden size"
    )
    checkpoint_every: int = Field(100, ge=1, description="steps")

    @property
    def samples_per_prompt(self) -> int:
        """Greedy texts of one prompt are all the same: one is enough."""
        return self.samples if self.temperature > 0 else 1


def default_exit_layers(num_layers: int) -> tuple[int, ...]:
    """Exits worth a head in a model of `num_layers`: behind 1 to half of them, `MOST_EXITS` evenly spread if there are more."""
    deepest = num_layers // 2
    if deepest <= MOST_EXITS:
        return tuple(range(1, deepest + 1))
    return tuple(1 + round(place * (deepest - 1) / (MOST_EXITS - 1)) for place in range(MOST_EXITS))
