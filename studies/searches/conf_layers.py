"""ConfLayers (arXiv 2604.14612): an iterative search for blocks to skip, driven by each block's confidence.

An iteration decodes with the current skip set, reads the confidence of every block off a recently decoded sequence, and skips
the blocks whose confidence is below a threshold of their neighbourhood. Formulas marked [code] follow the authors' released
code.

Three differences from that code, each for a known flaw: the best set has the highest *measured* speed-up, not the most
accepted tokens; a set is measured once; and an iteration that selects nothing is not taken for a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import optuna
import torch
from pydantic import Field
from torch import Tensor

from decoding.draft_length import AnyRule, TopProbability
from decoding.drafts import LayerSkip, compact_indices
from decoding.errors import UnsupportedModelError
from decoding.target import Target
from studies.contract import Candidate, Problem, Study, StudySettings, TrialRecord

LAMBDA_STEP = 0.05  # [code]
RATIO_SLACK = 0.25  # [code] lambda rises when the skip ratio exceeds the wanted one by more than this


class ConfLayersSettings(StudySettings):
    """Settings of the ConfLayers search. Defaults are the authors' where they fit a search of a few dozen trials."""

    confidences: tuple[Literal["sublayer_entropy", "logit_lens_entropy"], ...] = Field(
        ("sublayer_entropy", "logit_lens_entropy"),
        min_length=1,
        description="confidence measures to search with, in turn",
    )
    skip_ratio: float = Field(0.45, gt=0.0, lt=1.0, description="share of the middle blocks below which lambda falls")
    window: int = Field(32, ge=1, description="last tokens of a sequence that a confidence is read from (W)")
    patience: int | None = Field(12, ge=1, description="trials without a better speed-up after which the search ends")
    window_growth_cap: int | None = Field(
        None, ge=0, description="cap of A in the adaptive threshold (Qwen in the code: L // 3)"
    )
    draft_length: AnyRule = Field(
        default_factory=lambda: TopProbability(threshold=0.6, max_tokens=12),
        description="draft-length rule that every skip set is measured with",
    )


@dataclass
class _Thread:
    """State of the search with one confidence: its lambda and the next skip set."""

    lam: float
    skipped: list[int]


class ConfLayers(Study):
    """One trial per iteration, one skip set per trial. State is rebuilt from the notes of the finished trials."""

    name = "conf_layers"
    Settings = ConfLayersSettings

    def __init__(self, problem: Problem, settings: ConfLayersSettings) -> None:
        super().__init__(problem, settings)
        self._num_layers = problem.target.num_layers
        odd = [index for index in range(1, self._num_layers - 1) if index % 2]  # [code] the first skip set
        self._threads = {settings.confidences[0]: _Thread(0.0, odd)}
        self._num_iterations = 0

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return the skip set of this iteration; the notes hold its lambda and confidence."""
        confidence = self.settings.confidences[self._num_iterations % len(self.settings.confidences)]
        thread = self._threads.get(confidence) or self._advance(confidence, 0.0)
        notes = {
            "confidence": confidence,
            "lambda": round(thread.lam, 4),
            "num_skipped": len(thread.skipped),
            "skipped": compact_indices(tuple(thread.skipped)),
        }
        return Candidate(draft=LayerSkip.blocks(thread.skipped), draft_length=self.settings.draft_length), notes

    def observe(self, record: TrialRecord) -> None:
        """Select the next skip set of the trial's confidence."""
        self._num_iterations += 1
        confidence = record.notes["confidence"]
        self._threads[confidence] = self._advance(confidence, record.notes["lambda"])

    def _advance(self, confidence: str, lam: float) -> _Thread:
        """Return the next set, from the current sequence, and lambda moved towards the wanted ratio [code]."""
        values = CONFIDENCES[confidence](self.problem.target, self._current_sequence())
        skipped = select_layers(
            values[1 : self._num_layers - 1].tolist(),
            lam=lam,
            num_layers=self._num_layers,
            window_growth_cap=self.settings.window_growth_cap,
        )
        ratio = len(skipped) / max(1, self._num_layers - 2)
        return _Thread(adapt_lambda(lam, ratio, self.settings.skip_ratio), skipped)

    def _current_sequence(self) -> Tensor:
        """Return the last `window` tokens [1, window] of one tuning prompt and its continuation.

        An iteration decodes several prompts; each confidence reads another one each time, in turn.
        """
        turn = self._num_iterations // len(self.settings.confidences) % len(self.problem.prompts)
        sequence = (*self.problem.prompts[turn], *self.problem.continuations[turn])
        return torch.tensor([sequence[-self.settings.window :]], device=self.problem.target.device)


