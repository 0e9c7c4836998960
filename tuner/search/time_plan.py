"""Seconds of a search by stage, planned from the measured rate of plain decoding (our formulation).

Race and confirmation come last and decide, so their time is set aside before the first trial. What does not fit is cut in this
order: passes of the race beyond the first, prompts of the comparison with stock generation or all of it, prompts of the race and
held-out prompts, finalists. Candidates are planned to be as slow as plain decoding, as most are before the search knows better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tuner.config import FEWEST_SAMPLES, SearchConfig
from tuner.measuring.turns import WARM_UP_TOKENS
from tuner.search.heat import HEAT
from tuner.search.race import FEWEST_TO_JUDGE, LAP
from tuner.stage_clock import Stage, spoken

END_SHARE = 0.5
"""Most of the time left that is set aside for race, held-out prompts and results."""
PLAIN_SHARE = 0.15
"""Most of the time left that plain decoding of the tuning prompts may take, unless fewer prompts would be too few."""
RACE_SHARE = 0.4
"""Share of the race in the time for race and held-out prompts, where not all prompts fit."""
LEAST_HELD_OUT = 6
"""Held-out prompts, or batches, on which a speed-up is confirmed at least: with fewer an interval says little."""
LEAST_FINALISTS = 2
WRITING_SECONDS = 6.0
"""Seconds for the profile, pictures, report and tracking at the end of a search, unless opening the stores took longer.

In three searches on the demo model with three trials each, they took 1.4 to 1.5 s of processor time on one core, and opening the
stores 2.1 to 2.5 s; the rest is for more trials and slower processors.
"""
NUM_TEXTS = 3
"""Held-out prompts on the page of texts. The winner continues those once more whose text differs from plain decoding's."""
MOST_STOCK = 6
"""Held-out prompts, or batches, on which stock generation is compared at most."""
LEAST_STOCK = 3
"""And at least: on two an interval says nothing."""
STOCK_SHARE = 0.25
"""Share of the comparison with stock generation in the time for the end of a search, where not all of that fits."""
STOCK_SPEED = 0.5
"""Expected speed of stock generation over our own plain decoding: on small models it has 0.4 to 1 of it."""
TRIAL_MARGIN = 1.2
"""Expected seconds of a trial over those of its decoding: warm-up of rules, preparation, choosing."""


@dataclass(frozen=True)
class PlainRate:
    """Measured rate of plain decoding, for one prompt or for a batch in lockstep."""

    prefill_seconds: float
    token_seconds: float
    """Seconds of one pass after the prefill."""
    new_tokens: float
    """Tokens of a continuation."""

    @property
    def sample(self) -> float:
        """Seconds of decoding one sample: a prompt or a batch."""
        return self.prefill_seconds + self.token_seconds * max(0.0, self.new_tokens - 1)

    def measured(self, num_samples: int, *, num_calls: int = 1, speed: float = 1.0) -> float:
        """Return the seconds of measuring a candidate beside plain decoding, in `num_calls` parts, each warmed up.

        `speed` is the candidate's expected speed-up.
        """
        warm_up = 2 * (self.prefill_seconds + WARM_UP_TOKENS * self.token_seconds)
        return num_calls * warm_up + num_samples * self.sample * (1 + 1 / speed)


