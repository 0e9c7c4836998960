"""What a search and its studies share: candidates, records of their trials, the problem of a study and the settings of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import Field

from decoding.cache.known_prompt import KnownPrompt
from decoding.documents.strict_yaml import Document
from decoding.draft_length import AnyRule, DraftLengthRule, Fixed
from decoding.drafts import BitWidth, Draft, DraftDocument, EarlyExit, PlainDecoding
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.target import Target
from studies.measurement import Measurement, pooled

if TYPE_CHECKING:
    import torch

    from studies.costs.table import CostTable


ORIGIN = "origin"
"""Note of a trial: the method that proposed its draft, in a study with several."""


class Candidate(Document):
    """A draft and its draft-length rule, to be measured."""

    draft: Draft
    draft_length: AnyRule

    @classmethod
    def plain(cls) -> Candidate:
        """Return plain decoding as a candidate."""
        return cls(draft=PlainDecoding(), draft_length=Fixed())

    @property
    def key(self) -> str:
        """Canonical form: equal candidates have equal keys."""
        return self.model_dump_json()

    def describe(self, *, parameters: bool = False) -> str:
        """Return draft and draft-length rule in words, with the `parameters` of the rule if asked for."""
        if not self.draft.drafts:
            return self.draft.describe()
        tuned = self.draft_length.parameters() if parameters else ""
        return f"{self.draft.describe()}; {self.draft_length.describe()}{f' ({tuned})' if tuned else ''}"

    def with_rule(self, rule: DraftLengthRule) -> Candidate:
        """Return the same draft with another rule."""
        return self.model_copy(update={"draft_length": rule})


class TrialState(StrEnum):
    """How a trial ended."""

    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAIL = "FAIL"


class TrialRecord(Document):
    """One finished trial of a study, as stored and tracked."""

    study: str
    number: int
    state: TrialState
    candidate: Candidate
    measurement: Measurement | None = None
    repeat_of: int | None = None
    """Number of the earlier trial of the same candidate whose measurement this trial took over."""
    reason: str | None = None
    """Reason that the trial was pruned or failed."""
    seconds: float = 0.0
    """Search time of this trial: learning from the previous trial, proposing and measuring."""
    notes: dict[str, Any] = Field(default_factory=dict)
    """Plain data of the study, available again on resume, and facts that a reviewer may sort by."""

    @property
    def origin(self) -> str:
        """The method that proposed the draft: as the study noted it, else the study itself."""
        return str(self.notes.get(ORIGIN, self.study))

    @property
    def speedup(self) -> float | None:
        """Measured speed-up of a complete trial, else None."""
        return self.measurement.speedup if self.state is TrialState.COMPLETE and self.measurement else None

    def describe(self) -> str:
        """Return the trial in a line: what was measured, or why not, and its candidate with its parameters."""
        found = f"{self.speedup:.2f}x" if self.speedup else self.state.lower()
        again = f" (repeats trial {self.repeat_of})" if self.repeat_of is not None else ""
        reason = f": {self.reason}" if self.state is TrialState.FAIL else ""
        return f"{self.study}/{self.number}: {found}{again}  {self.candidate.describe(parameters=True)}{reason}"


@dataclass(frozen=True)
class Problem:
    """What a study may know of the task: the model, and plain decoding of the tuning prompts."""

    target: Target
    prompts: tuple[tuple[int, ...], ...]
    continuations: tuple[tuple[int, ...], ...]
    """The target's greedy continuation of each prompt, in token ids, at any temperature."""
    earlier: Mapping[str, Sequence[TrialRecord]]
    """Finished trials of the studies that ran before, by study name; empty unless `StudySettings.reads_earlier`."""
    seed: int
    known: Mapping[tuple[int, ...], KnownPrompt] = field(default_factory=dict)
    """What the target knows of prompts, so that they need not be read again."""
    own_keys: bool = False
    """True if drafts are to run as copies of the model, with keys and values of their own: predictions read these."""
    batch_size: int = 1
    """Consecutive prompts that are decoded in lockstep. Trials measure such batches, numbered from 0."""
    decoding: Decoding = Decoding()
    """How candidates and plain decoding are decoded: temperature, runner, prefix reuse, bit-exact width."""
    head_drafts: Mapping[int, EarlyExit] = field(default_factory=dict)
    """Early exits that have a head, by exit layer."""
    heads: HeadFolder | None = None
    """The heads of `head_drafts`."""
    costs: Callable[[int], CostTable] | None = None
    """Pass costs on this device, for drafts of at most the given number of tokens; measured on the first call."""
    seconds: float | None = None
    """Search time of this study, preparation included; None if unlimited."""
    accepts: Callable[[DraftDocument], bool] = lambda draft: True
    """Whether a draft may be proposed: an engine that the search deploys to cannot run all."""


