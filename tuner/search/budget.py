"""The time of a search, by one rule: what race and confirmation cost is set aside, and trials get the rest.

`--timeout` covers everything from the start of the command to the profile, resumed runs included; the time of distilling exit
heads is on top of it only where it was given a limit of its own. The rate of plain decoding tells what a sample costs. Where not
everything fits, half of the time goes to trials, and the costliest part of the end is cut, an eighth at a time. Without a timeout
nothing is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from studies.contract import TrialRecord
from tuner.config import FEWEST_SAMPLES, SearchConfig
from tuner.errors import SearchError
from tuner.search.race import LAP
from tuner.stage_clock import Stage, StageClock, spoken

END_SHARE = 0.5
"""Most of the time left that is set aside for race, held-out prompts and results."""
PLAIN_SHARE = 0.15
"""Most of the time left that plain decoding of the tuning prompts may take, unless fewer prompts would be too few."""
TIGHT = 0.5
"""Most of the time left, before passes are timed and texts surveyed, that a trial and the shortest end of a search may take."""
WARMED = 1.2
"""Seconds of decoding a sample, over the same without a warm-up."""
PAIRED = 2 * WARMED
"""Seconds of measuring a candidate as slow as plain decoding, over those of plain decoding: both, and their warm-up."""
HOPED = 1.5 * WARMED
"""The same of a candidate twice as fast as plain decoding, as the shortest end is planned; a slower one takes longer."""
STOCK = 6.0
"""Seconds of comparing with stock generation, over those of plain decoding: two of our decoders, and two slower ones."""
WRITING_SECONDS = 6.0
"""Seconds for the profile, pictures, report and tracking at the end of a search, unless opening the stores took longer."""
FEWEST_TRIED = 3
"""Samples that a trial has at least."""
LEAST_LEFT = 0.05
"""Share of `--timeout` that must be left for a search to be resumed: less would not even load the model and race."""
LEAST_HELD_OUT = 6
"""Held-out samples on which a speed-up is confirmed at least: with fewer an interval says little."""
LEAST_STOCK, MOST_STOCK = 3, 6
"""Held-out samples on which stock generation is compared, at least and at most: on two an interval says nothing."""
SHORTEST = "the shortest search with a result (one trial)"
GRACE = 0.5
"""Share of an expected trial by which a running one may overrun, before it is cut between two prompts."""
SPENT = "its share of the search time is spent"


@dataclass(frozen=True)
class Seconds:
    """Seconds of plain decoding of a sample."""

    first: float = 0.0
    again: float = 0.0
    """Without what need not be computed again, of prompts that were read before."""
    beginning: float = 0.0
    """Of reading a held-out sample, and of what is decoded of it before it is measured."""


@dataclass(frozen=True)
class End:
    """Samples and candidates of a search after its trials. A sample is a prompt, or a batch of prompts."""

    finalists: int = 0
    raced: int = 0
    """Samples of a pass of the race."""
    confirmed: int = 0
    """Candidates that are measured on the held-out samples."""
    held_out: int = 0
    stock: int = 0
    """Samples on which stock generation is compared; 0 for no comparison."""
    beside: float = WRITING_SECONDS
    """Seconds of all else: the results."""
    heat: float = 0.0
    """Seconds of an engine's heat and its servers, until these run."""
    paired: float = PAIRED
    """Seconds of confirming a candidate on a sample, over those of plain decoding."""

    @property
    def least(self) -> End:
        """The smallest sizes that give a result: one finalist, which needs no race."""
        finalists, raced, held_out = min(1, self.finalists), min(LAP, self.raced), min(LEAST_HELD_OUT, self.held_out)
        paired = min(HOPED, self.paired)
        return End(finalists, raced, min(1, self.confirmed), held_out, 0, self.beside, self.heat, paired)

    def seconds(self, plain: Seconds) -> float:
        """Return the seconds of all parts, with those of plain decoding of a sample."""
        return sum(self._parts(plain).values()) + self.beside + self.heat

    def fitted(self, plain: Seconds, seconds: float) -> End:
        """Return these sizes with one off the costliest part until all fit in `seconds`, or no part is above the `least`.

        Two finalists are left to race.
        """
        sizes, floor = self, replace(self.least, finalists=min(2, self.finalists))
        while sizes.seconds(plain) > seconds:
            parts = sizes._parts(plain)
            above = [name for name in parts if getattr(sizes, name) > getattr(floor, name)]
            if not above:
                break
            name = max(above, key=lambda each: parts[each])
            fewer = getattr(sizes, name) - 1
            if name == "stock" and fewer < LEAST_STOCK:  # without it there is room for more of the others
                return replace(self, stock=0).fitted(plain, seconds)
            sizes = replace(sizes, **{name: fewer})
        return sizes

    def _parts(self, plain: Seconds) -> dict[str, float]:
        """Return the seconds that go with each size."""
        race = WARMED * plain.again * (1 + self.finalists) * self.raced if self.finalists > 1 else 0.0
        held_out = self.held_out * (plain.beginning + self.paired * plain.again * self.confirmed)
        stock = STOCK * plain.first * self.stock
        return {"raced": race / 2, "finalists": race / 2, "held_out": held_out, "stock": stock}