@dataclass(frozen=True)
class Sizes:
    """Numbers of samples and candidates of a search, as configured. A sample is a prompt, or a batch of them."""

    tuning: int
    least_tuning: int
    """Tuning samples of a trial and of one lap of the race; surveys take what there is."""
    held_out: int
    per_trial: int
    finalists: int
    confirmed: int
    """Candidates that are measured on the held-out prompts, about."""
    most_trials: int
    stock: int = 0
    """Samples on which stock generation is compared."""
    writing_seconds: float = WRITING_SECONDS
    """Seconds of the results, the page of texts aside."""
    texts: int = 0
    """Samples that are decoded again for the page of texts: those in low precision, as texts with ties are not known."""
    heat: int = 0
    """Candidates of the heat in an engine; 0 for a search that stays in this process."""
    start_seconds: float = 0.0
    """Seconds until a server of the engine answers."""

    @classmethod
    def of(
        cls,
        config: SearchConfig,
        *,
        may_have_ties: bool = False,
        opening_seconds: float = 0.0,
        heat: int = 0,
        start_seconds: float = 0.0,
    ) -> Sizes:
        """Return the sizes of a configured search, in low precision or not (`may_have_ties`).

        `opening_seconds` is what opening the stores took: imports and calls to them, of which writing the results takes no more.
        Both grow together where the machine is busy or a server far away. `heat` and `start_seconds` are those of an engine.
        """
        size = config.batch_size
        tuning, per_trial = config.tuning_prompts // size, config.samples_per_trial
        most = [config.study_settings(name).max_trials for name in config.study]
        return cls(
            tuning=tuning,
            least_tuning=min(tuning, per_trial + LAP),
            held_out=config.held_out_prompts // size,
            per_trial=per_trial,
            finalists=config.finalists,
            confirmed=len(config.study),
            most_trials=sum(min(each, config.trials or each) for each in most),
            writing_seconds=max(WRITING_SECONDS, opening_seconds),
            stock=min(MOST_STOCK, config.held_out_prompts // size) if config.stock else 0,
            texts=-(-NUM_TEXTS // size) if may_have_ties else 0,
            heat=heat,
            start_seconds=start_seconds,
        )


@dataclass(frozen=True)
class EndPlan:
    """Race and confirmation: candidates, samples and seconds."""

    finalists: int
    raced: int
    confirmed: int
    held_out: int
    race_seconds: float
    """Seconds of the race, and of the heat before it."""
    lap_seconds: float
    """Seconds of the race's first lap, which is always run."""
    held_out_seconds: float
    """Seconds of the held-out prompts: their plain decoding and the confirmation."""
    stock: int
    """Samples on which stock generation is compared; 0 for no comparison."""
    stock_seconds: float
    writing_seconds: float
    """Seconds of the results: profile, page of texts, report, tracking."""
    saved: float = 0.0
    """Seconds saved for more, which do not suffice for it yet."""

    @property
    def after_race(self) -> float:
        """Seconds to set aside for what follows the race."""
        return self.held_out_seconds + self.after_confirmation

    @property
    def after_confirmation(self) -> float:
        """Seconds to set aside for what follows the confirmation."""
        return self.stock_seconds + self.writing_seconds

    @property
    def seconds(self) -> float:
        """Seconds of all parts."""
        return self.race_seconds + self.after_race

    @property
    def set_aside(self) -> float:
        """Seconds to set aside."""
        return self.seconds + self.saved


def plan_end(sizes: Sizes, rate: PlainRate, seconds: float, *, speed: float = 1.0) -> EndPlan:
    """Return race and confirmation within `seconds`, or the least ones if these take longer.

    Each part has a share that only grows with `seconds`, and takes what fits in it. So more time never cuts anything, and no part
    takes what another one leaves over.
    """
    raced = _most_raced(sizes)
    whole = _end(replace(sizes, stock=0), rate, sizes.finalists, raced, sizes.held_out, speed)
    least = least_end(sizes, rate, speed=speed)
    seconds = max(seconds, least.seconds)
    for_stock = _for_stock(sizes, rate, seconds, least.seconds, speed)
    stock = stock_samples(sizes, rate, max(for_stock, seconds - whole.seconds), speed=speed)
    spare = min(whole.seconds, seconds - for_stock) - whole.writing_seconds
    share = min(whole.race_seconds, RACE_SHARE * spare, spare - least.held_out_seconds)
    for_race = max(least.race_seconds, share)
    for_held_out = min(whole.held_out_seconds, spare - for_race)
    for_race = max(for_race, spare - for_held_out)
    confirmed = _most(sizes.confirmed, lambda n: _held_out_seconds(rate, n, least.held_out, speed) <= for_held_out)
    confirmed = max(confirmed, least.confirmed)
    # All candidates on the fewest prompts come before one on more.
    most_held_out = sizes.held_out if confirmed == sizes.confirmed else least.held_out
    held_out = _most(most_held_out, lambda n: _held_out_seconds(rate, confirmed, n, speed) <= for_held_out)
    fewest = min(raced, FEWEST_TO_JUDGE)
    for_laps = for_race - _heat_seconds(sizes, rate)
    finalists = _most(sizes.finalists, lambda n: _race_seconds(rate, n, fewest, speed) <= for_laps)
    finalists = max(finalists, least.finalists)
    prompts = _most(raced, lambda n: _race_seconds(rate, finalists, n, speed) <= for_laps)
    planned = _end(
        replace(sizes, stock=stock, confirmed=confirmed),
        rate,
        finalists,
        max(prompts, least.raced),
        max(held_out, least.held_out),
        speed,
    )
    most = whole.seconds + stock_seconds(rate, sizes.stock, speed=speed)
    return replace(planned, saved=max(0.0, min(seconds, most) - planned.seconds))


def _for_stock(sizes: Sizes, rate: PlainRate, seconds: float, least: float, speed: float) -> float:
    """Return the part of `seconds` for the comparison with stock generation.

    It is compared on a few samples or not at all. Before these fit, all further seconds are saved for them, so that nothing else
    has to be cut when they do.
    """
    if sizes.stock == 0:
        return 0.0
    fewest = stock_seconds(rate, min(sizes.stock, LEAST_STOCK), speed=speed)
    enough = max(fewest / STOCK_SHARE, least + fewest)
    if seconds < enough:
        return max(0.0, fewest - (enough - seconds))
    return min(stock_seconds(rate, sizes.stock, speed=speed), fewest + STOCK_SHARE * (seconds - enough))


def stock_samples(sizes: Sizes, rate: PlainRate, seconds: float, *, speed: float = 1.0) -> int:
    """Return the number of samples on which stock generation can be compared in `seconds`; 0 if they are too few."""
    count = _most(sizes.stock, lambda n: stock_seconds(rate, n, speed=speed) <= seconds)
    return count if count >= min(sizes.stock, LEAST_STOCK) else 0


def stock_seconds(rate: PlainRate, num_samples: int, *, speed: float = 1.0) -> float:
    """Return the seconds of plain decoding, the winner, `generate` and its prompt lookup on `num_samples` samples."""
    if num_samples == 0:
        return 0.0
    each = 1 + 1 / speed + 2 / STOCK_SPEED
    return each * (num_samples * rate.sample + rate.prefill_seconds + WARM_UP_TOKENS * rate.token_seconds)


def least_end(sizes: Sizes, rate: PlainRate, *, speed: float = 1.0) -> EndPlan:
    """Return the least race and confirmation: one lap of two finalists, and the winner on the fewest held-out samples."""
    least = replace(sizes, confirmed=1, stock=0)
    finalists, held_out = min(sizes.finalists, LEAST_FINALISTS), min(sizes.held_out, LEAST_HELD_OUT)
    return _end(least, rate, finalists, min(LAP, _most_raced(sizes)), held_out, speed)


def _most_raced(sizes: Sizes) -> int:
    """Return the samples of one pass of the race: those that no trial decodes, or a few of those if there are none."""
    return max(sizes.tuning - sizes.per_trial, min(sizes.tuning, FEWEST_SAMPLES))


@dataclass(frozen=True)
class TimePlan:
    """Planned seconds of a search from now on."""

    tuning: int
    """Tuning samples to decode."""
    num_trials: int
    seconds: Mapping[Stage, float]
    end: EndPlan
    trial_seconds: float

    @property
    def total(self) -> float:
        """Seconds of all stages to come."""
        return sum(self.seconds.values())


def trial_seconds(sizes: Sizes, rate: PlainRate) -> float:
    """Return the expected seconds of a trial."""
    return TRIAL_MARGIN * rate.measured(sizes.per_trial)


def least_seconds(sizes: Sizes, rate: PlainRate, preparing: float) -> float:
    """Return the seconds of the shortest search with a result: one trial and the least race and confirmation."""
    needed = sizes.least_tuning * rate.sample + preparing + trial_seconds(sizes, rate)
    return needed + least_end(sizes, rate).seconds


def plan_search(sizes: Sizes, rate: PlainRate, left: float, preparing: float) -> TimePlan:
    """Return the plan of a search with `left` seconds, infinite without a limit, of which studies prepare for `preparing`."""
    each = trial_seconds(sizes, rate)
    most, least = sizes.tuning * rate.sample, sizes.least_tuning * rate.sample
    beside = preparing + each + least_end(sizes, rate).seconds
    for_plain = max(least, min(most, PLAIN_SHARE * left, left - beside))
    tuning = max(sizes.least_tuning, _most(sizes.tuning, lambda n: n * rate.sample <= for_plain))
    after = left - for_plain  # not what the prompts take: one more of them would then cost a trial
    end = plan_end(replace(sizes, tuning=tuning), rate, min(END_SHARE * after, after - preparing - each))
    num_trials = sizes.most_trials
    if math.isfinite(left):
        num_trials = min(num_trials, max(1, int((after - preparing - end.set_aside) / each)))
    stages = {
        Stage.PLAIN: tuning * rate.sample + end.held_out * rate.sample,
        Stage.CHOOSING: preparing,
        Stage.TRIALS: num_trials * each,
        Stage.RACE: end.race_seconds,
        Stage.CONFIRMATION: end.held_out_seconds - end.held_out * rate.sample,
        Stage.STOCK: end.stock_seconds,
        Stage.WRITING: end.writing_seconds,
    }
    return TimePlan(tuning, num_trials, stages, end, each)


def plan_lines(plan: TimePlan, sizes: Sizes, *, unit: str = "prompts") -> Iterator[str]:
    """Yield the plan in words, one stage a line; `unit` names the samples."""
    heat = f"; before it, a heat of {sizes.heat} candidates or more" if sizes.heat else ""
    notes = {
        Stage.PLAIN: f"{plan.tuning} of {sizes.tuning} tuning {unit}, {plan.end.held_out} of {sizes.held_out} held-out ones",
        Stage.CHOOSING: "costs of passes, surveys",
        Stage.TRIALS: f"about {plan.num_trials}, {spoken(plan.trial_seconds)} each",
        Stage.RACE: f"{plan.end.finalists} finalists on {plan.end.raced} {unit}{heat}",
        Stage.CONFIRMATION: f"on {plan.end.held_out} of {sizes.held_out} held-out {unit}",
        Stage.STOCK: f"on {plan.end.stock} of {sizes.stock} of these {unit}" if sizes.stock else "declined",
        Stage.WRITING: "profile, texts, report",
    }
    for stage, seconds in plan.seconds.items():
        note = f"   {notes[stage]}" if stage in notes else ""
        yield f"{stage:<22}{spoken(seconds):>9}{note}"


def _end(sizes: Sizes, rate: PlainRate, finalists: int, raced: int, held_out: int, speed: float) -> EndPlan:
    return EndPlan(
        finalists=finalists,
        raced=raced,
        confirmed=sizes.confirmed,
        held_out=held_out,
        race_seconds=_heat_seconds(sizes, rate) + _race_seconds(rate, finalists, raced, speed),
        lap_seconds=_race_seconds(rate, finalists, min(LAP, raced), speed),
        held_out_seconds=_held_out_seconds(rate, sizes.confirmed, held_out, speed),
        stock=sizes.stock,
        stock_seconds=stock_seconds(rate, sizes.stock, speed=speed),
        writing_seconds=sizes.writing_seconds + sizes.texts * rate.sample / speed,
    )


def _heat_seconds(sizes: Sizes, rate: PlainRate) -> float:
    """Return the seconds of the heat: each candidate has a server of its own, and plain decoding has one."""
    if sizes.heat == 0:
        return 0.0
    return sizes.start_seconds + sizes.heat * (sizes.start_seconds + rate.measured(HEAT))


def _race_seconds(rate: PlainRate, finalists: int, raced: int, speed: float) -> float:
    return finalists * rate.measured(raced, num_calls=-(-raced // LAP), speed=speed)


def _held_out_seconds(rate: PlainRate, confirmed: int, held_out: int, speed: float) -> float:
    return held_out * rate.sample + confirmed * rate.measured(held_out, speed=speed)


def _most(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits; 0 if none does."""
    return next((number for number in range(most, 0, -1) if fits(number)), 0)
