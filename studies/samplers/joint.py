"""All kinds of drafts under one budget, by prediction (our formulation): many are rated without decoding, the best few measured.

Skip sets, exits, trained heads, quantised drafts and lookups are predicted; the best of each kind go into one pool, and
`studies.prediction.guided` chooses which to measure, with which draft-length rule. Each trial corrects the other predictions. Exits
and lookups are predicted within seconds, from one pass over the sequences, and are where a search begins. Skip sets are found by
`studies.prediction.proposals` and join the pool: a search without a time limit rates all of them before its first trial, and one
with a limit goes on rating between its trials for as long as these have taken, so that it has a result at any time. Kinds have no
shares of the budget: one that is predicted to lose, and does so when first measured, is not measured again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial
from pydantic import Field, TypeAdapter

from decoding.documents.strict_yaml import Document
from decoding.drafts import BitWidth, Draft, LayerSkip, RealDraft
from decoding.drafts.contract import label_quantised
from studies.contract import ORIGIN, Candidate, Problem, TrialRecord
from studies.costs.table import CostTable
from studies.prediction.guided import GuidedSearch
from studies.prediction.pools import (
    best_of,
    from_fewer_ids,
    lookups,
    lookups_before,
    quantised,
    useful_precisions,
)
from studies.prediction.predictor import Predictor
from studies.prediction.proposals import method_of
from studies.prediction.survey import JoinedSurvey, Survey
from studies.samplers.contract import StudySampler, enqueue_in_new, measured_now
from studies.samplers.rating import HOPELESS, Rating
from studies.space import Parameters, Space, SpaceSettings, frequent_ids

PREPARING = 0.3
"""Share of the search time after which no further draft is rated."""
POOL = "pool"
"""Attribute of the study: its first pool."""
JOINED, ORIGINS, RATED_ALL = "joined", "origins", "rated_all"
"""Notes of a trial: the drafts that joined the pool before it, their origins, and whether all skip sets had been rated."""
KNOWN = "known before"
"""Origin of a draft that was given as a candidate."""
NUM_QUANTISED = 2
"""Number of exits that are tried quantised, too: each takes a pass over the sequences of its own."""


class JointSettings(SpaceSettings):
    """Settings of the joint search."""

    survey_tokens: int = Field(256, ge=1, description="tokens of the tuning sequences that skip sets are rated on")
    pool_tokens: int = Field(
        512, ge=1, description="tokens of the tuning sequences that drafts to measure are predicted on, survey included"
    )
    num_surveyed: int | None = Field(
        None, ge=1, description="skip sets to rate, about; default: 3 per sublayer of the model, at least 160"
    )
    num_drafts: int = Field(8, ge=1, description="best unlike skip sets to measure, each with the rules that suit it")
    num_exits: int = Field(3, ge=1, description="exits in the pool with a head, and the same number without")
    num_lookups: int = Field(
        3, ge=1, description="lookups in the pool alone, and the same number before the best exits"
    )
    max_trials: int = Field(24, ge=1, description="trials at most")
    patience: int = Field(8, ge=1, description="trials without a better draft after which the search ends")

    @property
    def idle_limit(self) -> int | None:
        """None: the guided search applies `patience` to expected speed-ups, not to measured ones."""
        return None


class PoolSource:
    """Exits, quantised drafts and lookups of the kinds that are asked for; skip sets have to be searched for."""

    def __init__(self, problem: Problem, settings: JointSettings, costs: CostTable) -> None:
        self.problem = problem
        self.settings = settings
        self.costs = costs
        self.rates_skip_sets = "skip_set" in settings.kinds
        self.ends_at = math.inf
        """When the share of preparing is spent, by `time.perf_counter`."""
        self.remarks: list[str] = []
        """What `first` left out."""

    def has_time(self, seconds: float = 0.0) -> bool:
        """Return True if the share of preparing lasts for as long."""
        return time.perf_counter() + seconds < self.ends_at

    def exits(self) -> Collection[Draft]:
        """Return all exits to consider, to be surveyed in one pass."""
        return [draft for group in self.settings.exits(self.problem) for draft in group]

    def first(self, predictor: Predictor) -> list[Draft]:
        """Return the best exits of each group, quantised drafts, and the best lookups, alone and before these."""
        best = [
            each
            for group in self.settings.exits(self.problem)
            for each in predictor.best_first(group)[: self.settings.num_exits]
        ]
        has_time = self.has_time()
        if not has_time:
            self.remarks.append("the time for surveys was spent before quantised exits: a longer time tries them")
        best += predictor.best_first(self._quantised(best_of(best, NUM_QUANTISED) if has_time else [], predictor))
        pool = best_of(best, len(best))
        if "lookup" in self.settings.kinds:
            count = self.settings.num_lookups
            pool += [*lookups(predictor, count), *lookups_before(predictor, pool, count)]
        return pool

    def joining(self, draft: Draft, predictor: Predictor) -> list[Draft]:
        """Return a skip set in its precision, and after its best lookup if lookups are asked for."""
        return [draft, *(lookups_before(predictor, [draft], 1) if "lookup" in self.settings.kinds else [])]

    def _quantised(self, exits: Sequence[Draft], predictor: Predictor) -> list[Draft]:
        """Return the whole model in the precisions that are useful on this text, and `exits` in these.

        Each takes a recording of its own. With a time limit an exit must come near the whole model by its estimate: the recording
        with the model's own weights, at the costs of quantised ones.
        """
        precisions = self.precisions(predictor)
        below = frequent_ids(self.problem.target)
        whole = [
            from_fewer_ids(predictor, each, below)
            for each in quantised([LayerSkip()] if self.rates_skip_sets else [], precisions)
        ]
        least = HOPELESS * max((predictor.best(each).speedup for each in whole), default=0.0)
        if math.isinf(self.ends_at):
            least = 0.0
        near = [
            lower
            for each in exits
            for lower in quantised([each], precisions)
            if predictor.best_borrowing(lower, each).speedup >= least
        ]
        return [*whole, *near]

    def precisions(self, predictor: Predictor) -> list[BitWidth]:
        """Return the precisions that are useful on this text; a model that cannot be quantised has no costs of any."""
        wanted = self.settings.wanted_bits(self.problem.target.device)
        return useful_precisions(predictor, [bits for bits in wanted if bits in self.costs.bits])


class PoolSurveys:
    """The surveys on `survey_tokens` and on `pool_tokens` tokens of the tuning sequences, in whole batches."""

    def __init__(self, problem: Problem, survey_tokens: int, pool_tokens: int) -> None:
        self._problem = problem
        self._first = self._sequences(0, survey_tokens)
        self._more = self._sequences(self._first.stop, pool_tokens)

    def first(self, exits: Iterable[Draft]) -> Survey:
        """Return the survey of the first sequences; the states of `exits` are kept in the same pass."""
        return self._survey(self._first, exits)

    def extended(self, first: Survey, pool: Iterable[Draft]) -> Survey | JoinedSurvey:
        """Return the survey `first` joined with further sequences; the states of exits in the pool are kept in the same pass."""
        if not any(len(continuation) > 1 for continuation in self._problem.continuations[self._more]):
            return first
        return JoinedSurvey(first, self._survey(self._more, pool), self._first.stop)

    def _sequences(self, start: int, num_tokens: int) -> slice:
        """Return the sequences from `start` that reach `num_tokens` with those before: whole batches, at least one."""
        lengths = np.cumsum([len(continuation) for continuation in self._problem.continuations])
        size = self._problem.batch_size
        num_batches = -(-(int(np.searchsorted(lengths, num_tokens)) + 1) // size)
        return slice(start, min(max(start, num_batches * size), len(lengths)))

    def _survey(self, sequences: slice, exits: Iterable[Draft]) -> Survey:
        problem = self._problem
        return Survey(
            problem.target,
            problem.prompts[sequences],
            problem.continuations[sequences],
            decoding=problem.decoding,
            seed=problem.seed + sequences.start,
            heads=problem.heads,
            exits=exits,
            own_keys=problem.own_keys,
            known=problem.known,
        )


class KeptPool(Document):
    """The first pool of a study, stored with it: costs measured again would lead to another pool."""

    pool: tuple[RealDraft, ...]
    origins: tuple[str, ...]
    """Origin of each draft."""
    rated_all: bool
    """True if all skip sets had been rated before the first trial."""
    costs: CostTable


class Joint(StudySampler):
    """A pool of every kind of draft, and a guided search over it."""

    name = "joint"
    Settings = JointSettings
    space: Space

    def __init__(self, problem: Problem, settings: JointSettings) -> None:
        super().__init__(problem, settings)
        self.space = settings.space(problem)
        self._known = [self.space.parameters(candidate) for candidate in settings.candidates]
        self._num_trials, self._measured_seconds = 0, 0.0
        self._rated_for: int | None = None
        self._joined: list[Draft] = []
        self._origins: dict[Draft, str] = {}

    def begin(self, study: optuna.Study) -> None:
        """Rate drafts until there is something to measure, or continue from the pool in the study's attributes.

        Raises ValueError if the problem does not give costs.
        """
        problem, settings = self.problem, self.settings
        stored = study.user_attrs.get(POOL)
        kept = None if stored is None else KeptPool.model_validate(stored)
        if kept is not None:
            self._costs = kept.costs
        elif problem.costs is not None:
            self._costs = problem.costs(settings.max_tokens)
        else:
            raise ValueError(f"the study {self.name} needs the costs of model passes")
        self._source = PoolSource(problem, settings, self._costs)
        surveys = PoolSurveys(problem, settings.survey_tokens, settings.pool_tokens)
        begun = time.perf_counter()
        survey = surveys.first(self._source.exits())
        surveying = time.perf_counter() - begun
        self._source.ends_at = math.inf if problem.seconds is None else begun + PREPARING * problem.seconds
        self._predictor = self._new_predictor(survey)
        """Predicts on the survey alone: for rating. The guided search has a predictor on more sequences."""
        known = list(dict.fromkeys(candidate.draft for candidate in settings.candidates))
        pool: Sequence[Draft] = (
            kept.pool if kept else list(dict.fromkeys([*known, *self._source.first(self._predictor)]))
        )
        # A longer survey makes predictions better; a trial in its time makes a result.
        of_pool = self._new_predictor(surveys.extended(survey, pool) if self._source.has_time(surveying) else survey)
        self._search = GuidedSearch(pool, of_pool, settings.rules, seed=problem.seed, patience=settings.patience)
        self._rating = Rating(
            problem.target,
            self._predictor,
            whole_blocks=settings.whole_blocks,
            num_surveyed=settings.num_surveyed,
            is_over=not self._source.rates_skip_sets or (kept is not None and kept.rated_all),
            precisions=partial(self._source.precisions, self._predictor),
        )
        found = kept.origins if kept else [KNOWN if draft in known else origin_of(draft, None) for draft in pool]
        self._note_origins(pool, found)
        if kept is None:
            study.set_user_attr(POOL, self._first_pool().model_dump(mode="json"))
        enqueue_in_new(study, self._known)

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> Parameters:
        """Return the candidate with the highest upper bound, unlike those that other trials measure."""
        self._rate_before_trial()
        self._propose_beside(study, trial.number)
        return self.space.parameters(self._search.chosen())

    def notes(self, candidate: Candidate) -> dict[str, Any]:
        """Return the prediction of the candidate, and the drafts that joined the pool before this trial."""
        self._rate_before_trial()
        joined = {JOINED: _dumped(self._joined), ORIGINS: [self._origins[draft] for draft in self._joined]}
        origin = self._origins.get(candidate.draft, KNOWN)
        return {ORIGIN: origin, **self._search.notes(candidate), **joined, RATED_ALL: self._rating.is_over}

    def observe(self, record: TrialRecord) -> None:
        """Correct the predictions."""
        joined = _DRAFTS.validate_python(record.notes[JOINED])
        self._note_origins(joined, record.notes[ORIGINS])
        self._search.add(joined)
        self._rating.is_over |= record.notes[RATED_ALL]
        self._joined = [draft for draft in self._joined if draft not in joined]
        self._num_trials += 1
        if record.measurement is not None and record.repeat_of is None:
            samples = record.measurement.samples
            self._measured_seconds += sum(sample.plain_seconds + sample.draft_seconds for sample in samples)
        self._search.observe(record)

    def finished(self, study: optuna.Study) -> str | None:
        """Return a reason if there is no draft to search, or the guided search's reason once nothing is left to rate."""
        super().finished(study)
        self._rate_before_trial()
        self._propose_beside(study, None)
        ended = self._search.finished()
        if ended is not None and self._rate(math.inf):
            ended = self._search.finished()
        if not self._search.pool:
            return "there is no draft to search: no exit head was found, and no other kind is asked for"
        return ended

    def expected(self) -> dict[str, float]:
        """Return the guided search's expectations: trials decode few prompts, and flatter the best on them."""
        return self._search.expected()

    def remarks(self) -> list[str]:
        """Return what every method promised, the accuracy of the predictions, and what more trials might gain."""
        if not self._search.pool:
            return self._rating.proposals.remarks
        return [
            *self._source.remarks,
            *self._rating.proposals.remarks,
            self._best_predictions(),
            *self._search.remarks(),
        ]

    def _propose_beside(self, study: optuna.Study, before: int | None) -> None:
        """Take into account what trials below the number `before` measure now."""
        self._search.propose_beside(each for each in measured_now(study, before) if each is not None)

    def _best_predictions(self) -> str:
        """Return the best prediction of each method: where none promises a gain, the reader sees that all were tried."""
        best = self._rating.best_by_method()
        for draft in self._search.pool:
            method, speedup = method_of(self._origins[draft]), self._predictor.best(draft).speedup
            best[method] = max(speedup, best.get(method, 0.0))
        listed = sorted(best.items(), key=lambda each: -each[1])
        return f"best predictions: {', '.join(f'{method} {speedup:.2f}x' for method, speedup in listed)}"

    def _first_pool(self) -> KeptPool:
        """Return the pool before the first trial, after rating."""
        self._rate_before_trial()
        self._joined.clear()
        pool = tuple(self._search.pool)
        origins = tuple(self._origins[draft] for draft in pool)
        return KeptPool(pool=pool, origins=origins, rated_all=self._rating.is_over, costs=self._costs)

    def _rate_before_trial(self) -> None:
        """Rate skip sets once per trial, for as long as trials have measured; without a time limit, to the end."""
        if self._rated_for != self._num_trials:
            self._rated_for = self._num_trials
            self._rate(math.inf if self.problem.seconds is None else self._measured_seconds)

    def _rate(self, seconds: float) -> bool:
        """Rate skip sets until rating has taken `seconds` in all, and add the best to the pool. Return True if any was rated."""
        if self.problem.seconds is not None:
            seconds = min(seconds, PREPARING * self.problem.seconds)
        any_rated = self._rating.rate(seconds, self._search.pool)
        if any_rated and self._rating.is_under_way:
            for draft in self._rating.worth_measuring(self._search.pool, self.settings.num_drafts):
                joined = self._search.add(self._source.joining(draft, self._predictor))
                self._note_origins(joined, [origin_of(each, self._rating.proposals.origin(draft)) for each in joined])
                self._joined += joined
        return any_rated

    def _note_origins(self, drafts: Sequence[Draft], origins: Sequence[str]) -> None:
        self._origins |= zip(drafts, origins, strict=True)

    def _new_predictor(self, survey: Survey | JoinedSurvey) -> Predictor:
        return Predictor(
            survey,
            self._costs,
            max_tokens=self.settings.max_tokens,
            decoding=self.problem.decoding,
            batch_size=self.problem.batch_size,
            accepts=self.problem.accepts,
        )


_DRAFTS: TypeAdapter[list[Any]] = TypeAdapter(list[Draft])


def _dumped(drafts: Iterable[Draft]) -> Any:
    return _DRAFTS.dump_python(list(drafts), mode="json")


def origin_of(draft: Draft, proposed: str | None) -> str:
    """Return the origin of a draft in a pool: `proposed` for a skip set that was searched for, else the draft's kind.

    A quantised draft is called so: `quantised growing`, `quantised exit`.
    """
    known = label_quantised(draft.parts.bits, proposed) if proposed else draft.label
    return f"lookup before {known}" if draft.parts.lookup is not None else known