def select_layers(
    confidence: Sequence[float], *, lam: float, num_layers: int, window_growth_cap: int | None = None
) -> list[int]:
    """Return the blocks to skip, ascending, by the adaptive threshold of ConfLayers [code].

    `confidence` holds the values of blocks 1 to `num_layers - 2` in order. A block is skipped if its standardised confidence
    is below mean - lam * std of the blocks around it. The neighbourhood grows with depth and with the curvature of the
    confidences. `window_growth_cap` caps the growth factor A. Raises ValueError if the number of values is wrong.
    """
    n = num_layers - 2
    if len(confidence) != n or n < 1:
        raise ValueError(
            f"{num_layers} layers have {max(n, 0)} blocks between the first and the last, got {len(confidence)} values"
        )
    values = np.asarray(confidence, dtype=np.float64)
    z = (values - values.mean()) / (values.std() + 1e-6)
    windows = _window_sizes(z, num_layers, window_growth_cap)
    skipped = []
    for j, window in enumerate(windows):
        half = window // 2
        neighbours = np.concatenate([z[max(0, j - half) : j], z[j + 1 : min(n, j + half + 1)]])
        mean, std = (neighbours.mean(), neighbours.std()) if neighbours.size else (0.0, 0.0)
        if z[j] < mean - lam * std:
            skipped.append(j + 1)
    return skipped


def _window_sizes(z: np.ndarray, num_layers: int, cap: int | None) -> list[int]:
    """Return the number of neighbours that each block is compared with: 2 + A * curvature * depth [code]."""
    curvature = np.gradient(np.gradient(z)) if z.size > 1 else np.zeros_like(z)
    differs = np.flatnonzero(curvature != curvature[0])
    leading = int(differs[0]) if differs.size else z.size
    growth = 5 * leading if cap is None else min(cap, 5 * leading)
    centred = _centre_on_half((curvature - curvature.min()) / (curvature.max() - curvature.min() + 1e-8))
    return [2 + int(growth * g * (j + 1) / num_layers) for j, g in enumerate(centred)]


def _centre_on_half(values: np.ndarray) -> np.ndarray:
    """Return values in [0, 1], stretched so that their mean is one half [code]."""
    mean, low, high = values.mean(), values.min(), values.max()
    if np.isclose(high, low):
        return np.full_like(values, 0.5)
    scale = min(0.5 / (high - mean), 0.5 / (mean - low))
    return np.clip(scale * (values - mean) + 0.5, 0.0, 1.0)


def adapt_lambda(lam: float, ratio: float, wanted: float) -> float:
    """Return lambda after a selection that skipped `ratio` of the middle blocks: up if far too many, down if too few [code]."""
    if ratio > wanted + RATIO_SLACK:
        return lam + LAMBDA_STEP
    return lam - LAMBDA_STEP if ratio < wanted else lam


@torch.inference_mode()
def sublayer_entropy(target: Target, token_ids: Tensor) -> np.ndarray:
    """Return the confidence of every block [num_layers], from its two branches [code].

    conf(x) = 1 - mean_t H(softmax over the hidden dimension of x_t) / ln d, for the attention and the MLP output before the
    residual add, in float32; their sum. `token_ids` [1, W].
    """
    try:
        outputs = target.sublayer_outputs(token_ids)
    except UnsupportedModelError as cause:
        raise UnsupportedModelError(
            f"{cause}: search this model with `studies: {{conf_layers: {{confidences: [logit_lens_entropy]}}}}`"
        ) from None
    return np.array([_certainty(a) + _certainty(m) for a, m in outputs])


@torch.inference_mode()
def logit_lens_entropy(target: Target, token_ids: Tensor) -> np.ndarray:
    """Return the confidence of every block [num_layers]: 1 - H / ln V of the vocabulary distribution after it.

    After a secondary description of the paper; mean over the W positions of `token_ids` [1, W].
    """
    return np.array([_certainty(logits) for logits in target.logit_lens(token_ids)])


def _certainty(values: Tensor) -> float:
    """Return 1 - the mean entropy of the softmax over the last dimension, relative to the largest possible entropy."""
    log_probabilities = torch.log_softmax(values.float(), dim=-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1)
    return float(1.0 - entropy.mean() / np.log(values.shape[-1]))


CONFIDENCES: dict[str, Callable[[Target, Tensor], np.ndarray]] = {
    "sublayer_entropy": sublayer_entropy,
    "logit_lens_entropy": logit_lens_entropy,
}