class StudySettings(Document):
    """Settings that every study has, and what they ask of the model."""

    max_trials: int = Field(40, ge=1, description="trials at most")
    patience: int | None = Field(15, ge=1, description="trials without a better speed-up after which the search ends")

    @property
    def idle_limit(self) -> int | None:
        """Trials without a better measured speed-up that end the study; None if the study judges progress itself."""
        return self.patience

    def identity(self) -> dict[str, Any]:
        """Return what makes two runs the same search: all settings but limits, so that a search can go on longer."""
        return self.model_dump(mode="json", exclude={"max_trials", "patience"})

    def check(self, target: Target) -> None:
        """Raise ValueError for settings that the model cannot satisfy. Called before anything runs."""

    def for_engine(self, rules: Sequence[str], *, quantises: bool, whole_blocks: bool) -> dict[str, Any]:
        """Return the settings to change for a search that deploys to an engine, which runs chains by these `rules`.

        `quantises` tells that it quantises drafts, `whole_blocks` that it skips no sublayers alone. Raises ValueError for settings
        that the user gave and the engine cannot run.
        """
        return {}

    def wanted_heads(self, num_layers: int) -> tuple[int, ...]:
        """Return the exit layers that need a distilled head, in a model of `num_layers`."""
        return ()

    @property
    def reads_earlier(self) -> bool:
        """True if the study reads `Problem.earlier`, which is empty otherwise.

        It then begins when the studies before it have ended. Others may run beside each other on several devices.
        """
        return False

    def wanted_bits(self, device: torch.device) -> tuple[BitWidth, ...]:
        """Return the precisions of the quantised drafts that the study proposes for a model on `device`."""
        return ()


def best_trials(
    records: Iterable[TrialRecord],
    count: int,
    *,
    expected: Mapping[str, float] = MappingProxyType({}),
    same: Callable[[Candidate], str] = lambda candidate: candidate.key,
) -> list[TrialRecord]:
    """Return the `count` best complete trials, by the speed-up `expected` for the candidate's key, else by the measured one.

    Of trials with the same value of `same`, only the best is returned. Trials of one candidate by several studies are pooled:
    the first of them is returned, with the samples of all.
    """
    by_candidate: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.state is TrialState.COMPLETE and record.measurement and record.repeat_of is None:
            by_candidate.setdefault(record.candidate.key, []).append(record)
    best: dict[str, TrialRecord] = {}
    for record in sorted(
        map(_pooled_trial, by_candidate.values()), key=lambda r: -expected.get(r.candidate.key, r.speedup or 0.0)
    ):
        best.setdefault(same(record.candidate), record)
    return list(best.values())[:count]


def _pooled_trial(trials: Sequence[TrialRecord]) -> TrialRecord:
    """Return the first of the trials of one candidate, with the samples of all."""
    if len(trials) == 1:
        return trials[0]
    measurement = pooled([trial.measurement for trial in trials if trial.measurement is not None])
    return trials[0].model_copy(update={"measurement": measurement})
