"""The search over draft-length rules and their parameters, for given drafts: when to stop drafting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import optuna
from pydantic import BeforeValidator, Field

from decoding.draft_length import RULES
from decoding.drafters.build import check_draft
from decoding.drafts import RealDraft, infer_kind
from decoding.target import Target
from studies.contract import Candidate, Problem, Study, StudySettings, StudySetup, best_trials
from studies.rule_space import RuleNames, rule_parameters, rule_sampler, rules_within, suggest_rule


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

    def for_engine(self, rules: Sequence[str], *, quantises: bool) -> dict[str, Any]:
        """Return the rules that the engine runs."""
        return {"rules": rules_within(self, rules)}

    def check(self, target: Target) -> None:
        """Raise ValueError for a given draft of layers that the model does not have."""
        if self.draft is not None:
            check_draft(target, self.draft)


class DraftLength(Study):
    """TPE over draft, rule and the rule's parameters, starting from each rule's defaults on the best draft."""

    name = "draft_length"
    Settings = DraftLengthSettings

    def __init__(self, problem: Problem, settings: DraftLengthSettings) -> None:
        super().__init__(problem, settings)
        before = _best_before(problem, settings)
        self._drafts = [candidate.draft for candidate in before]
        self._names = _distinct([draft.describe() for draft in self._drafts])
        self._incumbent = [candidate.draft_length for candidate in before[:1]]

    def setup(self) -> StudySetup:
        """Return the setup; the space holds the drafts."""
        drafts = [draft.model_dump(mode="json") for draft in self._drafts]
        return StudySetup(
            space={**self.settings.identity(), "drafts": drafts, "draft_names": self._names},
            sampler=rule_sampler(self.problem.seed),
            starts=self._starts(),
        )

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return a draft, a rule and its parameters, as Optuna suggests them."""
        rank = self._names.index(trial.suggest_categorical("draft", self._names))
        rule = suggest_rule(trial, self.settings.rules, self.settings.max_tokens)
        return Candidate(draft=self._drafts[rank], draft_length=rule), {"draft_rank": rank}

    def proposes_beside(self, pending: Sequence[Candidate]) -> bool:
        """Return True: Optuna's TPE counts running trials as slow ones ("constant liar")."""
        return True

    def finished(self) -> str | None:
        """Return a reason if there is no draft to search with."""
        if self._drafts:
            return None
        return (
            "there is no draft to search a length for: run conf_layers before it, or set `draft:` under "
            "`studies: draft_length`"
        )

    def _starts(self) -> list[dict[str, Any]]:
        """Return, for the best draft, the rule that it was found with, then the defaults of each rule."""
        if not self._names:
            return []
        asked = self.settings.rules
        rules = [*(rule for rule in self._incumbent if rule.rule in asked), *(RULES[name](rule=name) for name in asked)]
        starts = [{"draft": self._names[0], **rule_parameters(rule, self.settings.max_tokens)} for rule in rules]
        return [start for index, start in enumerate(starts) if start not in starts[:index]]


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
