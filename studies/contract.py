"""The contract between a study and the search that runs it, and the records that pass between them.

A study says what to try next. It never measures, stores or prints: `tuner.search.run` asks it for a candidate, measures that
by real decoding, stores the record and tells the study. On resume the stored records are told again, in order, so a study
that keeps its state in `observe` alone continues where it stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import optuna
from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.draft_length import AnyRule, DraftLengthRule
from decoding.drafts import Draft, EarlyExit
from decoding.exit_heads import ExitHeads
from decoding.target import Target
from studies.measurement import Measurement, pooled

if TYPE_CHECKING:
    from studies.costs.table import CostTable


class Candidate(Document):
    """One setting to measure: a draft and the rule that says when to stop drafting."""

    draft: Draft
    draft_length: AnyRule

    @property
    def key(self) -> str:
        """The canonical form: equal candidates have equal keys."""
        return self.model_dump_json()

    def with_rule(self, rule: DraftLengthRule) -> Candidate:
        """The same draft with another rule."""
        return self.model_copy(update={"draft_length": rule})


class TrialState(StrEnum):
    """How a trial ended."""

    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAIL = "FAIL"


class TrialRecord(Document):
    """One finished trial of a study, as stored, tracked and told."""

    study: str
    number: int
    state: TrialState
    candidate: Candidate
    measurement: Measurement | None = None
    repeat_of: int | None = None
    """The earlier trial whose measurement this one took over, the candidate being the same."""
    reason: str | None = None
    """Why it was pruned or failed."""
    seconds: float = 0.0
    """Of learning from the trial before, proposing and measuring: what the search spent on this one."""
    notes: dict[str, Any] = Field(default_factory=dict)
    """What the study wants to remember of it (told back on resume), and what a reviewer may want to sort by."""

    @property
    def speedup(self) -> float | None:
        """The measured speed-up of a complete trial, else None."""
        return self.measurement.speedup if self.state is TrialState.COMPLETE and self.measurement else None


@dataclass(frozen=True)
class Problem:
    """What a study may know of the task: the model, and the texts that plain decoding wrote from the tuning prompts."""

    target: Target
    prompts: tuple[tuple[int, ...], ...]
    continuations: tuple[tuple[int, ...], ...]
    """The target's own greedy continuation of each prompt, in token ids, whatever the temperature."""
    earlier: Mapping[str, Sequence[TrialRecord]]
    """The finished trials of the studies that ran before this one, by study name."""
    seed: int
    batch_size: int = 1
    """How many texts, one behind the other, are decoded in step: what trials measure on are such batches, counted from 0."""
    temperature: float = 0.0
    prefix_reuse: bool = True
    head_drafts: Mapping[int, EarlyExit] = field(default_factory=dict)
    """The early exits that have a head, by exit layer."""
    heads: ExitHeads | None = None
    """Where those heads are."""
    costs: Callable[[int], CostTable] | None = None
    """Gives what passes of the model cost on this device, for drafts of up to so many tokens: measured when first asked."""
    seconds: float | None = None
    """Search time that this study may use, its preparation included; None if it is not limited."""
    kept: Any = None
    """What this study gave to `keep` when it was first made, or None if it has just been made."""


class Study(ABC):
    """One search. Its settings are a frozen document, so that a stored study is resumed only with the same ones."""

    name: ClassVar[str]
    Settings: ClassVar[type[Document]]

    @classmethod
    @abstractmethod
    def create(cls, problem: Problem, settings: Any) -> Study:
        """The study at its beginning; `settings` is an instance of `Settings`."""

    @abstractmethod
    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """The next candidate and the notes to keep with it; parameters go through `trial.suggest_*` so Optuna knows them."""

    @abstractmethod
    def observe(self, record: TrialRecord) -> None:
        """Learn how a trial ended. Also called for each stored trial on resume, oldest first."""

    @abstractmethod
    def finished(self) -> str | None:
        """Why there is nothing more to try, or None while there is."""

    def starts(self) -> list[dict[str, Any]]:
        """Parameter values to try before the sampler's own, for a study that has just been made."""
        return []

    @classmethod  # noqa: B027 - most settings fit every model
    def check(cls, settings: Any, target: Target) -> None:
        """Called before anything is run: raise ValueError for settings that ask for what the model does not have."""

    @classmethod
    def wanted_heads(cls, settings: Any, num_layers: int) -> tuple[int, ...]:
        """The exit layers that this study wants a distilled head for, in a model of `num_layers`."""
        return ()

    def keep(self) -> Any:
        """Plain data to store when the study is first made, and to find in `Problem.kept` on resume: what could not be
        computed again to the same result."""
        return None

    def expected(self) -> Mapping[str, float]:
        """By a candidate's key, the speed-up to expect of it, from a study that knows better than what a trial's few prompts
        showed; none from others, whose measurements stand."""
        return {}

    def remarks(self) -> list[str]:
        """What a user should know of where the best trial lies, once the study has ended."""
        return []

    def sampler(self) -> optuna.samplers.BaseSampler:
        """Optuna's sampler for the parameters that `propose` suggests."""
        return optuna.samplers.RandomSampler()

    def space(self) -> dict[str, Any]:
        """What makes two runs of this study the same search: stored with it and compared on resume."""
        return {}


def best_trials(
    records: Iterable[TrialRecord],
    count: int,
    *,
    expected: Mapping[str, float] = MappingProxyType({}),
    same: Callable[[Candidate], str] = lambda candidate: candidate.key,
) -> list[TrialRecord]:
    """The `count` best complete trials by the speed-up `expected` of a candidate's key, or measured where none is; those with the
    same value of `same` once. Trials of one candidate, by several studies, pool what they measured and stand as the first."""
    of_candidates: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.state is TrialState.COMPLETE and record.measurement and record.repeat_of is None:
            of_candidates.setdefault(record.candidate.key, []).append(record)
    best: dict[str, TrialRecord] = {}
    for record in sorted(
        map(_together, of_candidates.values()), key=lambda r: -expected.get(r.candidate.key, r.speedup or 0.0)
    ):
        best.setdefault(same(record.candidate), record)
    return list(best.values())[:count]


def _together(trials: Sequence[TrialRecord]) -> TrialRecord:
    """The first of the trials of one candidate, with the samples of all."""
    if len(trials) == 1:
        return trials[0]
    measurement = pooled([trial.measurement for trial in trials if trial.measurement is not None])
    return trials[0].model_copy(update={"measurement": measurement})
