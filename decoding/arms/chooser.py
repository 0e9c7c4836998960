"""The choice of the arm: Thompson sampling of the speed-ups at the present load (our formulation).

Pure: windows come in with their seconds, and no clock is read. After each window, speed-ups are drawn from the belief at its load.
The arm with the highest one decodes the next window, if it is above the arm in use by a margin. So an arm is tried as often as it
may be the best one: seldom if it is far behind, again and again if it is close. Plain rounds are also run as a control while drafts
are in use, and the best draft while plain rounds are: soon after a change, and less and less often until the next one.

What is lost by trying drafts that seem slower than plain rounds is limited to a small share of the time, as by conservative bandits
(Wu, Shariff, Lattimore and Szepesvari, 2016): a draft that halves the speed is tried seldom, one that is level as often as above.

Loads are numbers of sequences side by side, up to the same power of two, each with a belief of its own. It begins with the
profile's figure, changed by what a round costs at this load and at the profile's own. Before a load has been measured, its belief
also follows the nearest ones that have: a server passes through every load between one sequence and many, and seldom stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decoding.arms.belief import PLAIN, Prior, SpeedBelief
from decoding.arms.windows import FEWEST_TOKENS, TimedWindow

MARGIN = math.log(1.02)
"""How much faster another arm must seem to be taken: 2 %."""
FIRST_CONTROL, CONTROL_PERIOD = 4, 64
"""Windows from one with plain rounds to the next: after a change, and then twice as many each time, up to 64 (1.6 % of all)."""
MOST_LOST = 0.015
"""Share of the time that may be lost by drafts that seem slower than plain rounds."""
FIRST_LOSS = 0.25
"""What may be lost before any time has passed, in windows of plain rounds."""
LOSS_MEMORY = 1 / 512
"""Weight of the latest window in the share that was lost."""
DOUBT = 0.2
"""Standard deviation added to a profile's figure, because the text here may be another."""
UNMEASURED = Prior(0.1, 0.4)
"""Belief on a profile without figures, for one sequence."""
BEYOND = Prior(-0.05, 0.4)
"""Belief beyond the number of sequences that a profile was tuned for: a draft that pays for one seldom pays for many."""
LOAD_STEP = 0.25
"""Standard deviation of the change of a log speed-up from one load to the next."""
COST_DOUBT = 0.2
"""Standard deviation added where a profile's figure is carried over to another load by the costs of its rounds."""
ALARM_SCORE = 1.645
"""Standard deviations below the interval at which the alarm is raised: with a probability of 95 %."""


@dataclass(frozen=True)
class Promise:
    """What a profile says of its speed: the speed-up over plain decoding with its interval, for a number of sequences."""

    speedup: float
    low: float
    high: float
    num_sequences: int = 1


def load_of(num_running: float) -> int:
    """Return the load of a number of sequences side by side: 1 for one, 2 for two and three, 3 for four to seven."""
    return round(num_running).bit_length()


LoadCosts = Mapping[int, float]
"""What a round of a draft costs at a load, in plain passes at the same load."""


def prior(promise: Promise | None, load: int, costs: LoadCosts | None = None) -> Prior:
    """Return the belief on the log speed-up of a profile at a load, by the costs of its rounds if they are known at both loads."""
    own = 1 if promise is None else load_of(promise.num_sequences)
    first = UNMEASURED
    if promise is not None:
        half = math.log(promise.high / promise.low) / 2
        first = Prior(math.log(promise.speedup), math.hypot(half / 1.96, DOUBT))
    if load == own:
        return first
    if costs is not None and own in costs and load in costs:
        # The tokens of a round are the same at any load.
        return Prior(first.mean + math.log(costs[own] / costs[load]), math.hypot(first.sd, COST_DOUBT))
    return BEYOND if load > own else first


def combined(priors: Sequence[Prior]) -> Prior:
    """Return what independent sources say together: each counts by its precision."""
    weights = [each.sd**-2 for each in priors]
    mean = sum(weight * each.mean for weight, each in zip(weights, priors, strict=True)) / sum(weights)
    return Prior(mean, sum(weights) ** -0.5)


