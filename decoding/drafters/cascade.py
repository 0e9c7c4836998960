"""A cascade of drafters: in each round the first that finds something drafts, or the one that has paid in this sequence.

Our formulation, after CAS-Spec (arXiv 2510.26843), known to us by its abstract. A copy costs no draft pass, so copies are looked
for first. Only the last stage is steered by the draft-length rule: its threshold or posterior describes that draft. The stage that
opens a round drafts all of it. In replays of texts of the demo model, going on with the next stage after a short copy was never
faster.

A trained head must see every verified position, so the stage that has one verifies the rounds of all stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.copying.contract import CopySource
from decoding.draft_length import Controller, DraftLengthRule
from decoding.drafters.chooser import ChosenRounds
from decoding.drafters.contract import Drafter, Proposal, max_leaves_of, prefill_target
from decoding.drafters.prompt_lookup import look_up
from decoding.drafts.choice import StageChoice
from decoding.runners.contract import Outputs
from decoding.text import Shaping, TokenSequence


@dataclass(frozen=True)
class CopyStage:
    """A stage that copies at most `max_tokens` tokens."""

    source: CopySource
    max_tokens: int


@dataclass(frozen=True)
class ModelStage:
    """A stage that runs a part of the model."""

    drafter: Drafter
    rule: DraftLengthRule | None = None
    """Rule without state that decides its lengths; None for the last stage, which the profile's rule steers."""
    has_head: bool = False


class CascadeDrafter:
    """Stages in order: `copies`, then `models`, at least one of them. A stage's index counts both."""

    def __init__(
        self, copies: Sequence[CopyStage], models: Sequence[ModelStage], choice: StageChoice | None = None
    ) -> None:
        self._copies, self._models, self._choice = copies, models, choice
        self._keeper = next((stage.drafter for stage in models if stage.has_head), None)

    @property
    def parts(self) -> list[Drafter]:
        """The drafters that run the model, the steered one last."""
        return [stage.drafter for stage in self._models]

    @property
    def max_leaves(self) -> int:
        """Most side leaves of a round; copied tokens have none, as no distribution gives them."""
        return max(max_leaves_of(part) for part in self.parts)

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Prefill with the stage that has a head, or the last one, and let the copying stages read the prompt."""
        logits = (self._keeper or self.parts[-1]).prefill(sequence, cache)
        for stage in self._copies:
            sequence.index(stage.source).update()
        return logits

    def prefill_target(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Prefill without work for drafts: copies read the prompt when they are first looked for."""
        return prefill_target(self._keeper or self.parts[-1], sequence, cache)

    def draft(
        self,
        sequence: TokenSequence,
        cache: KVCache,
        controller: Controller,
        shaping: Shaping,
        acceptance: Acceptance,
        limit: int,
    ) -> Proposal:
        """Let one stage draft, or none; the controller is asked about rounds of the last stage only."""
        found = self._found(sequence, limit)
        able = [*found, *range(len(self._copies), len(self._copies) + len(self._models))]
        rounds = None if self._choice is None else sequence.kept(self._choice, ChosenRounds.of)
        index = able[0] if rounds is None else rounds.open(sequence.token_ids, found, able)
        if index is None:
            proposal = Proposal(0, None, steered=False, stage=able[-1])
        elif index in found:
            sequence.write_drafts(found[index])
            proposal = Proposal(len(found[index]), None, looked_up=True, steered=False, stage=index)
        else:
            proposal = self._drafted(index, sequence, cache, controller, shaping, acceptance, limit)
        if rounds is not None:
            rounds.chooser.drafted(proposal.num_tokens)
        return proposal

    def _found(self, sequence: TokenSequence, limit: int) -> dict[int, Sequence[int]]:
        """Return the copies by stage; without a choice the first one, as no other is needed."""
        found: dict[int, Sequence[int]] = {}
        for index, stage in enumerate(self._copies):
            tokens = look_up(sequence, min(limit, stage.max_tokens), stage.source)
            if tokens is not None:
                found[index] = tokens
                if self._choice is None:
                    break
        return found

    def _drafted(
        self,
        index: int,
        sequence: TokenSequence,
        cache: KVCache,
        controller: Controller,
        shaping: Shaping,
        acceptance: Acceptance,
        limit: int,
    ) -> Proposal:
        stage = self._models[index - len(self._copies)]
        is_steered = stage.rule is None
        own = controller if stage.rule is None else stage.rule.controller()
        proposal = stage.drafter.draft(sequence, cache, own, shaping, acceptance, limit)
        proposal = replace(proposal, stage=index, steered=proposal.steered and is_steered)
        if self._keeper in (None, stage.drafter):
            return proposal
        # The drafter with the head cannot resume from another's states, and must see the positions of a round that was verified.
        return replace(proposal, states=None, verdict=None)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """Verify with the stage that has a head, else with the one that drafted; copies leave no states, so any stage will do."""
        index = draft.stage - len(self._copies)
        drafter = self._keeper or self.parts[index if index >= 0 else -1]
        return drafter.verify(sequence, cache, draft)


def model_parts(drafter: Drafter) -> list[Drafter]:
    """Return the drafters that may run the model in a round, the one that the draft-length rule steers last."""
    return drafter.parts if isinstance(drafter, CascadeDrafter) else [drafter]


def steered_part(drafter: Drafter) -> Drafter:
    """Return the drafter that the draft-length rule steers: the last stage of a cascade, else the drafter itself."""
    return model_parts(drafter)[-1]
