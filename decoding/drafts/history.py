"""Answers to earlier requests, as suffix automata to copy from: a store per user, bounded in memory, off by default."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from decoding.drafts.suffix_automaton import SuffixAutomaton


class RequestHistory:
    """The answers of earlier requests, of at most `max_tokens` tokens and `max_answers` answers together.

    The least recently used answers go first; an answer is used when it is added, and when tokens are copied from it. Any number of
    threads may read and add. A token takes about 0.5 kB, and each answer half a microsecond per generated token.

    Answers cannot change what is generated, only how fast. But a user who times a request may learn whether its text occurred in an
    earlier one, so give each user a store of its own. Raises ValueError for bounds below 1.
    """

    def __init__(self, *, max_tokens: int = 32_768, max_answers: int = 64) -> None:
        if max_tokens < 1 or max_answers < 1:
            raise ValueError(f"a history holds at least one token of one answer, got {max_tokens} and {max_answers}")
        self._max_tokens, self._max_answers = max_tokens, max_answers
        self._answers: OrderedDict[tuple[int, ...], SuffixAutomaton] = OrderedDict()
        self._num_tokens = 0
        self._lock = Lock()

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    def add(self, token_ids: Sequence[int]) -> None:
        """Keep an answer, the end of one that is too long; an answer that is there counts as used."""
        answer = tuple(token_ids[-self._max_tokens :])
        if not answer or self.note_use(answer):
            return
        automaton = SuffixAutomaton()
        for token in answer:
            automaton.extend(token)
        with self._lock:
            if answer not in self._answers:
                self._answers[answer] = automaton
                self._num_tokens += len(answer)
            self._evict()

    def answers(self) -> list[tuple[tuple[int, ...], SuffixAutomaton]]:
        """Return the answers and their automata as they are now; automata in the store are never changed."""
        with self._lock:
            return list(self._answers.items())

    def note_use(self, answer: tuple[int, ...]) -> bool:
        """Make an answer the most recently used one. Return False if it is no longer there."""
        with self._lock:
            if answer not in self._answers:
                return False
            self._answers.move_to_end(answer)
            return True

    def clear(self) -> None:
        with self._lock:
            self._answers.clear()
            self._num_tokens = 0

    def _evict(self) -> None:
        while self._num_tokens > self._max_tokens or len(self._answers) > self._max_answers:
            answer, _ = self._answers.popitem(last=False)
            self._num_tokens -= len(answer)


class UserHistories:
    """A `RequestHistory` of at most `max_tokens` tokens for each user, for the `max_users` that were heard of last."""

    def __init__(self, *, max_tokens: int, max_users: int = 64) -> None:
        self._max_tokens, self._max_users = max_tokens, max_users
        self._of_users: OrderedDict[str, RequestHistory] = OrderedDict()

    def of(self, user: str) -> RequestHistory:
        """Return the history of a user, empty for a new one. To be called from one thread."""
        history = self._of_users.setdefault(user, RequestHistory(max_tokens=self._max_tokens))
        self._of_users.move_to_end(user)
        while len(self._of_users) > self._max_users:
            self._of_users.popitem(last=False)
        return history
