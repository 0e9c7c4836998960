"""Predicted speed-ups of drafts, from a survey of sequences and a cost table, without decoding.

Our formulation: tokens per round over the cost of a round, from replaying the draft-length rule on what the draft would have
drafted. A prediction chooses what to measure; it is never reported as a measurement. For prompts decoded in lockstep, the cost
table must hold batched passes, and the replay shares passes as decoding does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, partial

from decoding.draft_length import DraftLengthRule, Fixed, RoundCosts, TopProbability
from decoding.drafters.prompt_lookup import look_up
from decoding.drafts import Draft, DraftDocument, FirstLookup, LayerSkip, Lookup
from decoding.drafts.copies import NgramCopies
from decoding.lockstep import shared_batch_size
from decoding.profile import Decoding
from decoding.text import TokenSequence
from studies.costs.table import CostTable
from studies.prediction.predictors import Prediction, predictor_of
from studies.prediction.replay import (
    Copies,
    LockstepBatches,
    LookupReplay,
    Recording,
    Replayed,
    batches_of,
    replay,
    replay_copies,
)
from studies.prediction.survey import Guess, JoinedSurvey, Survey

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
COPYING = 1e-3
"""Assumed cost of copying a token, its index included, in plain passes: too small to be measured."""


class Predictor:
    """Predicts speed-ups on the sequences of a survey, and remembers every prediction.

    With a `batch_size` above 1, consecutive sequences form batches. `costs` must then be costs of batched passes, or of
    single ones where the target cannot share passes.
    """

    def __init__(
        self,
        survey: Survey | JoinedSurvey,
        costs: CostTable,
        *,
        max_tokens: int,
        decoding: Decoding = Decoding(),
        batch_size: int = 1,
        accepts: Callable[[DraftDocument], bool] = lambda draft: True,
    ) -> None:
        self.survey = survey
        self.accepts = accepts
        """Whether a draft may be measured at all."""
        self.max_tokens = max_tokens
        self._batch_size = batch_size
        self._table, self._decoding = costs, decoding
        self._costs: dict[Draft, RoundCosts] = {}
        self._best: dict[Draft, Prediction] = {}
        self._known: dict[tuple[Draft, DraftLengthRule], Prediction] = {}
        self._borrowing: dict[tuple[Draft, Draft], Prediction] = {}
        self._copies: dict[tuple[Hashable, int], list[Copies]] = {}

    @property
    def num_drafts(self) -> int:
        """Number of drafts predicted so far: the unit of search effort."""
        return len(self._best)

    @cached_property
    def parts(self) -> dict[int, tuple[int, ...]]:
        """For each sample (a sequence or a batch, by its index): the entries of `Replayed.costs_per_token` that predict it."""
        batches = batches_of(self.survey.indices, self._batch_size)
        if self._lockstep is None:
            return batches
        return {batch: (number,) for number, batch in enumerate(batches)}

    @cached_property
    def _lockstep(self) -> LockstepBatches | None:
        """The batches of sequences in lockstep; None if each sequence is decoded by itself."""
        if self._batch_size == 1 or shared_batch_size(self.survey.target, self._batch_size) == 1:
            return None
        return LockstepBatches(tuple(batches_of(self.survey.indices, self._batch_size).values()))

    def costs(self, draft: Draft) -> RoundCosts:
        """Return the costs of a draft's rounds, without the lookup before it.

        Raises ValueError for a draft that runs no part of the target.
        """
        draft = draft.having(lookup=None)
        if draft not in self._costs:
            self._costs[draft] = self._table.round_costs(
                draft,
                self.max_tokens,
                context=self.survey.mean_context,
                prefix_reuse=self._decoding.prefix_reuse,
            )
        return self._costs[draft]

    @cached_property
    def whole(self) -> RoundCosts:
        """Costs of rounds of copied tokens: without states of a prefix, the whole target verifies."""
        return RoundCosts(draft_step=COPYING, verify=self.costs(LayerSkip()).verify)

    def record(self, drafts: Iterable[Draft]) -> None:
        """Record the drafts that are predicted from recordings; in one call, exits share a pass."""
        self.survey.record_all(draft.having(lookup=None) for draft in drafts if predictor_of(draft).is_recorded)

    def predict(self, draft: Draft, rule: DraftLengthRule) -> Prediction:
        """Return the prediction of one draft with one rule, by the registered predictor of its kind."""
        if (draft, rule) not in self._known:
            self._known[draft, rule] = predictor_of(draft).predict(draft, rule, self)
        return self._known[draft, rule]

    def replay_recordings(self, draft: Draft, rule: DraftLengthRule) -> Prediction:
        """Return the prediction of a recorded draft: `rule` is replayed on its distributions, after the lookup if it has one."""
        recordings = self.survey.record(draft.having(lookup=None))
        lookup = None
        if (first := draft.parts.lookup) is not None:
            copies = self._copies_of(first, partial(look_up, source=first), first.max_tokens)
            lookup = LookupReplay(copies, first.max_tokens, self.whole, self._checked(draft, first))
        lockstep = self._lockstep.of_draft(draft, self._decoding) if self._lockstep else None
        max_drafted = self.survey.target.max_drafted
        replayed = replay(rule, recordings, self.costs(draft), lookup, lockstep, max_drafted=max_drafted)
        return self._prediction(draft, rule, recordings, replayed)

    def _checked(self, draft: Draft, first: FirstLookup) -> LookupReplay | None:
        """Return the copies that a draft checks; None if it does not."""
        if not first.checks_copies or self._lockstep is not None:
            return None
        if self._decoding.temperature or draft.trained_head is not None:
            return None
        assert isinstance(first, Lookup), "the kind of lookup whose copies are checked"
        copies = self._copies_of((first, "checked"), partial(_look_up_any, source=first), first.max_tokens)
        return LookupReplay(copies, first.max_tokens, self.whole)

    def _prediction(
        self, draft: Draft, rule: DraftLengthRule, recordings: Sequence[Recording], replayed: Replayed
    ) -> Prediction:
        tested = sum(len(recording.matches) for recording in recordings)
        agreed = sum(sum(recording.matches) for recording in recordings)
        overlap = sum(recording.acceptance * len(recording.matches) for recording in recordings)
        return Prediction(draft, rule, replayed, agreed / tested, overlap / tested)

    def replay_guesses(self, draft: Draft, rule: DraftLengthRule, guess: Guess) -> Prediction:
        """Return the prediction of a draft that runs no model: `guess` gives its tokens, and `rule` their number."""
        copies = self._copies_of(draft, guess, rule.max_tokens)
        right = _share_right(copies)
        max_drafted = self.survey.target.max_drafted
        replayed = replay_copies(rule, copies, self.whole, self._lockstep, max_drafted=max_drafted)
        return Prediction(draft, rule, replayed, right, right)

    def predict_all(self, draft: Draft, rules: Iterable[DraftLengthRule]) -> list[Prediction]:
        """Return the predictions of one draft with many rules, best first."""
        return sorted((self.predict(draft, rule) for rule in rules), key=lambda prediction: -prediction.speedup)

    def best(self, draft: Draft) -> Prediction:
        """Return the draft's best prediction among the `usual_rules`."""
        if draft not in self._best:
            self._best[draft] = self.predict_all(draft, usual_rules(self.max_tokens))[0]
        return self._best[draft]

    def best_borrowing(self, draft: Draft, recorded: Draft) -> Prediction:
        """Return an estimate of the best prediction of `draft`: its own costs, but the recordings of `recorded`.

        It takes no pass. Of the drafts that skip the same sublayers in one precision it gives the order, since what rounding the
        weights does to the acceptance is nearly the same for each (our formulation). Neither has a lookup.
        """
        if (draft, recorded) not in self._borrowing:
            recordings = self.survey.record(recorded)
            lockstep = self._lockstep.of_draft(draft, self._decoding) if self._lockstep else None
            costs, most = self.costs(draft), self.survey.target.max_drafted
            rated = [
                self._prediction(
                    draft, rule, recordings, replay(rule, recordings, costs, None, lockstep, max_drafted=most)
                )
                for rule in usual_rules(self.max_tokens)
            ]
            self._borrowing[draft, recorded] = max(rated, key=lambda each: each.speedup)
        return self._borrowing[draft, recorded]

    def best_first(self, drafts: Iterable[Draft]) -> list[Prediction]:
        """Return the best prediction of each draft that may be measured, best first."""
        accepted = [draft for draft in drafts if self.accepts(draft)]
        self.record(draft for draft in accepted if draft not in self._best)
        return sorted((self.best(draft) for draft in accepted), key=lambda prediction: -prediction.speedup)

    def _copies_of(self, key: Hashable, guess: Guess, most: int) -> list[Copies]:
        """Return the survey's copies by `guess`, computed once per `key` for all rules of at most `max_tokens` tokens."""
        asked = key, max(most, self.max_tokens)
        if asked not in self._copies:
            self._copies[asked] = self.survey.copies(guess, asked[1])
        return self._copies[asked]


def _look_up_any(sequence: TokenSequence, num_tokens: int, source: Lookup) -> list[int] | None:
    index = sequence.index(source)
    assert isinstance(index, NgramCopies), "of a prompt lookup"
    return index.copy_after((), num_tokens) if num_tokens > 0 else None


def _share_right(copies: Sequence[Copies]) -> float:
    """Return the share of positions at which the first guessed token is right."""
    right = sum(copy is not None and copy.num_right > 0 for sequence in copies for copy in sequence)
    return right / sum(map(len, copies))


def usual_rules(max_tokens: int) -> list[DraftLengthRule]:
    """Return a few fixed lengths and top-probability thresholds: enough to compare drafts."""
    lengths = [length for length in LENGTHS if length <= max_tokens]
    fixed: list[DraftLengthRule] = [Fixed(max_tokens=length) for length in lengths]
    return [*fixed, *(TopProbability(max_tokens=max_tokens, threshold=threshold) for threshold in THRESHOLDS)]