class _Load:
    """The choice at one load."""

    def __init__(self, priors: Sequence[Prior], stream: np.random.Generator) -> None:
        self.belief = SpeedBelief(priors)
        self.used = int(np.argmax(self.belief.log_speedups))
        self._stream = stream
        self._period = FIRST_CONTROL
        self._windows_without_control = FIRST_CONTROL - 1  # the first window of drafts is compared at once
        self._seconds, self._lost_seconds = 0.0, 0.0
        self.num_running: float | None = None
        self.last_window = 0
        self._latest = self.used

    def learn(self, window: TimedWindow, number: int) -> None:
        before = window.num_running if self.num_running is None else self.num_running
        self.belief.age(max(number - self.last_window, 1), math.log(window.num_running / before))
        has_changed = self.belief.learn(window.arm, math.log(window.tokens_per_second / window.num_running))
        self.num_running, self.last_window, self._latest = window.num_running, number, window.arm
        self._count_loss(window)
        self._windows_without_control += 1
        if (window.arm == PLAIN) is not (self.used == PLAIN):
            self._windows_without_control, self._period = 0, min(2 * self._period, CONTROL_PERIOD)
        if has_changed:
            self._period = FIRST_CONTROL

    def next_arm(self) -> int:
        affordable = self._affordable()
        if self.belief.is_surprised and affordable[self._latest]:
            return self._latest
        if self._windows_without_control >= self._period:
            return self._control(affordable)
        drawn = np.where(affordable, self.belief.sample(self._stream), -np.inf)
        best = int(np.argmax(drawn))
        if drawn[best] > drawn[self.used] + MARGIN:
            self.used = best
        return self.used

    def _control(self, affordable: np.ndarray) -> int:
        """Return plain rounds while drafts are in use, and the draft that seems best while plain rounds are."""
        if self.used != PLAIN:
            return PLAIN
        best = 1 + int(np.argmax(self.belief.log_speedups[1:]))
        return best if affordable[best] else PLAIN

    def _affordable(self) -> np.ndarray:
        """Return for each arm whether a window of it would keep within the limit what is lost against plain rounds."""
        window = FEWEST_TOKENS * math.exp(-self.belief.log_plain_speed)
        loss = window * np.expm1(-np.minimum(self.belief.log_speedups, 0.0))
        limit = MOST_LOST * self._seconds + FIRST_LOSS * window
        return (loss <= 0.0) | (self._lost_seconds + loss <= limit)

    def _count_loss(self, window: TimedWindow) -> None:
        """Add a window's seconds, and those that plain rounds are believed to have saved, as far as drafts seem slower."""
        share = 0.0
        if self.belief.log_speedups[window.arm] < 0:
            log_speed = math.log(window.tokens_per_second / window.num_running)
            share = max(-math.expm1(log_speed - self.belief.log_plain_speed), 0.0)
        kept = 1.0 - LOSS_MEMORY
        self._seconds = kept * self._seconds + window.seconds
        self._lost_seconds = kept * self._lost_seconds + share * window.seconds


class ArmChooser:
    """Says which arm decodes the next rounds: 0 for plain ones, or the number of a profile, counted from 1.

    `promises` are the profiles' figures, None for one without. Used by one thread; the properties may be read by any.
    """

    def __init__(self, promises: Sequence[Promise | None], *, seed: int = 0) -> None:
        self._promises = promises
        self._costs: Sequence[LoadCosts | None] = [None] * len(promises)
        self._stream = np.random.default_rng(seed)
        self._loads: dict[int, _Load] = {}
        self._load = 1
        self._num_windows = 0
        self.arm = self._at(1).used
        self.is_below_promise = False
        """True while no profile reaches the interval of its speed-up, at the load that it was tuned for."""

    def expect(self, costs: Sequence[LoadCosts]) -> None:
        """Take in what a round of each profile costs by load, before the first window."""
        self._costs = costs
        self._loads.clear()
        self.arm = self._at(self._load).used

    def begin(self, num_running: int) -> int:
        """Return the arm of a window that begins with `num_running` sequences after a change of the load."""
        if (load := load_of(num_running)) != self._load:
            self.arm = self._at(load, anew=True).used
            self._load = load
        return self.arm

    def learn(self, window: TimedWindow) -> int:
        """Take in a window; return the arm of the next one."""
        self._num_windows += 1
        load = load_of(window.num_running)
        at, self._load = self._at(load), load
        at.learn(window, self._num_windows)
        self._compare_with_promises(at.belief)
        self.arm = at.next_arm()
        return self.arm

    def speedups(self) -> list[float]:
        """Return the speed-up of each profile over plain rounds at the present load, as it is believed to be."""
        return [math.exp(value) for value in self._at(self._load).belief.log_speedups[1:]]

    def _at(self, load: int, *, anew: bool = False) -> _Load:
        """Return the choice at a load; `anew` if what was learned at other loads shall count while this one has no window."""
        at = self._loads.get(load)
        if at is None or (anew and at.num_running is None):
            self._loads[load] = at = _Load(self._priors(load), self._stream)
        return at

    def _priors(self, load: int) -> list[Prior]:
        """Return the belief on each profile at a load without windows: from its figures and the nearest loads that have some."""
        known = sorted(each for each, at in self._loads.items() if at.num_running is not None)
        below, above = [each for each in known if each < load], [each for each in known if each > load]
        known_costs = zip(self._promises, self._costs, strict=True)
        sources = [[prior(promise, load, costs) for promise, costs in known_costs]]
        for other in (*below[-1:], *above[:1]):
            belief, doubt = self._loads[other].belief, LOAD_STEP * abs(other - load)
            pairs = zip(belief.log_speedups[1:], belief.sds[1:], strict=True)
            sources.append([Prior(float(mean), math.hypot(sd, doubt)) for mean, sd in pairs])
        return [combined(each) for each in zip(*sources, strict=True)]

    def _compare_with_promises(self, belief: SpeedBelief) -> None:
        """Raise the alarm if every profile tuned for this load is below its interval; clear it if one seems not to be."""
        means, sds = belief.log_speedups, belief.sds
        scores = [
            (math.log(promise.low) - means[arm]) / sds[arm]
            for arm, promise in enumerate(self._promises, 1)
            if promise is not None and load_of(promise.num_sequences) == self._load
        ]
        if scores and min(scores) > ALARM_SCORE:
            self.is_below_promise = True
        elif scores and min(scores) < 0:
            self.is_below_promise = False
