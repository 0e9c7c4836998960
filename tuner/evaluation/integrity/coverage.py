"""Coverage of the reported 95 % intervals.

Random configurations are decoded over all prompts in several passes. Each pass measures all configurations, so passes of one
configuration are minutes apart. A typical confirmation is drawn from the prompts of one pass, so that noise which is correlated
in time stays together. Its true value is the speed-up over all prompts of the samples that the confirmation does not use.

Prompts are drawn with replacement, as the available prompts represent all text. Without replacement a confirmation would
contain half of the prompts that determine the true value, and would be closer to it than in practice. A prompt drawn again
contributes its sample of the next pass, because a repeated sample would repeat its noise. The true value is measured too: its
own noise makes a perfect interval miss it slightly more often than in 5 % of the cases, less so with more passes.
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
"""Number of prompts in a typical confirmation."""
DRAWS = 5
"""Number of confirmations drawn from each pass."""
MIN_PASSES = 3
"""With fewer passes no prompt could be drawn twice."""


class Confirmation(Document):
    """Interval as a search would report it, and the true value."""

    interval: Interval
    truth: float = Field(description="speed-up over all prompts of the samples that the interval does not use")

    @property
    def is_above(self) -> bool:
        """True if the whole interval is above the true value: it claims too much."""
        return self.interval.ci95[0] > self.truth

    @property
    def is_below(self) -> bool:
        """True if the whole interval is below the true value."""
        return self.interval.ci95[1] < self.truth

    @property
    def is_covered(self) -> bool:
        """True if the interval contains the true value."""
        return not (self.is_above or self.is_below)


class Configuration(Document):
    """One random configuration, its passes and its confirmations."""

    candidate: Candidate
    kind: str
    passes: tuple[Measurement, ...] = Field(min_length=MIN_PASSES, repr=False)
    confirmations: tuple[Confirmation, ...] = Field(min_length=1)


class CoverageCheck(Document):
    """Result of the coverage check."""

    configurations: tuple[Configuration, ...] = Field(min_length=1)
    num_prompts: int
    num_drawn: int

    def by_kind(self) -> dict[str, list[Confirmation]]:
        """Return the confirmations of all configurations, and of each kind of draft."""
        groups: dict[str, list[Confirmation]] = {ALL: []}
        for configuration in sorted(self.configurations, key=lambda each: each.kind):
            groups[ALL] += configuration.confirmations
            groups.setdefault(configuration.kind, []).extend(configuration.confirmations)
        return groups

    @property
    def share(self) -> float:
        """Share of the intervals that contain the true value."""
        confirmations = self.by_kind()[ALL]
        return sum(each.is_covered for each in confirmations) / len(confirmations)

    @property
    def spread_of_passes(self) -> float:
        """Standard deviation of a pass's log speed-up on the same prompts: noise and drift."""
        logs = [np.log([measured.speedup for measured in each.passes]) for each in self.configurations]
        return float(np.sqrt(np.mean([np.var(each, ddof=1) for each in logs])))


def check_coverage(
    task: Task, bench: Bench, *, count: int, num_passes: int, max_tokens: int, progress: Progress
) -> CoverageCheck:
    """Measure `count` random configurations in `num_passes` passes; raise ValueError below `MIN_PASSES`."""
    if num_passes < MIN_PASSES:
        raise ValueError(f"at least {MIN_PASSES} passes are needed, got {num_passes}")
    drawer = random_candidates(task.target, head_drafts(task), tuple(RULES), max_tokens)
    candidates = drawer.draw(count, task.config.seed)
    indices = range(len(bench.prompts))
    progress.stage("decoding with random configurations in several passes", num_passes * len(candidates) * len(indices))
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
        num_prompts=len(indices),
        num_drawn=drawn,
    )


def confirmations_from(
    passes: Sequence[Measurement], num_prompts: int, stream: np.random.Generator
) -> list[Confirmation]:
    """Draw `DRAWS` confirmations from each pass, each with the value of its unused samples.

    All passes must have the same prompts in the same order.
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
    """Draw `count` prompts with replacement, and return the passes whose samples each uses.

    Passes count from `first` on. At least one sample of each prompt stays unused.
    """
    times = np.zeros(num_prompts, dtype=int)
    while times.sum() < count:
        prompt = int(stream.integers(num_prompts))
        times[prompt] += times[prompt] < num_passes - 1
    return {
        int(prompt): tuple((first + again) % num_passes for again in range(times[prompt]))
        for prompt in np.flatnonzero(times)
    }


def _speedup_of_unused(passes: Sequence[Measurement], used: Mapping[int, Sequence[int]]) -> float:
    """Return the speed-up of the unused samples; a prompt has the same weight however many of its samples are unused."""
    work = np.array(
        [
            [(s.plain_seconds, s.plain_tokens, s.draft_seconds, s.draft_tokens) for s in measured.samples]
            for measured in passes
        ]
    )  # [passes, prompts, 4]
    for prompt, turns in used.items():
        work[list(turns), prompt] = np.nan
    plain_seconds, plain_tokens, seconds, tokens = np.nanmean(work, axis=0).sum(axis=0)
    return float((plain_seconds / plain_tokens) / (seconds / tokens))
