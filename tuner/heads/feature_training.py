"""Training and evaluation of a feature head, on its own outputs.

A head reads the target's states in its first step only; in each later step it reads what it put out itself. It is trained on both:
every training step unrolls a few steps of all rounds at once, and the loss is the sum of theirs (training-time test of EAGLE-3,
arXiv 2503.01840, section 3.2). There is no regression on the target's states, as in EAGLE-3: what counts is the distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from decoding.exit_heads import ExitFigures
from decoding.target import FeatureHead, Target
from decoding.target.feature_view import unrolled
from decoding.target.states import last_states
from tuner.heads.batches import TrainingBatch, batches_by_length
from tuner.heads.evaluation import summed
from tuner.heads.texts import GeneratedText
from tuner.heads.training import Losses, Student, least_loss, of_vocabulary, soft_label_loss

EVALUATED_STEPS = 4
"""Steps of a round that a feature head is evaluated on: the usual draft length."""
STEP_WEIGHT = 0.8
"""Weight of a step's loss over that of the step before: a later draft counts only if the earlier ones are accepted."""


def train_unrolled(
    students: Mapping[int, Student[FeatureHead]],
    target: Target,
    batch: TrainingBatch,
    learning_rate: float,
    *,
    num_steps: int,
) -> Losses:
    """Run the target once and update each student by `num_steps` steps of its own.

    Returns the mean loss of the steps in nats per token, less its lower bound. Peak memory beyond the model and the students:
    the activations and logits of all steps.
    """
    with torch.no_grad():
        states, logits = last_states(target, batch.token_ids, first=batch.first)
        all_labels = torch.softmax(logits[batch.response_mask].float(), dim=-1)  # [tokens, vocabulary]
        del logits
    losses = {}
    for layer, student in students.items():
        vocabulary = student.head.vocabulary
        labels = of_vocabulary(all_labels, vocabulary)
        total, plain = torch.zeros((), device=labels.device), 0.0
        steps = unrolled(target, student.head, batch.token_ids, states, num_steps, first=batch.first)
        for index, drafted in enumerate(steps):
            loss = soft_label_loss(of_vocabulary(drafted[batch.response_mask], vocabulary), labels)
            total = total + STEP_WEIGHT**index * loss
            plain += loss.item()
        total.backward()
        student.update(len(labels), learning_rate)
        losses[layer] = (plain / num_steps - least_loss(labels)) / len(labels)
    return losses


@torch.no_grad()
def evaluate_steps(
    target: Target,
    head: FeatureHead,
    texts: Sequence[GeneratedText],
    batch_size: int,
    on_progress: Callable[[int], None] = lambda num_texts: None,
    *,
    num_steps: int = EVALUATED_STEPS,
) -> tuple[ExitFigures, ...]:
    """Return the figures of each step of a round over all response tokens of `texts`, given that the steps before were accepted.

    `on_progress` is called after each batch with the number of texts in it.
    """
    sums = torch.zeros(num_steps, 2, dtype=torch.float64)
    num_tokens = 0
    for texts_of_batch in batches_by_length(texts, batch_size):
        batch = TrainingBatch.of(texts_of_batch, target.device)
        states, logits = last_states(target, batch.token_ids, first=batch.first)
        target_logits = logits[batch.response_mask]
        num_tokens += target_logits.shape[0]
        steps = unrolled(target, head, batch.token_ids, states, num_steps, first=batch.first)
        for index, drafted in enumerate(steps):
            sums[index] += summed(target_logits, drafted[batch.response_mask]).cpu()
        on_progress(len(texts_of_batch))
    return tuple(
        ExitFigures(acceptance=min(1.0, float(acceptance) / num_tokens), agreement=float(agreed) / num_tokens)
        for acceptance, agreed in sums
    )
