"""Joint training of heads by distillation, and their figures as drafts on given texts.

Each step runs the target once, then each head in turn. The loss is the cross-entropy of a head's distribution against the
target's (soft labels), over the tokens of the responses. It is reported minus its lower bound, the entropy of the labels:
a loss of 0 means that the head predicts the target exactly.

A head starts as a copy of the target's last block. It computes in the target's precision, as in production, while the optimizer
updates float32 master weights. The structure of a step, the schedule and the rates are our formulation.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding.errors import DistillationError
from decoding.exit_heads import ExitFigures
from decoding.target import Target
from decoding.target.states import exit_logits, exit_states
from tuner.config import DistillSettings
from tuner.heads.texts import GeneratedText, Schedule, TrainingBatch, batches_by_length

WARM_UP = 0.05
"""Share of the training over which the learning rate rises to its peak."""
GRADIENT_NORM = 1.0
BETAS = (0.9, 0.95)

Losses = Mapping[int, float]
"""Cross-entropy minus the entropy of the labels, in nats per token, by exit layer."""


class Student:
    """Head in training: its module, float32 master weights, and their optimizer."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self._weights: list[nn.Parameter] = list(head.parameters())
        # The weights of a float32 head are their own masters.
        self.masters: list[Tensor] = [
            weight if weight.dtype == torch.float32 else weight.detach().float() for weight in self._weights
        ]
        self.optimizer = torch.optim.AdamW(self.masters, betas=BETAS, weight_decay=0.0)

    def update(self, num_tokens: int, learning_rate: float) -> None:
        """Apply one optimizer step with the accumulated gradient, then clear it.

        The loss was summed over `num_tokens`. A summed loss keeps small gradients from underflowing in float16. A step whose
        gradients overflow is skipped.
        """
        for weight, master in zip(self._weights, self.masters, strict=True):
            gradient, weight.grad = weight.grad, None
            master.grad = None if gradient is None else gradient.float() / num_tokens
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if torch.nn.utils.clip_grad_norm_(self.masters, GRADIENT_NORM).isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.sync_weights()

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Copy the master weights into the module, rounded to its precision."""
        for weight, master in zip(self._weights, self.masters, strict=True):
            if master is not weight:
                weight.copy_(master)

    @torch.no_grad()
    def stored_head(self) -> nn.Module:
        """Return the head as loaded from a file: target's precision, rounded to bfloat16."""
        stored: nn.Module = copy.deepcopy(self.head).requires_grad_(False)
        for weight, master in zip(stored.parameters(), self.masters, strict=True):
            weight.copy_(master.to(torch.bfloat16))
        return stored


@dataclass
class Run:
    """State of a training run, as a checkpoint holds it."""

    students: dict[int, Student]
    losses: list[Losses] = field(default_factory=list)
    """One entry per step."""
    seconds: float = 0.0
    most_seconds: float | None = None
    """Limit on the seconds of this run; the one of the settings if None. Not part of a checkpoint."""

    @property
    def step(self) -> int:
        return len(self.losses)

    def progress(self, settings: DistillSettings) -> float:
        """Return the finished share of training, by steps or by time, whichever is larger."""
        return max(self.step / settings.steps, self.seconds / (self.most_seconds or settings.timeout or math.inf))


