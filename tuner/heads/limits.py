"""Time and memory of a distillation: both estimated beforehand, and a limit on its seconds (our formulation)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuner.config import DistillSettings
from tuner.heads.texts import GeneratedText, num_response_tokens
from tuner.inputs.memory import USABLE, ModelSize
from tuner.measuring.baseline import Pulse

BACKWARD = 2.0
"""Cost of a backward pass over that of its forward pass."""
UPDATE_READS = 5.0
"""Reads of a head's weights in one step of the optimizer: weights, gradient, two moments, and the masters."""
WRITING_SHARE = 0.4
"""Most of the time that writing training texts may take; training does the rest."""
EVALUATION_MARGIN = 1.5
"""Seconds of evaluating exits with their heads, over those of evaluating them without."""
_MASTER, _ADAM, _GRADIENT = 4, 8, 4
"""Bytes per weight of a head in float32: its master, the two moments of the optimizer, and the master's gradient."""


class TimeLimit:
    """Seconds that a distillation may take, None if unlimited; those of stored texts count too."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._start = time.perf_counter()
        self._before = 0.0

    def allows_text(self, least_tokens: int) -> Callable[[Sequence[GeneratedText]], bool]:
        """Return the question asked before each batch of texts; `least_tokens` are written whatever the time."""

        def may_go_on(texts: Sequence[GeneratedText]) -> bool:
            if self.seconds is None or num_response_tokens(texts) < least_tokens:
                return True
            return sum(text.seconds for text in texts) < WRITING_SHARE * self.seconds

        return may_go_on

    def count_stored(self, texts: Sequence[GeneratedText], seconds_here: float) -> None:
        """Count the seconds of texts that an earlier run generated: all but the `seconds_here` spent on them in this run."""
        self._before += max(0.0, sum(text.seconds for text in texts) - seconds_here)

    @property
    def spent(self) -> float:
        return self._before + time.perf_counter() - self._start

    def for_group(self, num_heads: int, num_left: int, evaluation_seconds: float) -> float | None:
        """Return the seconds of training `num_heads` of the `num_left` heads that are left, or None if unlimited.

        `evaluation_seconds` were taken by evaluating all exits without heads. At least one step is always trained.
        """
        if self.seconds is None:
            return None
        left = self.seconds - self.spent - EVALUATION_MARGIN * evaluation_seconds
        return max(1e-3, left * num_heads / num_left)


@dataclass(frozen=True)
class DistillationTime:
    writing: float
    training: float
    evaluation: float

    @property
    def total(self) -> float:
        return self.writing + self.training + self.evaluation


def distillation_time(
    size: ModelSize,
    settings: DistillSettings,
    pulse: Pulse,
    *,
    num_heads: int,
    heads_at_once: int,
    num_prompts: int,
    prompt_tokens: float,
    num_evaluated: int,
) -> DistillationTime:
    """Return the estimate for `num_heads` heads, `heads_at_once` trained together.

    Texts follow `num_prompts` prompts of `prompt_tokens` tokens each, exits are evaluated on `num_evaluated` texts. A limit of the
    settings is not applied.
    """
    block_share = size.block_parameters / size.num_parameters
    output_share = size.vocabulary * size.hidden_size / size.num_parameters
    head_share = block_share + output_share
    batch, response = settings.writing_batch_size, settings.response_tokens
    num_texts = num_prompts * settings.samples_per_prompt
    num_batches = -(-num_texts // batch)
    decoding = response * max(pulse.token_seconds, batch * pulse.position_seconds)
    writing = num_texts * prompt_tokens * pulse.position_seconds + num_batches * decoding
    text = prompt_tokens + response
    num_groups = -(-num_heads // max(1, heads_at_once))
    of_target = num_groups * settings.batch_size * text
    of_head = settings.batch_size * (text * block_share + response * output_share)
    of_heads = num_heads * (1 + BACKWARD) * of_head
    updates = num_heads * UPDATE_READS * block_share * pulse.token_seconds
    training = settings.steps * ((of_target + of_heads) * pulse.position_seconds + updates)
    evaluated = num_evaluated * (1 + num_heads * head_share)
    evaluation = (1 + num_groups) * evaluated * text * pulse.position_seconds + num_evaluated / batch * decoding
    return DistillationTime(writing, training, evaluation)


def bytes_per_head(size: ModelSize, prompt_tokens: int, settings: DistillSettings) -> int:
    """Return the bytes that each head in training takes: its weights, its optimizer and the states at its exit."""
    item = size.dtype.itemsize
    master = 0 if item == _MASTER else _MASTER
    num_tokens = settings.batch_size * (prompt_tokens + settings.response_tokens)
    return size.block_parameters * (item + master + _ADAM) + num_tokens * size.hidden_size * item


def shared_bytes(size: ModelSize, prompt_tokens: int, settings: DistillSettings) -> int:
    """Return the bytes that a training step takes however many heads there are: one head is trained after another.

    Labels and logits of the responses, the gradients of one head, and what its backward pass keeps. Prompts of one
    length are assumed: a batch's logits begin where its shortest prompt ends.
    """
    item = size.dtype.itemsize
    num_tokens = settings.batch_size * (prompt_tokens + settings.response_tokens)
    num_responses = settings.batch_size * settings.response_tokens
    weights = size.block_parameters
    # Labels, and logits with their softmax and gradient, all but one in float32.
    vocabulary = num_responses * size.vocabulary * (4 + 3 * 4 + 2 * item)
    activations = 2 * num_tokens * weights // size.hidden_size * item
    return vocabulary + activations + weights * (item + 2 * _GRADIENT)


def heads_that_fit(size: ModelSize, prompt_tokens: int, settings: DistillSettings, free: int | None) -> int | None:
    """Return how many heads fit in `free` bytes beside the loaded model, at least 1; None if `free` is unknown."""
    if free is None:
        return None
    left = int(free * USABLE) - shared_bytes(size, prompt_tokens, settings)
    return max(1, left // bytes_per_head(size, prompt_tokens, settings))
