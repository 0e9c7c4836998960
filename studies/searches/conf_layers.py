"""ConfLayers (arXiv 2604.14612): an iterative search for blocks to skip, driven by each block's confidence.

An iteration decodes with the current skip set, reads the confidence of every block off a recently decoded sequence, and skips
the blocks whose confidence is below a threshold of their neighbourhood. Formulas marked [code] follow the authors' released
code.

Three differences from that code, each for a known flaw: the best set has the highest *measured* speed-up, not the most
accepted tokens; a set is measured once; and an iteration that selects nothing is not taken for a draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optuna
from pydantic import Field

from decoding.draft_length import AnyRule, TopProbability
from decoding.drafts import LayerSkip, compact_indices
from studies.confidence.confidences import ConfidenceName, block_scores
from studies.confidence.selection import LambdaSchedule, Selection, select_from_scores
from studies.contract import Candidate, Problem, Study, StudySettings, TrialRecord


class ConfLayersSettings(StudySettings):
    """Settings of the ConfLayers search. Defaults are the authors' where they fit a search of a few dozen trials."""

    confidences: tuple[ConfidenceName, ...] = Field(
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

    def _advance(self, confidence: ConfidenceName, lam: float) -> _Thread:
        """Return the next set, from the current sequence, and lambda moved towards the wanted ratio [code]."""
        schedule = LambdaSchedule(
            self._num_layers, self.settings.skip_ratio, window_growth_cap=self.settings.window_growth_cap
        )
        scores = block_scores(confidence, self.problem.target, self._current_window(), form="unrounded")
        skipped = select_from_scores(
            scores,
            lam=lam,
            num_layers=self._num_layers,
            window_growth_cap=self.settings.window_growth_cap,
            form="unrounded",
        )
        return _Thread(schedule.after(Selection(tuple(skipped), lam)), skipped)

    def _current_window(self) -> tuple[int, ...]:
        """Return the last `window` tokens of one tuning prompt and its continuation.

        An iteration decodes several prompts; each confidence reads another one each time, in turn.
        """
        turn = self._num_iterations // len(self.settings.confidences) % len(self.problem.prompts)
        return (*self.problem.prompts[turn], *self.problem.continuations[turn])[-self.settings.window :]
