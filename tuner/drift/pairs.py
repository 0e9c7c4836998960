"""Pairs of a plain and a drafted window that can be compared (our formulation).

Both windows come from one server and follow one another: text, machine and lengths of the sequences have hardly changed between
them, so neither a change of load nor one of lengths looks like a change of the speed-up. Windows at another load than the profile
was tuned for are left out, and those at other lengths, where the profile promises nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from decoding.arms.belief import PLAIN_NAME
from decoding.arms.chooser import load_of
from tuner.drift.contract import ObservedWindow, Promised

MOST_APART = 2
"""Most windows from the one to the other: 1 if they follow one another, 2 if a window of another arm lies between them."""
MOST_SECONDS_APART = 60.0
"""Most seconds from the end of the one to the end of the other, the duration of the later one left out."""
MOST_LOAD_CHANGE = 1.25
"""Most factor between their numbers of sequences."""
MOST_CONTEXT_CHANGE, SLACK_TOKENS = 1.25, 64
"""Most factor between their mean contexts, and how many tokens more they may always differ by."""
MOST_STOOD_FOR = 64
"""Most windows on each side that a pair stands for half of: a server compares at least that often."""
LENGTHS_BEYOND = 2.0
"""Factor by which contexts may leave the range that the profile was measured on."""


@dataclass(frozen=True)
class WindowPair:
    """A plain and a drafted window, compared. Seconds are multiplied by the number of sequences.

    Tokens and seconds are multiplied by the number of windows that the pair stands for.
    """

    server: str
    number: int
    """Of the later window."""
    ended: float
    plain_tokens: float
    plain_seconds: float
    draft_tokens: float
    draft_seconds: float


def covers(promised: Promised, window: ObservedWindow) -> bool:
    """Return True for a window at the load and the lengths that the profile was tuned for."""
    if load_of(window.sequences) != load_of(promised.batch_size):
        return False
    if promised.contexts is None or window.context is None:
        return True
    shortest, longest = promised.contexts
    return shortest / LENGTHS_BEYOND <= window.context <= longest * LENGTHS_BEYOND


def pairs_of(windows: Iterable[tuple[str, ObservedWindow]], promised: Promised) -> list[WindowPair]:
    """Return the pairs among the windows of servers, by the time at which they ended.

    Each change from plain rounds to the profile's or back gives a pair. Servers compare more often after a change of speed, so a
    pair stands for the windows that are nearer to it than to another one. A window may be in two pairs; `posterior_of` allows for
    that.
    """
    of_servers: dict[str, list[ObservedWindow]] = {}
    for server, window in windows:
        if window.arm in (PLAIN_NAME, promised.name):
            of_servers.setdefault(server, []).append(window)
    pairs = [pair for server, of_server in of_servers.items() for pair in _of_server(server, of_server, promised)]
    return sorted(pairs, key=lambda pair: (pair.ended, pair.server, pair.number))


def _of_server(server: str, windows: Iterable[ObservedWindow], promised: Promised) -> list[WindowPair]:
    covered = [window for window in sorted(windows, key=lambda window: window.number) if covers(promised, window)]
    changes = [
        place
        for place, (first, second) in enumerate(pairwise(covered))
        if (first.arm == PLAIN_NAME) is not (second.arm == PLAIN_NAME) and _are_close(first, second)
    ]
    pairs = []
    for before, place, after in zip([-1, *changes], changes, [*changes[1:], len(covered) - 1], strict=False):
        first, second = covered[place : place + 2]
        plain, draft = (first, second) if first.arm == PLAIN_NAME else (second, first)
        stands_for = min(place - before, MOST_STOOD_FOR) / 2 + min(after - place, MOST_STOOD_FOR) / 2
        pairs.append(
            WindowPair(
                server,
                second.number,
                second.ended,
                plain.tokens * stands_for,
                plain.seconds * plain.sequences * stands_for,
                draft.tokens * stands_for,
                draft.seconds * draft.sequences * stands_for,
            )
        )
    return pairs


def _are_close(first: ObservedWindow, second: ObservedWindow) -> bool:
    """Return True if little but the arm has changed from one window to the next."""
    if second.number - first.number > MOST_APART:
        return False
    if abs(second.ended - second.seconds - first.ended) > MOST_SECONDS_APART:
        return False
    fewer, more = sorted((first.sequences, second.sequences))
    if more > MOST_LOAD_CHANGE * fewer:
        return False
    if first.context is None or second.context is None:
        return True
    shorter, longer = sorted((first.context, second.context))
    return longer <= MOST_CONTEXT_CHANGE * shorter + SLACK_TOKENS
