"""The search over draft-length rules and their parameters, for given drafts: when to stop drafting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import optuna
from optuna.trial import BaseTrial
from pydantic import BeforeValidator, Field

from decoding.draft_length import RULES
from decoding.drafters.build import check_draft
from decoding.drafts import Draft, RealDraft, infer_kind
from decoding.target import Target
from studies.contract import Candidate, Problem, StudySettings, best_trials
from studies.rule_space import RuleNames, rule_parameters, rules_within, suggest_rule
from studies.samplers.by_optuna import TpeOfRules
from studies.samplers.contract import enqueue_in_new


def _name_kind(draft: Any) -> Any:
    """Return `draft` with its kind, inferred from the other keys if it is missing."""
    if isinstance(draft, dict) and "kind" not in draft:
        return {"kind": infer_kind(draft.keys()), **draft}
    return draft


GivenDraft = Annotated[RealDraft | None, BeforeValidator(_name_kind)]


class DraftLengthSettings(StudySettings):
    """Settings of the draft-length search."""

    rules: RuleNames = Field(tuple(RULES), description="rules to choose among")
    num_drafts: int = Field(2, ge=1, description="number of the best earlier drafts to search with")
    draft: GivenDraft = Field(None, description="draft to search with instead of earlier ones")
    max_tokens: int = Field(16, ge=1, le=64, description="longest draft to consider (K)")

    @property
    def reads_earlier(self) -> bool:
        """True unless a draft is given: the best earlier drafts are searched with."""
        return self.draft is None

    def for_engine(self, rules: Sequence[str], *, quantises: bool, whole_blocks: bool) -> dict[str, Any]:
        """Return the rules that the engine runs."""
        return {"rules": rules_within(self, rules)}

    def check(self, target: Target) -> None:
        """Raise ValueError for a given draft of layers that the model does not have."""
        if self.draft is not None:
            check_draft(target, self.draft)


class DraftLength(TpeOfRules):
    """TPE over draft, rule and the rule's parameters, starting from each rule's defaults on the best draft."""

    name = "draft_length"
    Settings = DraftLengthSettings
    space: GivenDrafts

    def __init__(self, problem: Problem, settings: DraftLengthSettings) -> None:
        super().__init__(problem, settings)
        self._before = _best_before(problem, settings)
        drafts = [candidate.draft for candidate in self._before]
        self.space = GivenDrafts(drafts, settings.rules, settings.max_tokens)

    def begin(self, study: optuna.Study) -> None:
        """Enqueue, for the best draft, the rule that it was found with, then the defaults of each rule."""
        asked = self.settings.rules
        incumbent = [each.draft_length for each in self._before[:1] if each.draft_length.rule in asked]
        rules = [*incumbent, *(RULES[name](rule=name) for name in asked)]
        best = [{"draft": name} for name in self.space.drafts][:1]
        enqueue_in_new(
            study, [draft | rule_parameters(rule, self.settings.max_tokens) for draft in best for rule in rules]
        )

    def finished(self, study: optuna.Study) -> str | None:
        """Return a reason if there is no draft to search with."""
        if self.space.drafts:
            return super().finished(study)
        return (
            "there is no draft to search a length for: run conf_layers before it, or set `draft:` under "
            "`studies: draft_length`"
        )


class GivenDrafts:
    """A few drafts, by their names, each with any rule."""

    def __init__(self, drafts: Sequence[Draft], rules: Sequence[str], max_tokens: int) -> None:
        self.drafts = dict(zip(_distinct([draft.describe() for draft in drafts]), drafts, strict=True))
        self._rules, self._max_tokens = rules, max_tokens

    def suggest(self, trial: BaseTrial) -> Candidate:
        """Return the draft and the rule that the trial suggests."""
        draft = self.drafts[trial.suggest_categorical("draft", tuple(self.drafts))]
        return Candidate(draft=draft, draft_length=suggest_rule(trial, self._rules, self._max_tokens))

    def identity(self) -> dict[str, Any]:
        """Return the drafts, and their names."""
        drafts = [draft.model_dump(mode="json") for draft in self.drafts.values()]
        return {"drafts": drafts, "draft_names": list(self.drafts)}


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names; where several are equal, as of heads in different files, each with its rank."""
    return [name if names.count(name) == 1 else f"{name} ({rank})" for rank, name in enumerate(names, start=1)]


def _best_before(problem: Problem, settings: DraftLengthSettings) -> list[Candidate]:
    """Return the best candidates of earlier studies, each draft once, or the given draft."""
    if settings.draft is not None:
        return [Candidate(draft=settings.draft, draft_length=RULES[settings.rules[0]](rule=settings.rules[0]))]
    earlier = [record for records in problem.earlier.values() for record in records if record.candidate.draft.drafts]
    best = best_trials(earlier, settings.num_drafts, same=lambda candidate: candidate.draft.model_dump_json())
    return [record.candidate for record in best]
