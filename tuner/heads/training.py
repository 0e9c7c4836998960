"""Trains the heads of several exits in one pass: the target is run once a step, then the heads one after the other.

The loss is the cross-entropy of an exit's distribution against the target's (soft labels), over the tokens of the responses. It is
told without the entropy of the labels, below which no head can go: 0 is an exit that says what the target says.
A head starts as a copy of the target's last block. It computes in the target's precision, as it will in production, and
the optimizer moves float32 masters of its weights. Structure of a step, schedule and rates are our formulation.
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
from decoding.target import Target
from tuner.config import DistillSettings
from tuner.heads.batches import Schedule, TrainingBatch
from tuner.heads.texts import WrittenText

WARM_UP = 0.05
"""Share of the training in which the learning rate rises to its height."""
GRADIENT_NORM = 1.0
BETAS = (0.9, 0.95)

Losses = Mapping[int, float]
"""Cross-entropy above that of the labels with themselves, in nats a token, by exit layer."""


class Student:
    """A head in training: the module that computes, float32 masters of its weights, and their optimizer."""

    def __init__(self, target: Target) -> None:
        self.head = target.new_exit_head()
        self._weights = list(self.head.parameters())
        # The weights of a float32 head are their own masters.
        self.masters = [
            weight if weight.dtype == torch.float32 else weight.detach().float() for weight in self._weights
        ]
        self.optimizer = torch.optim.AdamW(self.masters, betas=BETAS, weight_decay=0.0)

    def learn(self, num_tokens: int, learning_rate: float) -> None:
        """Move the weights against the gradient that is there, of a loss summed over `num_tokens`; the gradient is spent.

        The sum keeps gradients above what float16 can hold; a step whose gradients exceed it is left out.
        """
        for weight, master in zip(self._weights, self.masters, strict=True):
            gradient, weight.grad = weight.grad, None
            master.grad = None if gradient is None else gradient.float() / num_tokens
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if torch.nn.utils.clip_grad_norm_(self.masters, GRADIENT_NORM).isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.follow_masters()

    @torch.no_grad()
    def follow_masters(self) -> None:
        """Give the module the weights of the masters, rounded to its precision."""
        for weight, master in zip(self._weights, self.masters, strict=True):
            if master is not weight:
                weight.copy_(master)

    @torch.no_grad()
    def stored_head(self) -> nn.Module:
        """The head as it is stored and read back: the masters rounded to bfloat16, in the target's precision."""
        stored = copy.deepcopy(self.head).requires_grad_(False)
        for weight, master in zip(stored.parameters(), self.masters, strict=True):
            weight.copy_(master.to(torch.bfloat16))
        return stored


@dataclass
class Run:
    """A training in progress: what a checkpoint holds."""

    students: dict[int, Student]
    losses: list[Losses] = field(default_factory=list)
    """Of every step."""
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def progress(self, settings: DistillSettings) -> float:
        """The share of the training that is done, 1 at its end: of the steps, or of the time if that is the larger."""
        return max(self.step / settings.steps, self.seconds / (settings.timeout or math.inf))


def train(
    run: Run,
    target: Target,
    texts: Sequence[WrittenText],
    settings: DistillSettings,
    seed: int,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Train the students of `run` to the end of its steps or its time; `on_step` is called behind every step.

    Without a timeout nothing but settings, seed and the number of the step decides a step, so a run that goes on from a
    checkpoint ends as one that was never stopped. Raises `DistillationError` if a loss is no number any more.
    """
    schedule = Schedule(texts, settings.batch_size, seed)
    highest_rate = settings.learning_rate or usual_rate(target)
    with frozen(target.model):
        while (progress := run.progress(settings)) < 1:
            began = time.perf_counter()
            learning_rate = highest_rate * rate_factor(progress, settings.steps)
            batch = TrainingBatch.of(schedule.texts_of(run.step), target.device)
            run.losses.append(train_step(run.students, target, batch, learning_rate))
            run.seconds += time.perf_counter() - began
            for exit_layer, loss in run.losses[-1].items():
                if not math.isfinite(loss):
                    raise DistillationError(
                        f"the loss of exit {exit_layer} is {loss} in step {run.step}: try a lower learning rate than "
                        f"{highest_rate:.1g}"
                    )
            on_step()


def train_step(students: dict[int, Student], target: Target, batch: TrainingBatch, learning_rate: float) -> Losses:
    """One pass of the target and one step of each student in turn; the losses of the exits in nats a token.

    Beside the model and the students, memory holds the states at the exits and the logits of one exit at a time.
    """
    with torch.no_grad():
        states, logits = target.exit_states(batch.token_ids, list(students), first=batch.first)
        labels = torch.softmax(logits[batch.counts].float(), dim=-1)  # [tokens, vocabulary]
        entropy = torch.special.entr(labels).sum().item()
        del logits
    losses = {}
    for exit_layer, student in students.items():
        drafted = target.exit_logits(batch.token_ids, states.pop(exit_layer), student.head, first=batch.first)
        loss = soft_label_loss(drafted[batch.counts], labels)
        loss.backward()
        student.learn(len(labels), learning_rate)
        losses[exit_layer] = (loss.item() - entropy) / len(labels)
    return losses


def soft_label_loss(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of softmax(`draft_logits`) against the distributions `labels`, both [tokens, vocabulary]: nats, summed."""
    return F.cross_entropy(draft_logits.float(), labels, reduction="sum")


def usual_rate(target: Target) -> float:
    """The learning rate if none is asked for: as 1 over the hidden size, as Adam's best rate for a matrix falls with its width
    (muP, arXiv 2203.03466); the constant is from trials on the demo model.
    """
    return 1.0 / target.config.hidden_size


def rate_factor(progress: float, steps: int) -> float:
    """What the learning rate is multiplied by: linear warm-up, then half a cosine down to 0 (our formulation)."""
    return min(1.0, (progress + 1 / steps) / WARM_UP) * (1 + math.cos(math.pi * progress)) / 2


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter of `model` collects gradients for a while; afterwards each does as before."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
