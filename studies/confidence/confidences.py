"""The confidence of each block, read off a window of text by one pass of the whole model (ConfLayers, arXiv 2604.14612).

A window is read after the keys and values of the text before it. Formulas marked [code] follow the authors' released code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.errors import UnsupportedModelError
from decoding.target import Target
from decoding.target.states import cache_after, logit_lens, sublayer_outputs
from studies.confidence.selection import DTYPES, Form, standardise

ConfidenceName = Literal["sublayer_entropy", "logit_lens_entropy"]
CONFIDENCE_NAMES: tuple[ConfidenceName, ...] = get_args(ConfidenceName)

MAX_WINDOW = 1024
"""Tokens of a window at most: one eager pass reads it."""

LOWEST, HIGHEST = float(np.log(np.finfo(np.float32).tiny)), 88.7
"""Range to which values are clamped before the softmax [code]: exp of either is still a normal float32."""


@dataclass(frozen=True)
class Excerpt:
    """The token ids of a window, and those whose keys and values it is read after."""

    before: tuple[int, ...]
    window: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Sequence[int], continuation: Sequence[int], size: int, form: Form) -> Excerpt:
        """Return the last `size` tokens of `continuation` as a window.

        The published form puts it right after the prompt, as the authors do: generated tokens before the window are left out
        [code]. The unrounded form leaves it in its true context.
        """
        window = tuple(continuation[-size:])
        between = () if form == "published" else tuple(continuation[:-size])
        return cls((*prompt, *between), window)


def joint_scores(
    name: ConfidenceName, target: Target, excerpts: Sequence[Excerpt], form: Form = "published"
) -> np.ndarray:
    """Return the standardised confidences [num_layers - 2] of blocks 1 to L - 2, as `select_from_scores` takes them.

    Two passes read each excerpt, none further for other values of lambda; of several excerpts the mean counts (ours).
    """
    parts = np.mean([_read(name, target, excerpt) for excerpt in excerpts], axis=0)
    confidences = parts.astype(DTYPES[form]).sum(axis=1)
    return standardise(confidences[1 : target.num_layers - 1], form)


def _read(name: ConfidenceName, target: Target, excerpt: Excerpt) -> np.ndarray:
    device = target.device
    before, window = (torch.tensor([each], device=device) for each in (excerpt.before, excerpt.window))
    return CONFIDENCES[name](
        target, window, cache_after(target, before, len(excerpt.window)) if excerpt.before else None
    )


@torch.inference_mode()
def sublayer_entropy(target: Target, token_ids: Tensor, after: KVCache | None = None) -> np.ndarray:
    """Return the confidences [num_layers, 2] of each block's attention and MLP output, before the residual add [code].

    conf(x) = 1 - mean_t H(softmax over the hidden dimension of x_t) / ln d, in float32. A block's confidence is their sum.
    `token_ids` [1, W] follow what the cache holds. Raises UnsupportedModelError for blocks without separate modules.
    """
    try:
        outputs = sublayer_outputs(target, token_ids, after=after)
    except UnsupportedModelError as cause:
        raise UnsupportedModelError(
            f"{cause}: search this model with `studies: {{conf_layers: {{confidences: [logit_lens_entropy]}}}}`"
        ) from None
    return np.array([[_certainty(attention), _certainty(mlp)] for attention, mlp in outputs], dtype=np.float32)


@torch.inference_mode()
def logit_lens_entropy(target: Target, token_ids: Tensor, after: KVCache | None = None) -> np.ndarray:
    """Return the confidences [num_layers, 1]: 1 - H / ln V of the vocabulary distribution after each block.

    After a secondary description of the paper; mean over the W positions of `token_ids` [1, W], which follow what the cache holds.
    """
    lenses = logit_lens(target, token_ids, after=after)
    return np.array([[_certainty(logits)] for logits in lenses], dtype=np.float32)


def _certainty(values: Tensor) -> float:
    """Return 1 - the mean entropy of the softmax over the last dimension, relative to the largest possible entropy [code]."""
    probabilities = values.float().clamp(LOWEST, HIGHEST).softmax(dim=-1)
    entropy = -(probabilities * (probabilities + 1e-12).log()).sum(dim=-1)
    return float(1.0 - entropy.mean() / np.log(values.shape[-1]))


CONFIDENCES: dict[ConfidenceName, Callable[[Target, Tensor, KVCache | None], np.ndarray]] = {
    "sublayer_entropy": sublayer_entropy,
    "logit_lens_entropy": logit_lens_entropy,
}
