"""What a draft would gain, foretold from a survey of the texts and a table of costs, without decoding.

Our formulation: tokens per round over the cost of a round, by replaying the draft-length rule on what the draft would have
drafted. A prediction chooses what to measure; it is never reported as a measurement. Of prompts that are decoded in step the costs
must be those of as many texts, and the replay goes in step too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from decoding.draft_length import DraftLengthRule, Fixed, RoundCosts, TopProbability
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PromptLookup
from decoding.lockstep import shared_batch_size
from studies.prediction.lockstep_cost import LockstepBatches, batches_of
from studies.prediction.replay import Copies, LookupReplay, Replayed, replay, replay_copies
from studies.prediction.survey import JoinedSurvey, Survey, SurveyedDraft

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
COPYING = 1e-3
"""What copying a token is taken to cost, in plain passes: nothing that a clock could tell."""


class Costs(Protocol):
    """Foretells what the rounds of any draft cost, as `studies.costs.table.CostTable` does."""

    def round_costs(self, draft: SurveyedDraft, max_tokens: int, *, context: float, prefix_reuse: bool) -> RoundCosts:
        """Costs of drafts of up to `max_tokens` tokens behind `context` tokens, in plain passes."""


Drafting = LayerSkip | EarlyExit | PromptLookup
"""Every draft but plain decoding."""


@dataclass(frozen=True)
class Prediction:
    """A draft with a rule, and what a replay foretells of the two."""

    draft: Drafting
    rule: DraftLengthRule
    replayed: Replayed
    agreement: float
    """Share of positions at which a one-token draft would have been accepted."""
    acceptance: float
    """Mean over positions of sum over v of min(p, q): how near the draft's distribution is to the target's, greedy or not."""

    @property
    def speedup(self) -> float:
        """Predicted speed-up over plain decoding."""
        return self.replayed.speedup


class Predictor:
    """Foretells speed-ups on the texts of a survey; what is known of a draft is remembered.

    With a `batch_size` above 1 texts are measured in batches, one behind the other, and `costs` are those of passes over as many,
    or over one where they take turns.
    """

    def __init__(
        self,
        survey: Survey | JoinedSurvey,
        costs: Costs,
        *,
        max_tokens: int,
        prefix_reuse: bool = True,
        batch_size: int = 1,
    ) -> None:
        self.survey = survey
        self.max_tokens = max_tokens
        self._batch_size = batch_size
        self._table, self._prefix_reuse = costs, prefix_reuse
        self._costs: dict[SurveyedDraft, RoundCosts] = {}
        self._best: dict[Drafting, Prediction] = {}
        self._known: dict[tuple[Drafting, DraftLengthRule], Prediction] = {}
        self._copies: dict[Lookup | PromptLookup, list[Copies]] = {}

    @property
    def num_drafts(self) -> int:
        """Drafts foretold so far: what an effort is counted in."""
        return len(self._best)

    @cached_property
    def parts(self) -> dict[int, tuple[int, ...]]:
        """By the place that a sample is of: which of `Replayed.costs_per_token` foretell it."""
        batches = batches_of(self.survey.places, self._batch_size)
        if self._together is None:
            return batches
        return {batch: (number,) for number, batch in enumerate(batches)}

    @cached_property
    def _together(self) -> LockstepBatches | None:
        """The texts in step; None if each is by itself."""
        if self._batch_size == 1 or shared_batch_size(self.survey.target, self._batch_size) == 1:
            return None
        return LockstepBatches(tuple(batches_of(self.survey.places, self._batch_size).values()))

    def costs(self, draft: SurveyedDraft) -> RoundCosts:
        """What the rounds of a model's draft cost; a lookup in front of it does not count."""
        draft = part_of_model(draft)
        if draft not in self._costs:
            self._costs[draft] = self._round_costs(draft, prefix_reuse=self._prefix_reuse)
        return self._costs[draft]

    @cached_property
    def whole(self) -> RoundCosts:
        """What verifying costs where no states of the prefix are known, as of tokens that were looked up."""
        verify = self._round_costs(LayerSkip(), prefix_reuse=False).verify
        return RoundCosts(draft_step=COPYING, verify=verify)

    def predict(self, draft: Drafting, rule: DraftLengthRule) -> Prediction:
        """One draft with one rule."""
        if (draft, rule) not in self._known:
            self._known[draft, rule] = self._predict(draft, rule)
        return self._known[draft, rule]

    def _predict(self, draft: Drafting, rule: DraftLengthRule) -> Prediction:
        if isinstance(draft, PromptLookup):
            copies = self._copies_of(draft, rule.max_tokens)
            right = _share_right(copies)
            replayed = replay_copies(
                rule, copies, self.whole, self._together, max_drafted=self.survey.target.max_drafted
            )
            return Prediction(draft, rule, replayed, right, right)
        recordings = self.survey.record(part_of_model(draft))
        lookup = None
        if draft.lookup is not None:
            copies = self._copies_of(draft.lookup, draft.lookup.max_tokens)
            lookup = LookupReplay(copies, draft.lookup.max_tokens, self.whole)
        tested = sum(len(recording.matches) for recording in recordings)
        agreed = sum(sum(recording.matches) for recording in recordings)
        overlap = sum(recording.acceptance * len(recording.matches) for recording in recordings)
        together = self._together.of_draft(draft, prefix_reuse=self._prefix_reuse) if self._together else None
        costs = self.costs(draft)
        replayed = replay(rule, recordings, costs, lookup, together, max_drafted=self.survey.target.max_drafted)
        return Prediction(draft, rule, replayed, agreed / tested, overlap / tested)

    def predict_all(self, draft: Drafting, rules: Iterable[DraftLengthRule]) -> list[Prediction]:
        """One draft with many rules, the best first."""
        return sorted((self.predict(draft, rule) for rule in rules), key=lambda prediction: -prediction.speedup)

    def best(self, draft: Drafting) -> Prediction:
        """The draft with the best of a few fixed lengths and top-probability thresholds."""
        if draft not in self._best:
            self._best[draft] = self.predict_all(draft, usual_rules(self.max_tokens))[0]
        return self._best[draft]

    def best_first(self, drafts: Iterable[Drafting]) -> list[Prediction]:
        """Each draft with its best rule, the best draft first."""
        return sorted((self.best(draft) for draft in drafts), key=lambda prediction: -prediction.speedup)

    def _round_costs(self, draft: SurveyedDraft, *, prefix_reuse: bool) -> RoundCosts:
        context = self.survey.mean_context
        return self._table.round_costs(draft, self.max_tokens, context=context, prefix_reuse=prefix_reuse)

    def _copies_of(self, lookup: Lookup | PromptLookup, most: int) -> list[Copies]:
        """Looked at once for each n-gram length, as far as any rule may draft."""
        if lookup not in self._copies:
            self._copies[lookup] = self.survey.copies(lookup, max(most, self.max_tokens))
        return self._copies[lookup]


def _share_right(copies: Sequence[Copies]) -> float:
    """Of all positions, those at which a copied token would be right."""
    return sum(bool(num_right) for text in copies for num_right in text) / sum(len(text) for text in copies)


def part_of_model(draft: SurveyedDraft) -> SurveyedDraft:
    """The draft without the lookup in front of it."""
    return draft.model_copy(update={"lookup": None}) if draft.lookup is not None else draft


def usual_rules(max_tokens: int) -> list[DraftLengthRule]:
    """Rules that tell drafts apart well enough for a first look."""
    lengths = [length for length in LENGTHS if length <= max_tokens]
    fixed: list[DraftLengthRule] = [Fixed(max_tokens=length) for length in lengths]
    return [*fixed, *(TopProbability(max_tokens=max_tokens, threshold=threshold) for threshold in THRESHOLDS)]
