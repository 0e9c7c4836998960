"""Skip sets by prediction (our formulation): hundreds are rated without decoding, and the best few are measured.

`studies.prediction.proposals` finds the sets by moves over single sublayers, rated on a few sequences. The best of them are
predicted again on more sequences, and `studies.prediction.guided` chooses which to measure, with which draft-length rule; each
trial corrects the other predictions. Trials are expensive, so a search without a time limit rates all sets before its first
trial. One with a limit measures the most promising draft as soon as there is one, and goes on rating between its trials for
as long as these have taken, so that it has a result at any time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import optuna
from pydantic import Field, TypeAdapter

from decoding.documents.strict_yaml import Document
from decoding.drafts import BitWidth, Draft, RealDraft
from studies.contract import ORIGIN, Candidate, Problem, Study, StudySettings, StudySetup, TrialRecord
from studies.costs.table import CostTable
from studies.draft_space import draft_choices
from studies.prediction.guided import GuidedSearch
from studies.prediction.origins import method_of, origin_of
from studies.prediction.predictor import Predictor
from studies.prediction.survey import JoinedSurvey, Survey
from studies.rule_space import DEFAULT_RULES, RuleNames, rules_within
from studies.searches.pool_surveys import PoolSurveys
from studies.searches.rating import Rating

PREPARING = 0.3
"""Share of the search time after which no further draft is rated."""
JOINED, ORIGINS, RATED_ALL = "joined", "origins", "rated_all"
"""Notes of a trial: the drafts that joined the pool before it, their origins, and whether all skip sets had been rated."""


class PredictedSettings(StudySettings):
    """Settings of a search by prediction."""

    rules: RuleNames = Field(DEFAULT_RULES, description="draft-length rules to choose among")
    max_tokens: int = Field(12, ge=1, le=64, description="longest draft to consider (K)")
    survey_tokens: int = Field(256, ge=1, description="tokens of the tuning sequences that skip sets are rated on")
    pool_tokens: int = Field(
        512, ge=1, description="tokens of the tuning sequences that drafts to measure are predicted on, survey included"
    )
    num_surveyed: int | None = Field(
        None, ge=1, description="skip sets to rate, about; default: 3 per sublayer of the model, at least 160"
    )
    whole_blocks: bool = Field(False, description="skip whole blocks only, not attention and MLP apart")
    num_drafts: int = Field(8, ge=1, description="best unlike skip sets to measure, each with the rules that suit it")
    max_trials: int = Field(24, ge=1, description="trials at most")
    patience: int = Field(8, ge=1, description="trials without a better draft after which the search ends")

    def for_engine(self, rules: Sequence[str], *, quantises: bool) -> dict[str, Any]:
        """Return the rules that the engine runs, and skips of whole blocks."""
        return {"rules": rules_within(self, rules), "whole_blocks": True}

    @property
    def idle_limit(self) -> int | None:
        """None: the guided search applies `patience` to expected speed-ups, not to measured ones."""
        return None


class PoolSource:
    """Drafts of the pool, besides those of the rating: none here, as skip sets have to be searched for."""

    rates_skip_sets = True

    def __init__(self, problem: Problem, settings: Any, costs: CostTable) -> None:
        self.problem = problem
        self.settings = settings
        self.costs = costs
        self.ends_at = math.inf
        """When the share of preparing is spent, by `time.perf_counter`."""
        self.remarks: list[str] = []
        """What `first` left out."""

    def has_time(self, seconds: float = 0.0) -> bool:
        """Return True if the share of preparing lasts for as long."""
        return time.perf_counter() + seconds < self.ends_at

    def exits(self) -> Collection[Draft]:
        """Return the exits that `first` rates, to be surveyed in one pass."""
        return ()

    def first(self, predictor: Predictor) -> list[Draft]:
        """Return the drafts that are predicted within seconds, the best first."""
        return []

    def precisions(self, predictor: Predictor) -> Sequence[BitWidth]:
        """Return the precisions, beside the model's own, that skip sets are rated in."""
        return ()

    def joining(self, draft: Draft, predictor: Predictor) -> list[Draft]:
        """Return a skip set that joins the pool, and the drafts that join with it."""
        return [draft]


class KeptPool(Document):
    """The first pool of a study, stored with it: costs measured again would lead to another pool."""

    pool: tuple[RealDraft, ...]
    origins: tuple[str, ...]
    """Origin of each draft."""
    rated_all: bool
    """True if all skip sets had been rated before the first trial."""
    costs: CostTable


class Predicted(Study):
    """A pool of skip sets, and a guided search over it."""

    name = "predicted"
    Settings = PredictedSettings
    Source: ClassVar[type[PoolSource]] = PoolSource

    def __init__(self, problem: Problem, settings: Any, costs: CostTable, kept: KeptPool | None = None) -> None:
        super().__init__(problem, settings)
        self._costs = costs
        self._source = self.Source(problem, settings, costs)
        surveys = PoolSurveys(problem, settings.survey_tokens, settings.pool_tokens)
        begun = time.perf_counter()
        survey = surveys.first(self._source.exits())
        surveying = time.perf_counter() - begun
        self._source.ends_at = math.inf if problem.seconds is None else begun + PREPARING * problem.seconds
        self._predictor = self._new_predictor(survey)
        """Predicts on the survey alone: for rating. The guided search has a predictor on more sequences."""
        pool: Sequence[Draft] = self._source.first(self._predictor) if kept is None else kept.pool
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
        self._num_trials, self._measured_seconds = 0, 0.0
        self._rated_for: int | None = None
        self._joined: list[Draft] = []
        self._origins: dict[Draft, str] = {}
        self._note_origins(pool, [origin_of(draft, None) for draft in pool] if kept is None else kept.origins)
        self._kept = kept or self._first_pool()

    @classmethod
    def create(cls, problem: Problem, settings: Any, kept: Any = None) -> Predicted:
        """Rate drafts until there is something to measure, or continue from `kept`.

        Raises ValueError if the problem does not give costs.
        """
        if kept is not None:
            stored = KeptPool.model_validate(kept)
            return cls(problem, settings, stored.costs, stored)
        if problem.costs is None:
            raise ValueError(f"the study {cls.name} needs the costs of model passes")
        return cls(problem, settings, problem.costs(settings.max_tokens))

    def setup(self) -> StudySetup:
        """Return the setup; the sampler gives every parameter the value that the guided search chose."""
        kept = self._kept.model_dump(mode="json")
        space = {**self.settings.identity(), "draft_parameters": draft_choices()}
        return StudySetup(space, self._search.sampler(), kept=kept)

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return the candidate with the highest upper bound; the notes hold its prediction."""
        self._rate_before_trial()
        candidate, notes = self._search.propose(trial)
        joined = {JOINED: _dumped(self._joined), ORIGINS: [self._origins[draft] for draft in self._joined]}
        origin = self._origins[candidate.draft]
        return candidate, {ORIGIN: origin, **notes, **joined, RATED_ALL: self._rating.is_over}

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

    def proposes_beside(self, pending: Sequence[Candidate]) -> bool:
        """Return True: the guided search chooses candidates unlike those that are measured now."""
        self._search.propose_beside(pending)
        return True

    def finished(self) -> str | None:
        """Return a reason if there is no draft to search, or the guided search's reason once nothing is left to rate."""
        self._rate_before_trial()
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
            return self._rating.remarks
        return [*self._source.remarks, *self._rating.remarks, self._best_predictions(), *self._search.remarks()]

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
                self._note_origins(joined, [origin_of(each, self._rating.origin(draft)) for each in joined])
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
