"""Memory of a distillation, estimated from the sizes of the model, and the number of heads that fit in it."""

from __future__ import annotations

from tuner.config import DistillSettings
from tuner.inputs.memory import USABLE, ModelSize

_MASTER, _ADAM, _GRADIENT = 4, 8, 4
"""Bytes per weight of a head in float32: its master, the two moments of the optimizer, and the master's gradient."""


def head_parameters(size: ModelSize, settings: DistillSettings) -> int:
    """Return the weights of a head: those of a block, and in a feature head those that join its inputs."""
    joining = 2 * size.hidden_size**2 + 2 * size.hidden_size if settings.head == "feature" else 0
    return size.block_parameters + joining


def bytes_per_head(size: ModelSize, prompt_tokens: int, settings: DistillSettings) -> int:
    """Return the bytes that each head in training takes: its weights, its optimizer and the states at its exit."""
    item = size.dtype.itemsize
    master = 0 if item == _MASTER else _MASTER
    num_tokens = settings.batch_size * (prompt_tokens + settings.response_tokens)
    return head_parameters(size, settings) * (item + master + _ADAM) + num_tokens * size.hidden_size * item


def shared_bytes(size: ModelSize, prompt_tokens: int, settings: DistillSettings) -> int:
    """Return the bytes that a training step takes however many heads there are: one head is trained after another.

    Labels and logits of the responses, the gradients of one head, and what its backward pass keeps of each pass. Prompts of one
    length are assumed: a batch's logits begin where its shortest prompt ends.
    """
    item = size.dtype.itemsize
    num_tokens = settings.batch_size * (prompt_tokens + settings.response_tokens)
    num_responses = settings.batch_size * settings.response_tokens
    passes, weights = settings.head_passes, head_parameters(size, settings)
    # Labels, and for each pass logits with their softmax and gradient, all but one in float32.
    vocabulary = num_responses * size.vocabulary * (4 + passes * (3 * 4 + 2 * item))
    activations = passes * 2 * num_tokens * weights // size.hidden_size * item
    return vocabulary + activations + weights * (item + 2 * _GRADIENT)


def heads_that_fit(size: ModelSize, prompt_tokens: int, settings: DistillSettings, free: int | None) -> int | None:
    """Return how many heads fit in `free` bytes beside the loaded model, at least 1; None if `free` is unknown."""
    if free is None:
        return None
    left = int(free * USABLE) - shared_bytes(size, prompt_tokens, settings)
    return max(1, left // bytes_per_head(size, prompt_tokens, settings))
