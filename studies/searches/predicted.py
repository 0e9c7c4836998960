"""Skip sets by prediction (our formulation): hundreds are rated without decoding, the best few measured, each corrects the rest.

`studies.prediction.proposals` finds the sets by moves over single sublayers, rated on a few texts; the best of them
are foretold again on
more, and `studies.prediction.guided` says which to measure with which draft-length rule. A search without a time
limit rates all it wants
to before its first trial, as trials are what is dear. One with a limit measures what promises most as soon as anything does, and
goes on rating between its trials for as long as these have taken, so that it has something to show at any time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import optuna
from pydantic import Field, TypeAdapter

from decoding.documents.strict_yaml import Document
from decoding.draft_length import RULES
from decoding.drafts import Draft, EarlyExit
from decoding.target import Target
from studies.contract import Candidate, Problem, Study, TrialRecord
from studies.costs.table import CostTable
from studies.prediction.guided import GuidedSearch
from studies.prediction.pools import is_same, unlike
from studies.prediction.predictor import Drafting, Prediction, Predictor
from studies.prediction.proposals import Proposals
from studies.prediction.skip_space import SkipSpace
from studies.prediction.survey import JoinedSurvey, Survey
from studies.rule_space import RuleNames

FEWEST_SURVEYED, SURVEYED_PER_ITEM = 160, 3
PREPARING = 0.3
"""Share of the search time after which no further draft is rated."""
NEAR_THE_BEST, HOPELESS = 0.85, 0.75
"""Of the best speed-up foretold so far, what a set must be rated at to be foretold on more texts; and what the best set must come
to for more sets to be rated, once the search for them is under way: moves win some per cent, not a third."""
JOINED, RATED_ALL = "joined", "rated_all"
"""Notes of a trial: the drafts that joined the pool before it, and whether all skip sets were rated by then."""


class PredictedSettings(Document):
    """The settings of a search by prediction."""

    rules: RuleNames = Field(tuple(RULES), description="draft-length rules to choose among")
    max_tokens: int = Field(12, ge=1, le=64, description="longest draft to consider (K)")
    survey_tokens: int = Field(256, ge=1, description="tokens of the tuning texts that skip sets are rated on")
    pool_tokens: int = Field(
        512,
        ge=1,
        description="tokens of the tuning texts that what is measured is foretold on, with those of the survey",
    )
    num_surveyed: int | None = Field(
        None, ge=1, description="skip sets to rate, about; default: 3 for each sublayer of the model, at least 160"
    )
    whole_blocks: bool = Field(False, description="leave out whole blocks only, not attention and MLP apart")
    num_drafts: int = Field(8, ge=1, description="best unlike skip sets to measure, each with the rules that suit it")
    max_trials: int = Field(24, ge=1, description="trials at most")
    patience: int = Field(8, ge=1, description="trials without a better draft after which the search ends")


class Predicted(Study):
    """A pool of skip sets, and a guided search over it."""

    name: ClassVar[str] = "predicted"
    Settings: ClassVar[type[Document]] = PredictedSettings

    def __init__(self, problem: Problem, settings: Any, costs: CostTable, kept: Mapping[str, Any] | None) -> None:
        self._problem, self._settings, self._costs = problem, settings, costs
        survey = _survey(problem, self._texts(0, settings.survey_tokens), self._exits_rated())
        self._predictor = self._new_predictor(survey)
        """Of all that is rated; what comes into the pool is foretold on more texts."""
        self._num_trials, self._measured_seconds = 0, 0.0
        self._rating, self._rated_seconds = _Rating(problem.target, settings, self._predictor), 0.0
        self._rating.is_over = not self._rates_skip_sets or (kept is not None and kept[RATED_ALL])
        self._thought_of: int | None = None
        self._joined: list[Drafting] = []
        pool = self._first_drafts() if kept is None else _POOL.validate_python(kept["pool"])
        of_pool = self._new_predictor(self._with_more_texts(survey, pool))
        self._search = GuidedSearch(pool, of_pool, settings.rules, seed=problem.seed, patience=settings.patience)
        if kept is None:
            self._think()
        self._first_pool, self._first_rated_all = list(self._search.pool), self._rating.is_over
        self._joined.clear()

    @classmethod
    def create(cls, problem: Problem, settings: Any) -> Predicted:
        """Rate drafts until there is something to measure, or take up what was kept. ValueError if costs cannot be measured."""
        if problem.kept is not None:
            return cls(problem, settings, CostTable.model_validate(problem.kept["costs"]), problem.kept)
        if problem.costs is None:
            raise ValueError(f"the study {cls.name} needs to know what passes of the model cost")
        return cls(problem, settings, problem.costs(settings.max_tokens), None)

    def keep(self) -> Any:
        """The first pool and the costs: another measurement of these would rate the drafts otherwise."""
        return {
            "pool": _dumped(self._first_pool),
            RATED_ALL: self._first_rated_all,
            "costs": self._costs.model_dump(mode="json"),
        }

    def sampler(self) -> optuna.samplers.BaseSampler:
        """Every parameter as the guided search chose it."""
        return self._search.sampler()

    def space(self) -> dict[str, Any]:
        """The settings; another limit or patience is the same search, going on longer."""
        return dict(self._settings.model_dump(mode="json", exclude={"max_trials", "patience"}))

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """The candidate of the highest upper bound, with what is foretold of it."""
        self._think()
        candidate, notes = self._search.propose(trial)
        return candidate, {**notes, JOINED: _dumped(self._joined), RATED_ALL: self._rating.is_over}

    def observe(self, record: TrialRecord) -> None:
        """Correct the predictions."""
        self._search.add(_POOL.validate_python(record.notes[JOINED]))
        self._rating.is_over |= record.notes[RATED_ALL]
        self._joined.clear()
        self._num_trials += 1
        if record.measurement is not None and record.repeat_of is None:
            samples = record.measurement.samples
            self._measured_seconds += sum(sample.plain_seconds + sample.draft_seconds for sample in samples)
        self._search.observe(record)

    def finished(self) -> str | None:
        """No draft to search, the trial limit, or what the guided search says when nothing is left to rate."""
        if self._num_trials >= self._settings.max_trials:
            return f"{self._num_trials} trials done"
        self._think()
        ended = self._search.finished()
        if ended is not None and self._rate(math.inf):
            ended = self._search.finished()
        if not self._search.pool:
            return "there is no draft to search: no exit head was found, and no other kind is asked for"
        return ended

    def expected(self) -> dict[str, float]:
        """By what the guided search expects: trials decode few prompts, and flatter whatever does best on them."""
        return self._search.expected()

    def remarks(self) -> list[str]:
        """How good the predictions were, and what more trials might gain."""
        return self._search.remarks() if self._search.pool else []

    @property
    def _rates_skip_sets(self) -> bool:
        return True

    def _exits_rated(self) -> Collection[int]:
        """The exits that `_first_drafts` will rate."""
        return ()

    def _first_drafts(self) -> list[Drafting]:
        """What can be foretold at once, the best first: nothing, as skip sets have to be looked for."""
        return []

    def _with_company(self, draft: Drafting) -> list[Drafting]:
        """A skip set that joins the pool, and what joins with it."""
        return [draft]

    def _texts(self, start: int, num_tokens: int) -> slice:
        """The tuning texts from `start` on that hold `num_tokens` together with those in front: whole batches, one at least."""
        lengths, size = np.cumsum([len(text) for text in self._problem.continuations]), self._problem.batch_size
        num_batches = -(-(int(np.searchsorted(lengths, num_tokens)) + 1) // size)
        return slice(start, min(max(start, num_batches * size), len(lengths)))

    def _with_more_texts(self, survey: Survey, pool: Iterable[Drafting]) -> Survey | JoinedSurvey:
        """The survey with as many texts more as the pool is to be foretold on; the exits in the pool are known at once."""
        num_given = self._texts(0, self._settings.survey_tokens).stop
        more = self._texts(num_given, self._settings.pool_tokens)
        if not any(len(continuation) > 1 for continuation in self._problem.continuations[more]):
            return survey
        exits = [draft.exit_layer for draft in pool if isinstance(draft, EarlyExit)]
        return JoinedSurvey(survey, _survey(self._problem, more, exits), num_given)

    def _new_predictor(self, survey: Survey | JoinedSurvey) -> Predictor:
        settings = self._settings
        return Predictor(
            survey,
            self._costs,
            max_tokens=settings.max_tokens,
            prefix_reuse=self._problem.prefix_reuse,
            batch_size=self._problem.batch_size,
        )

    def _think(self) -> None:
        """Once before each trial, rate skip sets for as long as has been measured; without a time limit, to the end."""
        if self._thought_of != self._num_trials:
            self._thought_of = self._num_trials
            self._rate(math.inf if self._problem.seconds is None else self._measured_seconds)

    def _rate(self, seconds: float) -> bool:
        """Rate skip sets until that has taken so long in all, or its share of the search time; whether any was rated.

        A pool that is empty must have something first, whatever the time.
        """
        if self._problem.seconds is not None:
            seconds = min(seconds, PREPARING * self._problem.seconds)
        before = self._rating.num_rated
        must_begin = not self._search.pool and not self._rating.is_under_way
        while (must_begin and not self._rating.is_under_way) or self._rated_seconds < seconds:
            start = time.perf_counter()
            self._rating.go_on()
            self._rating.is_over |= self._rating.is_under_way and self._is_hopeless()
            self._rated_seconds += time.perf_counter() - start
            if self._rating.is_over:
                break
        if self._rating.num_rated > before and self._rating.is_under_way:
            self._take_best()
        return self._rating.num_rated > before

    def _best_of_pool(self) -> float:
        """The best speed-up foretold of the pool, on the texts that all are rated on."""
        return max((self._predictor.best(draft).speedup for draft in self._search.pool), default=0.0)

    def _is_hopeless(self) -> bool:
        rated = self._rating.best_first()
        return not rated or rated[0].speedup < HOPELESS * self._best_of_pool()

    def _take_best(self) -> None:
        """The best unlike sets join the pool, unless what is there is foretold to be far ahead of them."""
        best_of_pool = self._best_of_pool()
        rated = self._rating.best_first()
        speedups = {prediction.draft: prediction.speedup for prediction in rated}
        num_layers = self._problem.target.num_layers
        for draft in unlike(rated, self._settings.num_drafts, num_layers):
            is_known = any(is_same(draft, other, num_layers) for other in self._search.pool)
            if not is_known and speedups[draft] >= NEAR_THE_BEST * best_of_pool:
                self._joined += self._search.add(self._with_company(draft))


class _Rating:
    """Skip sets rated one by one, as many as the settings say."""

    def __init__(self, target: Target, settings: Any, predictor: Predictor) -> None:
        space = SkipSpace.of(target, whole_blocks=settings.whole_blocks)
        self._most = settings.num_surveyed or max(FEWEST_SURVEYED, SURVEYED_PER_ITEM * len(space.items))
        self._proposals = Proposals(space, predictor)
        self._rated = self._proposals.rate()
        self.num_rated = 0
        self.is_over = False
        """Nothing is left to rate, or as many are rated as were asked for."""

    @property
    def is_under_way(self) -> bool:
        """What is best so far is worth measuring."""
        return self._proposals.is_under_way or self.is_over

    def go_on(self) -> None:
        """Rate another set."""
        if self.is_over:
            return
        self.is_over = next(self._rated, None) is None
        self.num_rated += not self.is_over
        self.is_over |= self._proposals.is_under_way and self.num_rated >= self._most

    def best_first(self) -> list[Prediction]:
        """All sets rated so far."""
        return self._proposals.best_first()


_POOL: TypeAdapter[list[Any]] = TypeAdapter(list[Draft])


def _dumped(drafts: Iterable[Drafting]) -> Any:
    return _POOL.dump_python(list(drafts), mode="json")


def _survey(problem: Problem, texts: slice, exits: Iterable[int]) -> Survey:
    return Survey(
        problem.target,
        problem.prompts[texts],
        problem.continuations[texts],
        temperature=problem.temperature,
        seed=problem.seed + texts.start,
        heads=problem.heads,
        exits=exits,
    )
