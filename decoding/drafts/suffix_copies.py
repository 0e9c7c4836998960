"""Copies by the longest suffix that occurs earlier in the sequence, or in an earlier answer."""

from __future__ import annotations

from collections.abc import Sequence

from decoding.drafts.history import RequestHistory
from decoding.drafts.suffix_automaton import ROOT, SuffixAutomaton


class SuffixCopies:
    """Suffix automaton of `token_ids`, with a matcher for each answer in `history`.

    The longest match counts; among equals the sequence's own, then the latest answer's. A match of fewer than `min_match` tokens
    is none. At most `max_spec_factor` tokens are copied for each token of the match, and as long as their estimated
    probability is at least `min_token_prob`; the names are SuffixDecoding's (arXiv 2411.04975).
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        min_match: int,
        max_spec_factor: float,
        min_token_prob: float,
        history: RequestHistory | None = None,
    ) -> None:
        self._token_ids = token_ids
        self._min_match, self._factor, self._least = min_match, max_spec_factor, min_token_prob
        self._own = SuffixAutomaton()
        self._history = history
        self._matchers = [_Matcher(*each) for each in history.answers()] if history else []

    def update(self) -> None:
        for position in range(self._own.num_tokens, len(self._token_ids)):
            token = self._token_ids[position]
            self._own.extend(token)
            for matcher in self._matchers:
                matcher.read(token)

    def copy(self, num_tokens: int) -> list[int] | None:
        """Return the continuation of the longest match, of one to `num_tokens` tokens, or None."""
        self.update()
        state, length = self._own.repeated()
        automaton = self._own
        longer = [each for each in self._matchers if each.length > max(length, self._min_match - 1)]
        if longer and self._history is not None:
            best = max(longer, key=lambda each: each.length)
            automaton, state, length = best.automaton, best.state, best.length
            self._history.note_use(best.answer)
        if length < self._min_match:
            return None
        most = min(num_tokens, max(1, int(self._factor * length)))
        tokens = automaton.continuation(state, most, min_match=self._min_match, min_token_prob=self._least)
        return tokens or None


class _Matcher:
    """The longest suffix of a growing text that occurs in one earlier answer."""

    def __init__(self, answer: tuple[int, ...], automaton: SuffixAutomaton) -> None:
        self.answer, self.automaton = answer, automaton
        self.state, self.length = ROOT, 0

    def read(self, token: int) -> None:
        self.state, self.length = self.automaton.step(self.state, self.length, token)
