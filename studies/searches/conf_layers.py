"""ConfLayers (arXiv 2604.14612): an iterative search for blocks to skip, driven by how sure of itself each block looks.

An iteration decodes with the current skip set, reads every block's confidence off the freshest text, and skips the blocks
whose confidence falls below a threshold of their neighbourhood. Formulas marked [code] follow the authors' released code.

Ours differs where that code is known to go wrong: the best set is the one with the highest *measured* speed-up, not the most
accepted tokens; a set met before is not measured again; and an iteration that selects nothing is not taken for a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import optuna
import torch
from pydantic import Field
from torch import Tensor

from decoding.documents.strict_yaml import Document
from decoding.draft_length import AnyRule, TopProbability
from decoding.drafts import LayerSkip, compact_indices
from decoding.errors import UnsupportedModelError
from decoding.target import Target
from studies.contract import Candidate, Problem, Study, TrialRecord

LAMBDA_STEP = 0.05  # [code]
RATIO_SLACK = 0.25  # [code] how far above the wanted skip ratio lambda begins to rise


class ConfLayersSettings(Document):
    """The settings of the ConfLayers search. Defaults are the authors' where they fit a search of a few dozen trials."""

    confidences: tuple[Literal["sublayer_entropy", "logit_lens_entropy"], ...] = Field(
        ("sublayer_entropy", "logit_lens_entropy"),
        min_length=1,
        description="confidences to search with, taken in turn",
    )
    skip_ratio: float = Field(0.45, gt=0.0, lt=1.0, description="share of the middle blocks below which lambda falls")
    window: int = Field(32, ge=1, description="tokens of the freshest text a confidence is read from (W)")
    max_iterations: int = Field(40, ge=1, description="iterations at most; a trial is one iteration")
    patience: int = Field(12, ge=1, description="iterations without a better speed-up after which the search ends")
    window_growth_cap: int | None = Field(
        None, ge=0, description="cap of A in the adaptive threshold (Qwen in the code: L // 3)"
    )
    draft_length: AnyRule = Field(
        default_factory=lambda: TopProbability(threshold=0.6, max_tokens=12),
        description="the rule every skip set is measured with",
    )


@dataclass
class _Thread:
    """The state of the search with one confidence: its lambda, and the skip set to try next."""

    lam: float
    skipped: list[int]


class ConfLayers(Study):
    """One trial = one iteration = one skip set. State is rebuilt from the notes of the finished trials."""

    name: ClassVar[str] = "conf_layers"
    Settings: ClassVar[type[Document]] = ConfLayersSettings

    def __init__(self, problem: Problem, settings: ConfLayersSettings) -> None:
        self._problem = problem
        self._settings = settings
        self._num_layers = problem.target.num_layers
        odd = [index for index in range(1, self._num_layers - 1) if index % 2]  # [code] where the search starts
        self._threads = {settings.confidences[0]: _Thread(0.0, odd)}
        self._num_iterations = 0
        self._best = 0.0
        self._last_improvement = 0

    @classmethod
    def create(cls, problem: Problem, settings: Any) -> ConfLayers:
        """See `Study.create`."""
        return cls(problem, settings)

    def sampler(self) -> optuna.samplers.BaseSampler:
        """The search proposes by itself; a skip set is recorded with the trial, not suggested by a sampler."""
        return optuna.samplers.RandomSampler(seed=self._problem.seed)

    def space(self) -> dict[str, Any]:
        """The settings: another patience or limit is the same search, going on longer."""
        return self._settings.model_dump(mode="json", exclude={"max_iterations", "patience"})

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """The skip set of this iteration, with the lambda and confidence that led to it."""
        confidence = self._settings.confidences[self._num_iterations % len(self._settings.confidences)]
        thread = self._threads.get(confidence) or self._advance(confidence, 0.0)
        notes = {
            "confidence": confidence,
            "lambda": round(thread.lam, 4),
            "num_skipped": len(thread.skipped),
            "skipped": compact_indices(tuple(thread.skipped)),
        }
        return Candidate(draft=LayerSkip.blocks(thread.skipped), draft_length=self._settings.draft_length), notes

    def observe(self, record: TrialRecord) -> None:
        """Keep the best speed-up, then select the next set from the text this iteration wrote."""
        self._num_iterations += 1
        if record.speedup is not None and record.repeat_of is None and record.speedup > self._best:
            self._best, self._last_improvement = record.speedup, self._num_iterations
        confidence = record.notes["confidence"]
        self._threads[confidence] = self._advance(confidence, record.notes["lambda"])

    def finished(self) -> str | None:
        """The iteration limit, or `patience` iterations without a better speed-up."""
        if self._num_iterations >= self._settings.max_iterations:
            return f"{self._num_iterations} iterations done"
        idle = self._num_iterations - self._last_improvement
        return f"no better skip set in {idle} iterations" if idle >= self._settings.patience else None

    def _advance(self, confidence: str, lam: float) -> _Thread:
        """The next set from the freshest text, and lambda moved towards the wanted ratio [code]."""
        values = CONFIDENCES[confidence](self._problem.target, self._freshest_text())
        skipped = select_layers(
            values[1 : self._num_layers - 1].tolist(),
            lam=lam,
            num_layers=self._num_layers,
            window_growth_cap=self._settings.window_growth_cap,
        )
        return _Thread(
            adapt_lambda(lam, len(skipped) / max(1, self._num_layers - 2), self._settings.skip_ratio), skipped
        )

    def _freshest_text(self) -> Tensor:
        """The last `window` tokens [1, window] of the text that the iteration just observed ended with.

        Every iteration decodes several tuning prompts, so each confidence takes the text of another one each time, in turn.
        """
        turn = self._num_iterations // len(self._settings.confidences) % len(self._problem.prompts)
        text = (*self._problem.prompts[turn], *self._problem.continuations[turn])
        return torch.tensor([text[-self._settings.window :]], device=self._problem.target.device)


