"""A decoder whose rounds are drafted by the arm that is fastest at the present load and text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from decoding.acceptance import Acceptance, Greedy
from decoding.arms.arm import Arm
from decoding.arms.belief import PLAIN_NAME
from decoding.arms.chooser import ArmChooser
from decoding.arms.load_costs import measure_load_costs
from decoding.arms.rounds import ArmRounds
from decoding.arms.windows import OpenWindow, TimedWindow
from decoding.decode import NewCache, Request, speculative
from decoding.drafters.contract import Drafter
from decoding.rounds import Prefill, Round

WindowListener = Callable[[str, TimedWindow], None]
"""Told the name of the arm and the window. Called between two passes: it must return at once."""

log = logging.getLogger(__name__)


class ArmedDecoder:
    """Decodes with the arms of one target; `arms` has at least one, and each drafts.

    One thread decodes and calls `observe`. The arm changes for all sequences at once, at the next round of each. Raises ValueError
    for an arm without drafts.
    """

    def __init__(
        self, arms: Sequence[Arm], *, chooser: ArmChooser | None = None, listener: WindowListener | None = None
    ) -> None:
        drafters = [arm.decoder.drafter for arm in arms]
        self._drafters: list[Drafter] = [drafter for drafter in drafters if drafter is not None]
        if len(self._drafters) < len(arms) or not arms:
            raise ValueError("every arm drafts; plain rounds are always an arm")
        self.arms = tuple(arms)
        self.names = (PLAIN_NAME, *_unique([arm.name for arm in arms]))
        """Names of the arms, plain rounds first."""
        self.chooser = chooser or ArmChooser([arm.promise for arm in arms])
        self.target = arms[0].decoder.target
        self._with_head = [index for index, arm in enumerate(arms) if arm.has_head]
        self._listener = listener
        self._window = OpenWindow(self.chooser.arm)

    @property
    def max_drafted(self) -> int:
        """Most positions that a round adds to a sequence."""
        return max(arm.decoder.max_drafted for arm in self.arms)

    def prepare(
        self, shortest: int, longest: int, num_sequences: int = 1, *, acceptances: Sequence[Acceptance] = (Greedy(),)
    ) -> None:
        """Prepare all arms; see `Decoder.prepare`."""
        for arm in self.arms:
            arm.decoder.prepare(shortest, longest, num_sequences, acceptances=acceptances)

    def measure_loads(self, num_sequences: int) -> None:
        """Let the choice begin with what rounds cost here, by measuring them for up to `num_sequences` side by side.

        It takes a few seconds. Nothing may be decoded meanwhile; choices that were learned before are forgotten.
        """
        costs = measure_load_costs(self.arms, num_sequences)
        for name, found in zip(self.names[1:], costs, strict=True):
            log.info(
                "a round of %s in plain passes, by load: %s",
                name,
                {load: round(cost, 2) for load, cost in found.items()},
            )
        self.chooser.expect(costs)
        self._window = OpenWindow(self.chooser.arm)

    def loop(
        self, request: Request, row: int, new_cache: NewCache, *, fresh: bool = False
    ) -> Iterator[Prefill | Round]:
        """Return the loop that decodes a sequence in `row`; see `Decoder.loop`.

        A `fresh` one is always drafted by the first arm: the choice depends on time, and its samples would.
        """
        if fresh:
            return self.arms[0].decoder.loop(request, row, new_cache, fresh=True)
        return self._chosen_rounds(request, row, new_cache)

    def _chosen_rounds(self, request: Request, row: int, new_cache: NewCache) -> Iterator[Prefill | Round]:
        with ExitStack() as stack:
            controllers = [stack.enter_context(arm.decoder.steering(row)) for arm in self.arms]
            rounds = ArmRounds(self._drafters, self._with_head, controllers, lambda: self.chooser.arm)
            yield from speculative(self.target, rounds, rounds.controller, request, new_cache)

    def foresee(self, num_running: int) -> None:
        """Choose for this many sequences side by side, if that is another load than before.

        To be called while prompts are read, with the sequences that are going to run: the first ones need not draft for a load that
        passes at once.
        """
        if self._window.is_empty or not self._window.fits(num_running):
            arm = self.chooser.begin(num_running)
            if arm != self._window.arm or not self._window.is_empty:
                self._window = OpenWindow(arm)

    def observe(self, num_running: int, rounds: Sequence[Round], seconds: float) -> None:
        """Take in `seconds` of decoding `num_running` sequences, in which `rounds` ended.

        Seconds in which prompts were read must be left out.
        """
        self.foresee(num_running)
        window = self._window.add(num_running, rounds, seconds)
        if window is None:
            return
        was_below = self.chooser.is_below_promise
        self._window = OpenWindow.after(self.chooser.learn(window), window.arm)
        if self.chooser.is_below_promise is not was_below:
            self._log_alarm()
        if self._listener is not None:
            self._listener(self.names[window.arm], window)

    def _log_alarm(self) -> None:
        found = ", ".join(
            f"{name} {speedup:.2f}" for name, speedup in zip(self.names[1:], self.chooser.speedups(), strict=True)
        )
        if self.chooser.is_below_promise:
            log.warning("speed-ups are below the intervals of the profiles: %s", found)
        else:
            log.warning("speed-ups are within the intervals of the profiles again: %s", found)


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, with a number where one occurs again."""
    return [
        name if name not in (PLAIN_NAME, *names[:index]) else f"{name} ({index + 1})"
        for index, name in enumerate(names)
    ]
