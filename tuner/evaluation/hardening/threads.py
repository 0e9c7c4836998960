"""One decoder used by several threads at the same time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from decoding.errors import first_line

RIGHT, WRONG = "right", "wrong"
SWITCH_SECONDS = 1e-5
"""Python's switch interval while threads run: five hundred times shorter than by default, so that races show."""

Write = Callable[[Sequence[int]], Sequence[int]]
"""Returns the tokens that a decoder generates after a prompt."""


def decode_in_threads(
    write: Write, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], num_threads: int, num_texts: int
) -> Counter[str]:
    """Let threads share `write` for `num_texts` texts, and count those that are `RIGHT`, `WRONG`, or refused, by the error.

    `expected[i]` are the tokens after `prompts[i]`; the threads take the prompts in turn.
    """

    def outcome(number: int) -> str:
        index = number % len(prompts)
        try:
            tokens = list(write(prompts[index]))
        except Exception as error:  # the outcome that is counted
            return f"{type(error).__name__}: {first_line(error)}"
        return RIGHT if tokens == list(expected[index]) else WRONG

    with _switching(SWITCH_SECONDS), ThreadPoolExecutor(num_threads) as pool:
        return Counter(pool.map(outcome, range(num_texts)))


@contextmanager
def _switching(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