@dataclass
class Budget:
    """Seconds of a search, read from its clock; unlimited without a timeout."""

    timeout: float | None
    clock: StageClock
    spent_before: float = 0.0
    """Seconds of earlier runs of the same search."""
    on_top: float = 0.0
    """Seconds of this run that do not count, as they were said to come on top."""
    cuts: list[str] = field(default_factory=list)
    """What was done on fewer samples than configured."""
    plain: Seconds = Seconds()
    end: End = End()
    """Race, confirmation and all after them, as configured."""
    of_trial: int = 0
    """Samples of a trial."""
    unit: str = "prompts"
    """What a sample is, in words."""

    def plan(self, config: SearchConfig, plain: Seconds, beside: float, heat: float = 0.0) -> None:
        """Set the sizes of a search, with the seconds of plain decoding, of the results `beside`, and of an engine's heat."""
        self.plain, self.of_trial = plain, config.samples_per_trial
        self.unit = "prompts" if config.batch_size == 1 else "batches"
        held_out = config.held_out_prompts // config.batch_size
        stock = min(MOST_STOCK, held_out) if config.stock else 0
        self.end = End(config.finalists, 0, len(config.study), held_out, stock, beside, heat)
        self._race_on(config.tuning_prompts // config.batch_size)

    def _race_on(self, tuning: int) -> None:
        self.end = replace(self.end, raced=max(tuning - self.of_trial, min(tuning, FEWEST_SAMPLES)))

    def tuning_samples(self, wanted: int) -> int:
        """Return how many tuning samples can be decoded plainly in their share of the time, of which the race takes the rest.

        Where time is short, a trial gets fewer of them, and then there is no race.
        """
        room = self.end.heat + TIGHT * (self.left - self.end.heat)  # the time of a heat is known
        self.fit_trials(room)
        if self._shortest(self.of_trial) + LAP * self.plain.first <= room:
            least, count = min(wanted, self.of_trial + LAP), wanted
        else:
            least = count = min(wanted, self.of_trial + 1)  # one may be too short
        while count > least and count * self.plain.first > PLAIN_SHARE * self.left:
            count -= 1
        self.cut("tuned", count, wanted, f"tuning {self.unit}")
        self._race_on(count)
        return count

    @property
    def spent(self) -> float:
        """Seconds of this run and earlier ones that count."""
        return self.spent_before + self.clock.elapsed - self.on_top

    @property
    def left(self) -> float:
        """Seconds left; infinite without a timeout, negative after an overrun."""
        return math.inf if self.timeout is None else self.timeout - self.spent

    @property
    def least_seconds(self) -> float:
        """Seconds of the shortest search with a result: plain decoding, a trial on the fewest samples, and confirmation."""
        fewest = min(self.of_trial, FEWEST_TRIED)
        return fewest * self.plain.first + self._shortest(fewest)

    def fit_trials(self, room: float) -> None:
        """Give trials fewer samples until one fits in `room` seconds beside the shortest end of a search."""
        while self.of_trial > FEWEST_TRIED and self._shortest(self.of_trial) > room:
            self.of_trial -= 1

    def _shortest(self, of_trial: int) -> float:
        """Return the seconds of one trial on `of_trial` samples, and of the shortest end."""
        return PAIRED * self.plain.again * of_trial + self.end.least.seconds(self.plain)

    @property
    def trial_seconds(self) -> float:
        """Expected seconds of a trial."""
        return PAIRED * self.plain.again * self.of_trial

    def check(self, needed: float, what: str) -> None:
        """Raise `SearchError` with the way to go on if less than `needed` seconds are left for `what`."""
        if self.timeout is None or self.left >= needed:
            return
        more = enough(self.spent + (needed / TIGHT if what == SHORTEST else needed))
        if self.spent_before:
            raise SearchError(
                f"{spoken(self.spent_before)} of --timeout {spoken(self.timeout)} were spent by earlier runs, and {what} takes "
                f"about {spoken(needed)}: --timeout {more} goes on from the stored trials, and another --experiment searches "
                "anew"
            )
        raise SearchError(
            f"--timeout {spoken(self.timeout)} is too short for this model: {spoken(self.spent)} are spent, and {what} takes "
            f"about {spoken(needed)} more: give --timeout {more} or more, or lower --max-new-tokens or the numbers of prompts"
        )

    def fitted(self, **known: int) -> End:
        """Return race and confirmation as far as they fit in the time left, without a race where not even one of two does.

        `known` sizes replace the configured ones.
        """
        sizes = replace(self.end, **known).fitted(self.plain, self.left)
        return sizes if sizes.seconds(self.plain) <= self.left else replace(sizes, finalists=min(1, sizes.finalists))

    @property
    def left_for_trials(self) -> float:
        """Return the seconds left beside what race and confirmation need, which is half of them at most if that suffices."""
        if self.timeout is None:
            return math.inf
        end = self.end.fitted(self.plain, END_SHARE * self.left).seconds(self.plain)
        if end + self.trial_seconds > self.left:
            end = self.end.least.seconds(self.plain)
        return max(0.0, self.left - end)

    def cut(self, done: str, used: int, configured: int, unit: str) -> None:
        """Note that something was done on fewer samples than configured."""
        if used < configured:
            self.cuts.append(f"{done} on {used} of {configured} {unit}, to keep within --timeout")

    def pace(self, keep: float = 0.0) -> Callable[[], bool]:
        """Return a function that tells, before each of equal steps, if another fits beside `keep` seconds; the first always does.

        A step is expected to take as long as the longest so far.
        """

        def steps() -> Iterator[bool]:
            longest = 0.0
            before = self.left
            yield True
            while True:
                longest, before = max(longest, before - self.left), self.left
                yield before - keep >= longest

        if math.isinf(self.left):
            return lambda: True
        answers = steps()
        return lambda: next(answers)

    def share(self, num_left: int, keep: float) -> Callable[[], bool] | None:
        """Return the `pace` of one of `num_left` candidates, which share what is left beside `keep`; None if that is nothing."""
        left = self.left - keep
        if left < PAIRED * self.plain.again * self.end.least.held_out:
            return None
        return self.pace(keep=self.left - left / num_left)

    def lines(self) -> list[str]:
        """Return the plan of the search in words."""
        each, end = self.trial_seconds, self.end.seconds(self.plain)
        if self.timeout is None:
            return [
                f"no --timeout (estimate): {spoken(each)} a trial, {spoken(end)} for race, confirmation and results"
            ]
        before = f", {spoken(self.spent_before)} of them by earlier runs" if self.spent_before else ""
        on_top = f"; {spoken(self.on_top)} of distilling came on top" if self.on_top else ""
        trials = self.left_for_trials
        lines = [
            f"--timeout {spoken(self.timeout)} for everything (estimate): {spoken(self.spent)} are spent{before}{on_top}; "
            f"to come: {spoken(trials)} for trials, {spoken(each)} each, then {spoken(self.left - trials)} for race, "
            "confirmation and results"
        ]
        if (needed := self.least_seconds) > self.left:
            lines.append(
                f"too short: {SHORTEST} takes about {spoken(needed)} (give a --timeout of {enough(self.spent + needed / TIGHT)})"
            )
        return lines

    def out_of_time(self) -> str:
        """Return where the time went and how to go on, if it is the time that has run out."""
        if self.timeout is None or self.left >= self._shortest(self.of_trial):
            return ""
        stages = self.clock.seconds()
        longest = sorted(stages, key=lambda stage: -stages[stage])[:3]
        where = ", ".join(f"{stage} {spoken(stages[stage])}" for stage in longest if stage is not Stage.OTHER)
        return f" ({where}): --timeout {enough(2 * self.timeout)} goes on from what is stored"


class OutOfTimeError(Exception):
    """No time is left for another sample."""


@dataclass
class TrialTime:
    """When the trials of one study end, so that `keep` seconds are left of the search; fewer while there is no result."""

    budget: Budget
    keep: float
    has_result: Callable[[], bool]

    def __post_init__(self) -> None:
        self.expected = self.budget.trial_seconds

    def took(self, record: TrialRecord) -> None:
        """Expect further trials to take as long as the last one that was measured."""
        if record.repeat_of is None:
            self.expected = record.seconds

    def spent(self) -> str | None:
        """Return the reason that no further trial may begin, or None."""
        return None if self._left >= self.expected else SPENT

    def overdue(self) -> str | None:
        """Return the reason to cut the running trial between two prompts, or None."""
        return None if self._left > -GRACE * self.expected else "cut, as the search time is spent"

    @property
    def _left(self) -> float:
        least = self.budget.end.least.seconds(self.budget.plain)
        return self.budget.left - (self.keep if self.has_result() else min(self.keep, least))


def enough(seconds: float) -> str:
    """Return a round duration of at least `seconds`, as `--timeout` takes it, with a margin of a tenth."""
    wanted = 1.1 * seconds
    return f"{math.ceil(wanted / 10) * 10}s" if wanted < 120 else f"{math.ceil(wanted / 60)}m"
