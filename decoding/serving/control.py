"""When a server drafts: always, but where its own plain rounds are faster for as many sequences.

Pure: rounds come in with their seconds, and no clock is read. While rounds draft, one in 64 is plain, as a control. Each control is
compared with the drafting rounds since the one before it, at the same numbers of sequences: one ratio of speeds. The latest twelve
ratios give a median and its 95 % interval. Where the interval lies below 1, rounds are plain and the control drafts, seldom enough
that it costs no more.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.decoder import Decoder
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal
from decoding.profile import Interval
from decoding.rounds import Round
from decoding.runners.contract import Outputs
from decoding.text import Request, TokenSequence

CONTROL_ROUNDS = 8
"""Rounds per sequence of a control; the one in which a sequence changes is left out."""
USUAL_ROUNDS = 63 * (CONTROL_ROUNDS + 1)
"""Rounds per sequence from one control to the next."""
FIRST_ROUNDS = 2 * (CONTROL_ROUNDS + 1)
"""The same, until there is an interval."""
KEPT_RATIOS, FEWEST_RATIOS = 12, 6
"""The interval is that of the latest ratios; with fewer than six there is no 95 % interval."""

log = logging.getLogger(__name__)


def load_of(num_sequences: int) -> int:
    """Return the fewest sequences of the same load: 1, 2, 4, 8 ..."""
    return 1 << (num_sequences.bit_length() - 1)


def load_name(load: int) -> str:
    """Return the numbers of sequences that a load stands for: `1`, `2-3`, `4-7` ..."""
    return "1" if load == 1 else f"{load}-{2 * load - 1}"


def median_interval(values: Sequence[float]) -> Interval | None:
    """Return the median with its 95 % interval by order statistics, which outliers do not move; None for fewer than six."""
    num_values, cut, tail = len(values), 0, 0
    while 2 * (tail := tail + math.comb(num_values, cut)) <= 0.05 * 2**num_values:
        cut += 1
    if not cut:
        return None
    ordered = sorted(values)
    return Interval(value=statistics.median(ordered), ci95=(ordered[cut - 1], ordered[-cut]))


class _Load:
    """What is known of one load. `pays` says whether its usual rounds draft; those of a control do the opposite."""

    def __init__(self, *, pays: bool) -> None:
        self.pays, self.is_control = pays, False
        self.speedup: Interval | None = None
        self._ratios: deque[float] = deque(maxlen=KEPT_RATIOS)
        self._begin_usual_rounds()

    @property
    def drafts(self) -> bool:
        return self.pays is not self.is_control

    def _begin_usual_rounds(self) -> None:
        self.is_control, self._num_rounds = False, 0.0
        self._usual: dict[int, tuple[int, float]] = {}
        """Tokens and seconds of the sequences, by their number."""
        self._expected_seconds, self._control_seconds = 0.0, 0.0

    @property
    def _rounds_until_control(self) -> float:
        if self.speedup is None:
            return FIRST_ROUNDS
        return USUAL_ROUNDS / min(1.0 if self.pays else self.speedup.value, 1.0)

    def add(self, num_running: int, rounds: Sequence[Round], seconds: float) -> None:
        """Take in seconds in which rounds ended; begin or end a control if it is time to."""
        self._num_rounds += len(rounds) / num_running
        num_tokens = sum(len(each.tokens) for each in rounds)
        usual_tokens, usual_seconds = self._usual.get(num_running, (0, 0.0))
        if not self.is_control:
            self._usual[num_running] = usual_tokens + num_tokens, usual_seconds + seconds
            if self._num_rounds >= self._rounds_until_control:
                self.is_control, self._num_rounds = True, 0.0
            return
        if usual_tokens:
            self._control_seconds += seconds
            self._expected_seconds += num_tokens * usual_seconds / usual_tokens
        if self._num_rounds >= CONTROL_ROUNDS:
            if self._control_seconds > 0 and self._expected_seconds > 0:
                ratio = self._control_seconds / self._expected_seconds
                self._ratios.append(ratio if self.pays else 1 / ratio)
                self.speedup = median_interval(self._ratios)
            self._begin_usual_rounds()


class DraftControl:
    """Says whether rounds draft, at the number of sequences that run. One thread uses it; any may read the properties."""

    def __init__(self) -> None:
        self._loads = {1: _Load(pays=True)}
        self._load = 1
        self._num_left_out: float = math.inf

    @property
    def drafts(self) -> bool:
        return self._loads[self._load].drafts

    @property
    def speedups(self) -> dict[int, Interval]:
        """The speed of drafting over plain rounds, by load, where it is known."""
        return {load: at.speedup for load, at in self._loads.copy().items() if at.speedup is not None}

    def choose(self, num_sequences: int) -> None:
        """Choose for this many sequences that run or are going to: the first of many need not draft until the last has come."""
        load, before = load_of(num_sequences), self.drafts
        if load not in self._loads:
            # A draft that does not pay for few sequences seldom pays for more.
            self._loads[load] = _Load(pays=self._loads[max(each for each in self._loads if each < load)].pays)
        self._load = load
        self._note_change(before)

    def observe(self, num_running: int, rounds: Sequence[Round], seconds: float) -> None:
        """Take in `seconds` of decoding `num_running` sequences, in which `rounds` ended.

        Seconds in which prompts were read must be left out.
        """
        if load_of(num_running) != self._load:
            return
        if self._num_left_out < num_running:  # rounds that began before the change
            self._num_left_out += len(rounds)
            return
        at, before = self._loads[self._load], self.drafts
        at.add(num_running, rounds, seconds)
        if at.speedup is not None and at.pays is not (pays := at.speedup.ci95[1] >= 1):
            at.pays = pays
            how = "drafting" if pays else "plainly"
            log.info(
                "drafts have %s of plain speed with %s requests: decoding %s", at.speedup, load_name(self._load), how
            )
        self._note_change(before)

    def _note_change(self, before: bool) -> None:
        if self.drafts is not before:
            self._num_left_out = 0


class _ControlledDrafter(Drafter):
    """A drafter that proposes nothing while `drafts()` is false; its rounds are those of plain decoding then."""

    def __init__(self, drafter: Drafter, drafts: Callable[[], bool]) -> None:
        self._drafter, self._drafts = drafter, drafts

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        if self._drafts():
            return self._drafter.prefill(sequence, cache)
        return self._drafter.prefill_target(sequence, cache)

    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        if self._drafts():
            return self._drafter.draft(sequence, cache, controller, request, limit)
        return Proposal(0, None, steered=False)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        return self._drafter.verify(sequence, cache, draft)


def controlled(decoder: Decoder, control: DraftControl) -> Decoder:
    """Return a decoder, which must draft, that drafts while the control says so. Both share controllers."""
    assert decoder.drafter is not None, "plain decoding needs no control"
    other = copy.copy(decoder)
    other.drafter = _ControlledDrafter(decoder.drafter, lambda: control.drafts)
    return other