def train(
    run: Run,
    target: Target,
    texts: Sequence[GeneratedText],
    settings: DistillSettings,
    seed: int,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Train the students of `run` until its steps or its time are used up; `on_step` is called after every step.

    Without a timeout a step depends on settings, seed and step number alone, so a resumed run ends with the weights of an
    uninterrupted one. Raises `DistillationError` if a loss is not finite.
    """
    schedule = Schedule(texts, settings.batch_size, seed)
    highest_rate = settings.learning_rate or default_learning_rate(target)
    with frozen(target.model):
        while (progress := run.progress(settings)) < 1:
            began = time.perf_counter()
            learning_rate = highest_rate * rate_factor(progress, settings.steps)
            batch = TrainingBatch.of(schedule.texts_of(run.step), target.device)
            run.losses.append(train_step(run.students, target, batch, learning_rate, settings))
            run.seconds += time.perf_counter() - began
            for exit_layer, loss in run.losses[-1].items():
                if not math.isfinite(loss):
                    raise DistillationError(
                        f"the loss of exit {exit_layer} is {loss} at step {run.step}: try a lower learning rate than "
                        f"{highest_rate:.1g}"
                    )
            on_step()


def train_step(
    students: Mapping[int, Student],
    target: Target,
    batch: TrainingBatch,
    learning_rate: float,
    settings: DistillSettings,
) -> Losses:
    """Run the target once and update each student in turn.

    Returns the losses in nats per token. Peak memory beyond the model and the students: the
    states that they read, and the activations and logits of one student at a time.
    """
    with torch.no_grad():
        states, logits = exit_states(target, batch.token_ids, list(students), first=batch.first)
        labels = torch.softmax(logits[batch.response_mask].float(), dim=-1)  # [tokens, vocabulary]
        del logits
    losses, least = {}, float(torch.special.entr(labels).sum())
    for exit_layer, student in students.items():
        drafted = exit_logits(target, batch.token_ids, states.pop(exit_layer), student.head, first=batch.first)
        loss = soft_label_loss(drafted[batch.response_mask], labels)
        loss.backward()
        student.update(len(labels), learning_rate)
        losses[exit_layer] = (loss.item() - least) / len(labels)
    return losses


@torch.no_grad()
def evaluate(
    target: Target,
    heads: Mapping[int, nn.Module | None],
    texts: Sequence[GeneratedText],
    batch_size: int,
    on_texts: Callable[[int], None] = lambda num_texts: None,
) -> dict[int, ExitFigures]:
    """Return the figures of each head over all response tokens of `texts`, by exit layer; None is an exit without a head.

    `on_texts` is called after each batch with the number of texts in it.
    """
    sums = {layer: torch.zeros(2, dtype=torch.float64) for layer in heads}
    num_tokens = 0
    for texts_of_batch in batches_by_length(texts, batch_size):
        batch = TrainingBatch.of(texts_of_batch, target.device)
        states, logits = exit_states(target, batch.token_ids, list(heads), first=batch.first)
        target_logits = logits[batch.response_mask]
        num_tokens += target_logits.shape[0]
        for layer, head in heads.items():
            drafted = exit_logits(target, batch.token_ids, states.pop(layer), head, first=batch.first)
            draft_logits = drafted[batch.response_mask]
            agrees = target_logits.argmax(dim=-1) == draft_logits.argmax(dim=-1)
            accepted = acceptance(target_logits, draft_logits).double().sum()
            sums[layer] += torch.stack([accepted, agrees.double().sum()]).cpu()
        on_texts(len(texts_of_batch))
    return {
        layer: ExitFigures(acceptance=min(1.0, float(accepted) / num_tokens), agreement=float(agreed) / num_tokens)
        for layer, (accepted, agreed) in sums.items()
    }


def acceptance(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return the acceptance probability of a sampled draft token at temperature 1.

    Logits are [..., vocabulary], the result is [...]. It is the sum over the vocabulary of min(p, q), or 1 minus the total
    variation distance of the target distribution p and the draft distribution q (Leviathan et al., arXiv 2211.17192, corollary
    3.6).
    """
    p, q = (torch.softmax(logits.float(), dim=-1) for logits in (target_logits, draft_logits))
    return torch.minimum(p, q).sum(dim=-1)


def soft_label_loss(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of softmax(`draft_logits`) against `labels`, in nats summed over tokens.

    Both are [tokens, vocabulary]. The rows of `labels` are distributions: their entropy is the least loss.
    """
    return F.cross_entropy(draft_logits.float(), labels, reduction="sum")


def default_learning_rate(target: Target) -> float:
    """Return the default learning rate: 1 / hidden size.

    Adam's best rate for a matrix is inversely proportional to its width (muP, arXiv 2203.03466). The constant 1 comes from
    trials on the demo model.
    """
    return 1.0 / target.config.hidden_size


def rate_factor(progress: float, steps: int) -> float:
    """Return the learning-rate factor: linear warm-up, then cosine decay to 0 (our formulation)."""
    return min(1.0, (progress + 1 / steps) / WARM_UP) * (1 + math.cos(math.pi * progress)) / 2


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Turn off gradients for all parameters of `model`, and restore each setting on exit."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