def select_layers(
    confidence: Sequence[float], *, lam: float, num_layers: int, window_growth_cap: int | None = None
) -> list[int]:
    """The adaptive threshold of ConfLayers [code]: the blocks to skip, ascending.

    `confidence` holds the values of blocks 1 to `num_layers - 2` in order. A block is skipped if its standardised confidence
    is below mean - lam * std of the blocks around it; the neighbourhood grows with depth and with the curvature of the
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
    """How many neighbours each block is compared with: 2 + A * curvature * depth [code]."""
    curvature = np.gradient(np.gradient(z)) if z.size > 1 else np.zeros_like(z)
    differs = np.flatnonzero(curvature != curvature[0])
    leading = int(differs[0]) if differs.size else z.size
    growth = 5 * leading if cap is None else min(cap, 5 * leading)
    centred = _centre_on_half((curvature - curvature.min()) / (curvature.max() - curvature.min() + 1e-8))
    return [2 + int(growth * g * (j + 1) / num_layers) for j, g in enumerate(centred)]


def _centre_on_half(values: np.ndarray) -> np.ndarray:
    """Stretch values in [0, 1] so that their mean is one half [code]."""
    mean, low, high = values.mean(), values.min(), values.max()
    if np.isclose(high, low):
        return np.full_like(values, 0.5)
    scale = min(0.5 / (high - mean), 0.5 / (mean - low))
    return np.clip(scale * (values - mean) + 0.5, 0.0, 1.0)


def adapt_lambda(lam: float, ratio: float, wanted: float) -> float:
    """Lambda after a selection that skipped `ratio` of the middle blocks [code]: up if far too many, down if too few."""
    if ratio > wanted + RATIO_SLACK:
        return lam + LAMBDA_STEP
    return lam - LAMBDA_STEP if ratio < wanted else lam


@torch.inference_mode()
def sublayer_entropy(target: Target, token_ids: Tensor) -> np.ndarray:
    """Confidence of every block [num_layers] from its two branches [code].

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
    """Confidence of every block [num_layers]: 1 - H / ln V of the vocabulary distribution read off behind it.

    After a secondary description of the paper; mean over the W positions of `token_ids` [1, W].
    """
    return np.array([_certainty(logits) for logits in target.logit_lens(token_ids)])


def _certainty(values: Tensor) -> float:
    """1 - mean entropy of the softmax over the last dimension, over its largest possible value."""
    log_probabilities = torch.log_softmax(values.float(), dim=-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1)
    return float(1.0 - entropy.mean() / np.log(values.shape[-1]))


CONFIDENCES: dict[str, Callable[[Target, Tensor], np.ndarray]] = {
    "sublayer_entropy": sublayer_entropy,
    "logit_lens_entropy": logit_lens_entropy,
}
