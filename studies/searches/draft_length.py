"""When to stop drafting, for a given draft: a search over all draft-length rules and their parameters (`studies.rule_space`)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import optuna
from pydantic import BeforeValidator, Field

from decoding.documents.strict_yaml import Document
from decoding.draft_length import RULES
from decoding.drafters.build import build_drafter
from decoding.drafts import EarlyExit, PlainDecoding, RealDraft
from decoding.target import Target
from studies.contract import Candidate, Problem, Study, TrialRecord, best_trials
from studies.rule_space import RuleNames, rule_parameters, rule_sampler, suggest_rule


def _name_kind(draft: Any) -> Any:
    """The kind of a draft may be left out: a key that only one has tells them apart."""
    if isinstance(draft, dict) and "kind" not in draft:
        if "exit_layer" in draft:
            return {"kind": "early_exit", **draft}
        return {"kind": "prompt_lookup" if {"max_ngram", "min_ngram"} & draft.keys() else "layer_skip", **draft}
    return draft


GivenDraft = Annotated[RealDraft | None, BeforeValidator(_name_kind)]


class DraftLengthSettings(Document):
    """The settings of the draft-length search."""

    rules: RuleNames = Field(tuple(RULES), description="rules to choose among")
    num_drafts: int = Field(2, ge=1, description="how many of the best drafts found before to search with")
    draft: GivenDraft = Field(None, description="search for this draft instead of those found before")
    max_tokens: int = Field(16, ge=1, le=64, description="longest draft to consider (K)")
    max_trials: int = Field(40, ge=1, description="trials at most")
    patience: int = Field(15, ge=1, description="trials without a better speed-up after which the search ends")


class DraftLength(Study):
    """TPE over draft, rule and the rule's parameters, begun with each rule's defaults on the best draft."""

    name: ClassVar[str] = "draft_length"
    Settings: ClassVar[type[Document]] = DraftLengthSettings

    def __init__(self, problem: Problem, settings: DraftLengthSettings) -> None:
        self._problem = problem
        self._settings = settings
        before = _best_before(problem, settings)
        self._drafts = [candidate.draft for candidate in before]
        self._incumbent = [candidate.draft_length for candidate in before[:1]]
        self._num_trials = 0
        self._best = 0.0
        self._last_improvement = 0

    @classmethod
    def create(cls, problem: Problem, settings: Any) -> DraftLength:
        """See `Study.create`."""
        return cls(problem, settings)

    @classmethod
    def check(cls, settings: Any, target: Target) -> None:
        """Raise ValueError for a given draft of layers that the model does not have."""
        if isinstance(settings.draft, EarlyExit):
            target.check_exit_layer(settings.draft.exit_layer)
        elif settings.draft is not None:
            build_drafter(target, settings.draft)

    def sampler(self) -> optuna.samplers.BaseSampler:
        """See `rule_sampler`."""
        return rule_sampler(self._problem.seed)

    def space(self) -> dict[str, Any]:
        """Rules, lengths and drafts; another limit or patience is the same search, going on longer."""
        settings = self._settings.model_dump(mode="json", exclude={"max_trials", "patience"})
        return {**settings, "drafts": [draft.model_dump(mode="json") for draft in self._drafts]}

    def starts(self) -> list[dict[str, Any]]:
        """On the best draft, the rule it was found with, then each rule's defaults."""
        asked = self._settings.rules
        rules = [*(rule for rule in self._incumbent if rule.rule in asked), *(RULES[name](rule=name) for name in asked)]
        starts = [{"draft": 0, **rule_parameters(rule, self._settings.max_tokens)} for rule in rules]
        return [start for place, start in enumerate(starts) if start not in starts[:place]]

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """A draft, a rule and its parameters, as Optuna suggests them."""
        place = trial.suggest_categorical("draft", list(range(len(self._drafts))))
        rule = suggest_rule(trial, self._settings.rules, self._settings.max_tokens)
        return Candidate(draft=self._drafts[place], draft_length=rule), {"draft_rank": place}

    def observe(self, record: TrialRecord) -> None:
        """Count trials since the last improvement; what to try next is the sampler's business."""
        self._num_trials += 1
        if record.speedup is not None and record.speedup > self._best:
            self._best, self._last_improvement = record.speedup, self._num_trials

    def finished(self) -> str | None:
        """No draft to search for, the trial limit, or `patience` trials without a better speed-up."""
        if not self._drafts:
            return (
                "there is no draft to search a length for: run conf_layers before it, or set `draft:` under "
                "`studies: draft_length`"
            )
        if self._num_trials >= self._settings.max_trials:
            return f"{self._num_trials} trials done"
        idle = self._num_trials - self._last_improvement
        return f"no better draft length in {idle} trials" if idle >= self._settings.patience else None


def _best_before(problem: Problem, settings: DraftLengthSettings) -> list[Candidate]:
    """The best candidates of the studies before, each draft once; or the given draft."""
    if settings.draft is not None:
        return [Candidate(draft=settings.draft, draft_length=RULES[settings.rules[0]](rule=settings.rules[0]))]
    earlier = [
        record
        for records in problem.earlier.values()
        for record in records
        if not isinstance(record.candidate.draft, PlainDecoding)
    ]
    best = best_trials(earlier, settings.num_drafts, same=lambda candidate: candidate.draft.model_dump_json())
    return [record.candidate for record in best]
