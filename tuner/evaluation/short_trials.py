"""Trials that measure nothing, for what a search does beside measuring: their speed-ups are planted, and come at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna

from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from studies.contract import Candidate, Study, StudySetup, TrialRecord
from studies.measurement import Measurement, PromptSample
from tuner.measuring.contract import OnSample

NUM_PROMPTS, NUM_LAYERS = 4, 1


class PlantedStudy(Study):
    """Skips another set of blocks in each trial; knows what all processes have tried."""

    name = "planted"

    def __init__(self) -> None:
        self.num_observed = 0

    def setup(self) -> StudySetup:
        """See `Study.setup`."""
        return StudySetup({}, optuna.samplers.RandomSampler(seed=0))

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """See `Study.propose`."""
        return Candidate(draft=LayerSkip.blocks((trial.number,)), draft_length=Fixed(max_tokens=4)), {}

    def proposes_beside(self, pending: Sequence[Candidate]) -> bool:
        """See `Study.proposes_beside`: no trial follows from another."""
        return True

    def observe(self, record: TrialRecord) -> None:
        """See `Study.observe`."""
        self.num_observed += 1


class PlantedBench:
    """A bench that answers at once; see `Measuring`."""

    indices: Sequence[int] = range(NUM_PROMPTS)

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Return planted samples: the speed-up follows from the block."""
        (block,) = candidate.draft.skipped(NUM_LAYERS).skip_mlp
        ratio = 1.0 + block % 100 / 100
        samples = [_sample(ratio, index) for index in indices]
        for sample in samples:
            on_sample(sample)
        return Measurement(samples=tuple(samples))

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate: its rule does not adapt."""
        return candidate


def _sample(ratio: float, prompt: int) -> PromptSample:
    return PromptSample(
        prompt=prompt,
        plain_seconds=ratio,
        plain_tokens=10,
        draft_seconds=1.0,
        draft_tokens=10,
        rounds=5,
        drafted=10,
        accepted=8,
        identical=True,
    )
