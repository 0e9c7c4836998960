"""Prints the peak bytes of training one exit head of a fake 8B model, and two: `python -m tests.support.fake_training 500`.

A process of its own: torch may crash when fake tensors with gradients are freed, so it ends without freeing them.
"""

from __future__ import annotations

import os
import sys

from decoding.exit_heads import new_exit_head
from decoding.target import Target
from tests.support.fake_8b import PeakBytes, fake_8b
from tuner.config import DistillSettings
from tuner.heads.texts import GeneratedText, TrainingBatch
from tuner.heads.training import Student, frozen, train_step

NUM_LAYERS = 4
"""The frozen blocks after the exits are run and leave nothing: if each of four left its states, the estimate would not hold."""


def peak_of_training(target: Target, prompt_tokens: int, num_heads: int, kept: list[object]) -> int:
    """Return the peak bytes of two steps; everything that was trained is added to `kept`."""
    settings = DistillSettings()
    text = GeneratedText((1,) * prompt_tokens, (1,) * (settings.response_tokens + 1), 0.0)
    batch = TrainingBatch.of([text] * settings.batch_size, target.device)
    with PeakBytes(target.model) as memory, frozen(target.model):
        students = {exit_layer: Student(new_exit_head(target)) for exit_layer in range(1, num_heads + 1)}
        kept.append(students)
        for _ in range(2):  # the optimizer allocates its moments in the first step
            train_step(students, target, batch, 1e-3, settings)
    return memory.peak


if __name__ == "__main__":
    kept: list[object] = []
    with fake_8b(NUM_LAYERS) as model:
        peaks = [peak_of_training(Target(model), int(sys.argv[1]), count, kept) for count in (1, 2)]
        print(*peaks, flush=True)
        os._exit(0)
