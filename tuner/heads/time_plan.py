"""Seconds of a distillation, estimated from the sizes of the model and the measured rate of its passes (our formulation)."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.config import DistillSettings
from tuner.inputs.memory import ModelSize
from tuner.measuring.baseline import Pulse

BACKWARD = 2.0
"""Cost of a backward pass over that of its forward pass."""
UPDATE_READS = 5.0
"""Reads of a head's weights in one step of the optimizer: weights, gradient, two moments, and the masters."""


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
    of_heads = num_heads * settings.head_passes * (1 + BACKWARD) * of_head
    updates = num_heads * UPDATE_READS * block_share * pulse.token_seconds
    training = settings.steps * ((of_target + of_heads) * pulse.position_seconds + updates)
    evaluated = num_evaluated * (1 + num_heads * head_share)
    evaluation = (1 + num_groups) * evaluated * text * pulse.position_seconds + num_evaluated / batch * decoding
    return DistillationTime(writing, training, evaluation)
