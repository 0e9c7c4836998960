"""Skip sets by prediction (our formulation): hundreds are rated without decoding, the best few measured, each corrects the rest.

`studies.proposals` finds the sets by moves over single sublayers, `studies.guided` says which of them to measure with which
draft-length rule.
"""

from __future__ import annotations

import math
import time
from typing import Any, ClassVar

import optuna
from pydantic import Field, TypeAdapter

from decoding.documents import Document
from decoding.draft_length import RULES
from decoding.profile import Draft
from studies.contract import Candidate, Problem, Study, TrialRecord
from studies.cost_table import CostTable
from studies.guided import GuidedSearch
from studies.pools import unlike
from studies.prediction import Drafting, Predictor
from studies.proposals import Effort, propose_skip_sets
from studies.rule_space import RuleNames
from studies.skip_space import SkipSpace
from studies.survey import Survey

FEWEST_SURVEYED, SURVEYED_PER_ITEM = 160, 3
PREPARING = 0.3
"""Share of the search time after which no further draft is rated."""


class PredictedSettings(Document):
    """The settings of a search by prediction."""

    rules: RuleNames = Field(tuple(RULES), description="draft-length rules to choose among")
    max_tokens: int = Field(12, ge=1, le=64, description="longest draft to consider (K)")
    survey_tokens: int = Field(256, ge=1, description="tokens of the tuning texts that drafts are rated on")
    num_surveyed: int | None = Field(
        None, ge=1, description="drafts to rate, about; default: 3 for each sublayer of the model, at least 160"
    )
    whole_blocks: bool = Field(False, description="leave out whole blocks only, not attention and MLP apart")
    num_drafts: int = Field(8, ge=1, description="best unlike skip sets to measure, each with the rules that suit it")
    max_trials: int = Field(24, ge=1, description="trials at most")
    patience: int = Field(8, ge=1, description="trials without a better speed-up after which the search ends")


class Predicted(Study):
    """A pool of skip sets, and a guided search over it."""

    name: ClassVar[str] = "predicted"
    Settings: ClassVar[type[Document]] = PredictedSettings

    def __init__(self, problem: Problem, settings: Any, pool: list[Drafting], costs: CostTable) -> None:
        self._problem, self._settings, self._pool, self._costs = problem, settings, pool, costs
        predictor = _predictor(problem, settings, costs)
        labelled = {f"{place}: {draft.describe()}": draft for place, draft in enumerate(pool)}
        self._search = GuidedSearch(labelled, predictor, settings.rules, seed=problem.seed, patience=settings.patience)
        self._num_trials = 0

    @classmethod
    def create(cls, problem: Problem, settings: Any) -> Predicted:
        """Rate drafts until the pool is found, or take the pool that was kept. ValueError if costs cannot be measured."""
        if problem.kept is not None:
            pool = _POOL.validate_python(problem.kept["pool"])
            return cls(problem, settings, pool, CostTable.model_validate(problem.kept["costs"]))
        if problem.costs is None:
            raise ValueError(f"the study {cls.name} needs to know what passes of the model cost")
        costs = problem.costs(settings.max_tokens)
        return cls(problem, settings, cls._find_pool(problem, settings, _predictor(problem, settings, costs)), costs)

    @classmethod
    def _find_pool(cls, problem: Problem, settings: Any, predictor: Predictor) -> list[Drafting]:
        """The drafts to measure, the best first."""
        return skip_sets(problem, settings, predictor)

    def keep(self) -> Any:
        """The pool and the costs: another measurement of these would rate the drafts otherwise."""
        return {"pool": _POOL.dump_python(self._pool, mode="json"), "costs": self._costs.model_dump(mode="json")}

    def sampler(self) -> optuna.samplers.BaseSampler:
        """Every parameter as the guided search chose it."""
        return self._search.sampler()

    def space(self) -> dict[str, Any]:
        """The settings; another limit or patience is the same search, going on longer."""
        return dict(self._settings.model_dump(mode="json", exclude={"max_trials", "patience"}))

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """The candidate of the highest upper bound, with what is foretold of it."""
        return self._search.propose(trial)

    def observe(self, record: TrialRecord) -> None:
        """Correct the predictions."""
        self._num_trials += 1
        self._search.observe(record)

    def finished(self) -> str | None:
        """No draft to search, the trial limit, or what the guided search says."""
        if not self._pool:
            return "there is no draft to search: no exit head was found, and no other kind is asked for"
        if self._num_trials >= self._settings.max_trials:
            return f"{self._num_trials} trials done"
        return self._search.finished()

    def remarks(self) -> list[str]:
        """How good the predictions were, and what more trials might gain."""
        return self._search.remarks()


def skip_sets(problem: Problem, settings: Any, predictor: Predictor) -> list[Drafting]:
    """The best unlike skip sets, found in no more than `PREPARING` of the search time."""
    space = SkipSpace.of(problem.target, whole_blocks=settings.whole_blocks)
    most = settings.num_surveyed or max(FEWEST_SURVEYED, SURVEYED_PER_ITEM * len(space.items))
    until = math.inf if problem.seconds is None else time.perf_counter() + PREPARING * problem.seconds
    return unlike(
        propose_skip_sets(space, predictor, Effort(most, until)), settings.num_drafts, problem.target.num_layers
    )


_POOL: TypeAdapter[list[Any]] = TypeAdapter(list[Draft])


def _predictor(problem: Problem, settings: Any, costs: CostTable) -> Predictor:
    survey = Survey(
        problem.target,
        *_some_texts(problem, settings.survey_tokens),
        temperature=problem.temperature,
        seed=problem.seed,
        heads=problem.heads,
    )
    return Predictor(survey, costs, max_tokens=settings.max_tokens, prefix_reuse=problem.prefix_reuse)


def _some_texts(problem: Problem, num_tokens: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """As many of the tuning texts as hold `num_tokens`, whole ones, at least one."""
    prompts: list[tuple[int, ...]] = []
    continuations: list[tuple[int, ...]] = []
    for prompt, continuation in zip(problem.prompts, problem.continuations, strict=True):
        if sum(map(len, continuations)) < num_tokens:
            prompts.append(prompt)
            continuations.append(continuation)
    return prompts, continuations
