"""Windows of a simulated server, whose arms are chosen as `sdtune serve` chooses them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from decoding.arms.chooser import ArmChooser, Promise
from decoding.arms.windows import TimedWindow
from tuner.drift.contract import ObservedWindow

ROUNDS = 8
SERVER = "a" * 32
PROFILE = "tuned"


@dataclass(frozen=True)
class Traffic:
    """A stretch of traffic. Seconds of a pass, and so speeds, change with load and context; the speed-up does not."""

    windows: int
    speedup: float = 1.5
    sequences: int = 1
    prompt: int = 200
    answer: int = 200
    machine_sd: float = 0.1
    """Standard deviation of the log speed of the machine, which lasts for about twenty windows."""
    window_sd: float = 0.05
    """Standard deviation of what each window has for itself."""
    text_sd: float = 0.15
    """Standard deviation of the log speed-up from text to text."""
    pauses: float = 0.005
    """Share of windows that something slows down threefold."""


class SimulatedServer:
    """Windows with numbers, until now."""

    def __init__(self, promise: Promise | None, *, seed: int, server: str = SERVER) -> None:
        self.server = server
        self._chooser = ArmChooser([promise], seed=seed)
        self._chance = random.Random(seed)
        self._number, self._now, self._slowness = 0, 1e9, 0.0

    def serve(self, traffic: Traffic) -> Iterator[tuple[str, ObservedWindow]]:
        """Yield the windows of some traffic."""
        chance, left, written, text = self._chance, 0.0, 0.0, 0.0
        arm = self._chooser.begin(traffic.sequences)
        for _ in range(traffic.windows):
            if left <= 0:
                written, left = 0.0, chance.expovariate(1 / traffic.answer)
                text = chance.gauss(traffic.text_sd**2 / 2, traffic.text_sd)  # the harmonic mean is the speed-up
            speedup = traffic.speedup * math.exp(text)
            self._slowness = 0.95 * self._slowness + chance.gauss(0, math.sqrt(1 - 0.95**2)) * traffic.machine_sd
            context = traffic.prompt + written
            noise = math.exp(self._slowness + chance.gauss(0, traffic.window_sd))
            noise *= 3.0 if chance.random() < traffic.pauses else 1.0
            pass_seconds = 0.02 * (1 + context / 1000) * (1 + traffic.sequences / 8) * noise
            rounds = ROUNDS * traffic.sequences
            # A drafted round takes one and a half passes.
            per_round = 1.0 if arm == 0 else 1.5 * speedup
            tokens = sum(int(per_round) + (chance.random() < per_round % 1) for _ in range(rounds))
            seconds = ROUNDS * pass_seconds * (1.0 if arm == 0 else 1.5)
            left, written = left - tokens / traffic.sequences, written + tokens / traffic.sequences
            self._number, self._now = self._number + 1, self._now + seconds
            window = TimedWindow(arm, traffic.sequences, rounds, tokens, seconds, 3 * rounds * arm, (), context)
            yield self.server, observed(window, self._number, self._now)
            arm = self._chooser.learn(window)


def observed(window: TimedWindow, number: int, ended: float) -> ObservedWindow:
    """Return a window as a server reports it."""
    return ObservedWindow(
        number=number,
        ended=ended,
        arm=PROFILE if window.arm else "plain",
        sequences=window.num_running,
        context=window.context,
        rounds=window.num_rounds,
        tokens=window.num_tokens,
        seconds=window.seconds,
        drafted=window.num_drafted,
        accepted_lengths=window.accepted_lengths,
    )


def quiet(traffic: Traffic) -> Traffic:
    """Return the traffic without any noise."""
    return replace(traffic, machine_sd=0.0, window_sd=0.0, text_sd=0.0, pauses=0.0)
