"""The contract of a bench: what searches, races and benchmarks ask of it. Implemented by `Bench` and by resampled benches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample

OnSample = Callable[[PromptSample], None]


class Measuring(Protocol):
    """Measures candidates against plain decoding on prompts, or on batches of them, by their indices."""

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the measurable prompts or batches."""

    def measure(self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = ...) -> Measurement:
        """Measure a candidate at these indices; `on_sample` receives each sample and may raise to stop."""

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate with its rule warmed up at these indices, if the rule is adaptive."""
