"""Optuna over the whole space by the measured speed-up alone: `tpe`, `random`, and any sampler of Optuna by name.

A general-purpose search: it predicts nothing and asks for no costs. It begins with known candidates and usual drafts of each kind
(our choice).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.samplers import BaseSampler, RandomSampler
from pydantic import Field

from studies.contract import Candidate, Problem, Study, StudySetup
from studies.samplers import PREFIX, SeededByTrial, named_sampler, tpe
from studies.space import Space, SpaceSettings

NUM_TRIED = 3
"""Trials of nothing that show whether a sampler can suggest from the space: some need a trial before they sample themselves."""


class BySamplerSettings(SpaceSettings):
    """Settings of a search by one of Optuna's samplers."""

    max_trials: int = Field(200, ge=1, description="trials at most")
    patience: int | None = Field(
        None, ge=1, description="trials without a better speed-up after which the search ends; default: none"
    )


class BySampler(Study):
    """Any draft with any rule, as Optuna suggests them. The sampler keeps all state."""

    Settings = BySamplerSettings

    @classmethod
    @abstractmethod
    def new_sampler(cls, seed: int) -> BaseSampler:
        """Return the sampler with a seed."""

    def __init__(self, problem: Problem, settings: BySamplerSettings) -> None:
        super().__init__(problem, settings)
        self.space = settings.space(problem)
        self._sampler = checked_sampler(self.name, self.new_sampler, self.space, problem.seed)

    def setup(self) -> StudySetup:
        """Return the setup: known candidates come first, then usual drafts with the defaults of the first rule."""
        known = [self.space.parameters(candidate) for candidate in self.settings.candidates]
        identity = {**self.settings.identity(), **self.space.identity()}
        return StudySetup(identity, self._sampler, [*known, *self.space.starts()])

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return the draft and the rule that Optuna suggests."""
        return self.space.suggest(trial), {}

    def proposes_beside(self, pending: Sequence[Candidate]) -> bool:
        """Return True: Optuna's samplers take running trials into account, or need no results."""
        return True

    def remarks(self) -> list[str]:
        """Return a remark if one of Optuna's samplers did not model most parameters together: many are not in every trial."""
        alone, together = self._sampler.num_alone, self._sampler.num_together
        if not self.name.startswith(PREFIX) or alone <= together:
            return []
        return [f"{self.name} sampled {alone} of {alone + together} parameters one by one: not every trial has them"]


def checked_sampler(name: str, new: Callable[[int], BaseSampler], space: Space, seed: int) -> SeededByTrial:
    """Return the sampler of a study, seeded by trial. Raises ValueError, with the reason, if it cannot suggest from the space."""
    tried = optuna.create_study(sampler=new(seed))
    try:
        for _ in range(NUM_TRIED):
            trial = tried.ask()
            space.suggest(trial)
            tried.tell(trial, 1.0)
    except Exception as cause:  # any of Optuna's samplers, each with errors of its own
        reason = str(cause).splitlines()[0]
        raise ValueError(f"study {name}: this sampler cannot search drafts and rules: {reason}") from cause
    return SeededByTrial(seed, new)


class TpeSearch(BySampler):
    """Multivariate TPE, which samples the parameters of each kind and rule together."""

    name = "tpe"

    @classmethod
    def new_sampler(cls, seed: int) -> BaseSampler:
        """Return TPE that treats the parameters of each kind and rule as one group."""
        return tpe(seed, group=True)


class RandomSearch(BySampler):
    """Random search."""

    name = "random"

    @classmethod
    def new_sampler(cls, seed: int) -> BaseSampler:
        """Return random sampling."""
        return RandomSampler(seed=seed)


def study_of(study: str) -> type[BySampler]:
    """Return the study of a sampler's name, such as `optuna:GPSampler`. Raises ValueError for a sampler that cannot be had."""
    made = named_sampler(study.removeprefix(PREFIX))
    return type(study, (BySampler,), {"name": study, "new_sampler": staticmethod(made)})
