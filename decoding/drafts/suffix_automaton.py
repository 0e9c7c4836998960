"""Online suffix automaton of a token sequence (Blumer et al. 1985), with the number and the latest end of occurrences.

A state stands for the suffixes that end at the same positions; its suffix link leads to the next shorter ones. SAM-Decoding
(arXiv 2411.10666) drafts from such an automaton; the frequencies follow SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

ROOT = 0
MOST_COUNTED = 32
"""Suffixes whose occurrences a new token updates, the longest first: a bound on the work in a loop, where every suffix recurs."""


class SuffixAutomaton:
    """The suffix automaton of the tokens given to `extend`, in amortised constant time per token.

    Of `n` tokens it has at most `2 n` states, of about 0.4 kB each. Not for several writers at a time; readers need no lock once
    nothing is appended.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._end = [-1]
        self._best: list[int | None] = [None]
        """The most frequent next token of each state, as far as it was counted."""
        self._last = ROOT
        self.num_tokens = 0

    def extend(self, token: int) -> None:
        before = self._last
        new = self._add({}, self._length[before] + 1, ROOT)
        state = before
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._ending_in(state, token)
        self._last = new
        self._note_end(new)
        self._note_next(before, token)
        self.num_tokens += 1

    def repeated(self) -> tuple[int, int]:
        """Return the state and the length of the longest suffix that also occurs earlier; the root and 0 without one."""
        state = max(self._link[self._last], ROOT)
        return state, self._length[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return state and length of the longest match after a text with this match goes on with `token`."""
        while state > ROOT and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        found = self._next[state].get(token)
        return (ROOT, 0) if found is None else (found, length + 1)

    def continuation(self, state: int, num_tokens: int, *, min_match: int, min_token_prob: float) -> list[int]:
        """Return at most `num_tokens` tokens after `state`, each the most frequent one; the latest among equals.

        Ends where the estimated probability of all tokens so far falls below `min_token_prob`. Where the tokens end, shorter
        suffixes of at least `min_match` tokens go on: a loop is continued to the full length.
        """
        tokens: list[int] = []
        probability = 1.0
        while len(tokens) < num_tokens and (state := self._with_next(state)) and self._length[state] >= min_match:
            token, state, share = self._most_frequent(state)
            probability *= share
            if probability < min_token_prob:
                break
            tokens.append(token)
        return tokens

    def _with_next(self, state: int) -> int:
        """Return the state of the longest suffix that something follows; the root if it is the empty one."""
        while state > ROOT and not self._next[state]:
            state = self._link[state]
        return max(state, ROOT)

    def _most_frequent(self, state: int) -> tuple[int, int, float]:
        """Return the most frequent token after a state, the state that it leads to, and its share of all that followed."""
        following, token = self._next[state], self._best[state]
        if len(following) == 1 or token is None:
            token, reached = next(iter(following.items()))
            return token, reached, 1.0 / len(following)
        reached, ends_here = following[token], self._end[state] == self.num_tokens - 1
        # Counts are bounded (`MOST_COUNTED`), so that a state may have been counted less often than what follows it.
        return token, reached, min(1.0, self._count[reached] / max(1, self._count[state] - ends_here))

    def _ending_in(self, state: int, token: int) -> int:
        """Return the state of exactly the longest text of `state` and `token`, split off from a longer one if necessary."""
        reached = self._next[state][token]
        length = self._length[state] + 1
        if self._length[reached] == length:
            return reached
        split = self._add(dict(self._next[reached]), length, self._link[reached])
        self._count[split], self._end[split] = self._count[reached], self._end[reached]
        self._best[split] = self._best[reached]
        while state >= 0 and self._next[state].get(token) == reached:
            self._next[state][token] = split
            state = self._link[state]
        self._link[reached] = split
        return split

    def _note_end(self, state: int) -> None:
        for _ in range(MOST_COUNTED):
            if state <= ROOT:
                return
            self._count[state] += 1
            self._end[state] = self.num_tokens
            state = self._link[state]

    def _note_next(self, state: int, token: int) -> None:
        """Compare `token` with the most frequent next token of each suffix that it has just followed."""
        count = self._count
        for _ in range(MOST_COUNTED):
            if state <= ROOT:
                return
            following, best = self._next[state], self._best[state]
            if best is None or count[following[token]] >= count[following[best]]:
                self._best[state] = token
            state = self._link[state]

    def _add(self, following: dict[int, int], length: int, link: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._count.append(0)
        self._end.append(self.num_tokens)
        self._best.append(None)
        return len(self._next) - 1
