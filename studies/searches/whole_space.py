"""Optuna over the whole space of drafts and rules, by the measured speed-up alone: a general-purpose search as a baseline.

TPE or random search suggests every part of a draft and of its rule. It knows nothing of language models: it predicts nothing and
asks for no costs. It begins with usual drafts of each kind (our choice).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import optuna
import torch
from optuna.samplers import BaseSampler, RandomSampler
from pydantic import Field

from decoding.draft_length import RULES
from decoding.drafts import BitWidth, Layers
from decoding.target import Target
from studies.contract import Candidate, Problem, Study, StudySettings, StudySetup
from studies.rule_space import DEFAULT_RULES, RuleNames, rule_parameters, rules_within, suggest_rule
from studies.samplers import SeededByTrial, tpe
from studies.searches.any_draft import AnyDraft
from studies.searches.exits import check_exits, exits_with_head
from studies.searches.joint import bits_on

SAMPLERS: Mapping[str, Callable[[int], BaseSampler]] = MappingProxyType(
    {"tpe": partial(tpe, group=True), "random": lambda seed: RandomSampler(seed=seed)}
)


class WholeSpaceSettings(StudySettings):
    """Settings of the search over the whole space."""

    sampler: Literal["tpe", "random"] = Field("tpe", description="Optuna's multivariate TPE, or random search")
    rules: RuleNames = Field(DEFAULT_RULES, description="draft-length rules to choose among")
    max_tokens: int = Field(12, ge=1, le=64, description="longest draft to consider (K)")
    exit_layers: Layers | None = Field(
        None, min_length=1, description="exits to consider with a head; default: up to 12 of the model's"
    )
    bits: tuple[BitWidth, ...] | None = Field(
        None, description="precisions of quantised drafts; default: 8 on a CPU with AVX-512 VNNI, none elsewhere"
    )
    trees: bool = Field(True, description="side leaves, where the model takes them")
    whole_blocks: bool = Field(False, description="skip whole blocks only, not attention and MLP apart")
    max_trials: int = Field(200, ge=1, description="trials at most")
    patience: int | None = Field(
        None, ge=1, description="trials without a better speed-up after which the search ends; default: none"
    )

    def check(self, target: Target) -> None:
        """Raise ValueError for an exit that the model does not have."""
        check_exits(self.exit_layers, target)

    def for_engine(self, rules: Sequence[str], *, quantises: bool) -> dict[str, Any]:
        """Return the settings of chains that run whole blocks, in the precisions that the engine can make."""
        changed = {"rules": rules_within(self, rules), "whole_blocks": True, "trees": False}
        return changed if quantises else {**changed, "bits": ()}

    def wanted_heads(self, num_layers: int) -> tuple[int, ...]:
        """Return the exit layers that need a distilled head."""
        return exits_with_head(self.exit_layers, num_layers)

    @property
    def wants_feature_head(self) -> bool:
        """True: a feature head is one of the kinds."""
        return True

    def wanted_bits(self, device: torch.device) -> tuple[BitWidth, ...]:
        """Return the precisions of the quantised drafts to consider."""
        return bits_on(device, self.bits)


class WholeSpace(Study):
    """Any draft with any rule, as Optuna suggests them. The sampler keeps all state."""

    name = "whole_space"
    Settings = WholeSpaceSettings

    def __init__(self, problem: Problem, settings: WholeSpaceSettings) -> None:
        super().__init__(problem, settings)
        target = problem.target
        wanted = settings.wanted_heads(target.num_layers)
        self._heads = [draft for layer, draft in sorted(problem.head_drafts.items()) if layer in wanted]
        self._drafts = AnyDraft(
            problem,
            self._heads,
            settings.wanted_bits(target.device),
            trees=settings.trees,
            whole_blocks=settings.whole_blocks,
        )

    def setup(self) -> StudySetup:
        """Return the setup: usual drafts with the first rule's defaults come first; the space holds the heads that exist now."""
        name = self.settings.rules[0]
        rule = rule_parameters(RULES[name](rule=name), self.settings.max_tokens)
        feature = self.problem.feature_draft
        heads = [*self._heads, *([feature] if feature is not None else [])]
        files = {file: sha256 for draft in heads for file, sha256 in draft.files.items()}
        return StudySetup(
            space={**self.settings.identity(), "head_files": files, "kinds": list(self._drafts.kinds)},
            sampler=SeededByTrial(self.problem.seed, SAMPLERS[self.settings.sampler]),
            starts=[{**start, **rule} for start in self._drafts.starts],
        )

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return the draft and the rule that Optuna suggests."""
        draft = self._drafts.draft(trial)
        rule = suggest_rule(trial, self.settings.rules, self.settings.max_tokens)
        return Candidate(draft=draft, draft_length=rule), {}

    def proposes_beside(self, pending: Sequence[Candidate]) -> bool:
        """Return True: TPE counts running trials as slow ones ("constant liar"), and random search needs no results."""
        return True
