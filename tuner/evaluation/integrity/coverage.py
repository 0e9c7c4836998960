"""`sdtune check-integrity`, second half: do the reported 95 % intervals hold what they are of?

Random configurations are decoded over all prompts again and again, pass by pass, all configurations in each pass: passes of one
configuration lie minutes apart. A usual confirmation is so many prompts of one pass, so that times which belong together stay
together. The value it should hold is that of all samples it does not use, over all prompts.

Prompts are drawn with replacement, as the prompts at hand stand for all the text there is: without it a confirmation would hold
half of that and be nearer the truth than any in practice. A prompt that is drawn again brings its sample of the next pass, as
the same sample twice would bring the same noise twice. The value is measured too, and its own noise makes a perfect interval
miss it a little more often than it says, less so with more passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.draft_length import RULES
from decoding.profile import Interval
from studies.contract import Candidate
from studies.measurement import Measurement
from tuner.evaluation.random_candidates import kind_of
from tuner.evaluation.tables import ALL
from tuner.evaluation.task import head_drafts, random_candidates
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.task import Task

PROMPTS = 24
"""Prompts of a usual confirmation."""
DRAWS = 5
"""Confirmations drawn from each pass."""
FEWEST_PASSES = 3
"""With fewer no prompt could be drawn twice."""


class Confirmation(Document):
    """An interval as a search would report it, and the value that it should hold."""

    interval: Interval
    truth: float = Field(description="speed-up over all prompts, of the samples that the interval does not use")

    @property
    def is_above(self) -> bool:
        """The interval lies wholly above the value: it claims too much."""
        return self.interval.ci95[0] > self.truth

    @property
    def is_below(self) -> bool:
        """The interval lies wholly below the value."""
        return self.interval.ci95[1] < self.truth

    @property
    def is_covered(self) -> bool:
        """The interval holds the value."""
        return not (self.is_above or self.is_below)


class Configuration(Document):
    """One random configuration and its confirmations."""

    candidate: Candidate
    kind: str
    passes: tuple[Measurement, ...] = Field(min_length=FEWEST_PASSES, repr=False)
    confirmations: tuple[Confirmation, ...] = Field(min_length=1)


class CoverageCheck(Document):
    """All configurations."""

    configurations: tuple[Configuration, ...] = Field(min_length=1)
    prompts_in_all: int
    prompts_drawn: int

    def by_kind(self) -> dict[str, list[Confirmation]]:
        """The confirmations of all configurations, and of each kind of draft."""
        groups: dict[str, list[Confirmation]] = {ALL: []}
        for configuration in sorted(self.configurations, key=lambda each: each.kind):
            groups[ALL] += configuration.confirmations
            groups.setdefault(configuration.kind, []).extend(configuration.confirmations)
        return groups

    @property
    def share(self) -> float:
        """Share of the intervals that hold the value."""
        confirmations = self.by_kind()[ALL]
        return sum(each.is_covered for each in confirmations) / len(confirmations)

    @property
    def spread_of_passes(self) -> float:
        """Standard deviation of the logarithm of a pass's speed-up, prompts being the same: noise, and drift between passes."""
        logs = [np.log([measured.speedup for measured in each.passes]) for each in self.configurations]
        return float(np.sqrt(np.mean([np.var(each, ddof=1) for each in logs])))


def check_coverage(
    task: Task, bench: Bench, *, count: int, num_passes: int, max_tokens: int, progress: Progress
) -> CoverageCheck:
    """Decode with `count` random configurations in `num_passes` passes. ValueError for fewer than three passes."""
    if num_passes < FEWEST_PASSES:
        raise ValueError(f"needs {FEWEST_PASSES} passes at least, got {num_passes}")
    drawer = random_candidates(task.target, head_drafts(task), tuple(RULES), max_tokens)
    candidates = drawer.draw(count, task.config.seed)
    indices = range(len(bench.prompts))
    progress.stage("decoding with random configurations again and again", num_passes * len(candidates) * len(indices))
    passes = [
        [bench.measure(candidate, indices, on_sample=lambda _: progress.advance()) for candidate in candidates]
        for _ in range(num_passes)
    ]
    stream = np.random.default_rng(task.config.seed)
    drawn = min(PROMPTS, len(indices))
    return CoverageCheck(
        configurations=tuple(
            Configuration(
                candidate=candidate,
                kind=kind_of(candidate.draft),
                passes=tuple(of_candidate),
                confirmations=tuple(confirmations_from(of_candidate, drawn, stream)),
            )
            for candidate, of_candidate in zip(candidates, zip(*passes, strict=True), strict=True)
        ),
        prompts_in_all=len(indices),
        prompts_drawn=drawn,
    )


def confirmations_from(
    passes: Sequence[Measurement], num_prompts: int, stream: np.random.Generator
) -> list[Confirmation]:
    """`DRAWS` confirmations that begin with the samples of each pass, each with the value of all samples it does not use.

    All passes hold the same prompts in the same order.
    """
    found = []
    for first in range(len(passes)):
        for _ in range(DRAWS):
            used = _draw(len(passes), len(passes[0].samples), num_prompts, first, stream)
            samples = [passes[turn].samples[prompt] for prompt, turns in used.items() for turn in turns]
            interval = Measurement(samples=tuple(samples)).speedup_interval()
            found.append(Confirmation(interval=interval, truth=_speedup_of_unused(passes, used)))
    return found


def _draw(
    num_passes: int, num_prompts: int, count: int, first: int, stream: np.random.Generator
) -> dict[int, tuple[int, ...]]:
    """`count` prompts drawn with replacement: which passes' samples of each are used, from `first` on. One is always left."""
    times = np.zeros(num_prompts, dtype=int)
    while times.sum() < count:
        prompt = int(stream.integers(num_prompts))
        times[prompt] += times[prompt] < num_passes - 1
    return {
        int(prompt): tuple((first + again) % num_passes for again in range(times[prompt]))
        for prompt in np.flatnonzero(times)
    }


def _speedup_of_unused(passes: Sequence[Measurement], used: Mapping[int, Sequence[int]]) -> float:
    """Each prompt weighs the same, however many of its samples are left."""
    seconds = np.array(
        [
            [(s.plain_seconds / s.plain_tokens, s.draft_seconds / s.draft_tokens) for s in measured.samples]
            for measured in passes
        ]
    )  # [passes, prompts, 2]
    for prompt, turns in used.items():
        seconds[list(turns), prompt] = np.nan
    plain, draft = np.nanmean(seconds, axis=0).mean(axis=0)
    return float(plain / draft)
