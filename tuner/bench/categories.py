"""Speed-ups by category of the prompts, and what beats plain decoding on each: derived from a bench's result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from decoding.documents.strict_yaml import Document
from decoding.profile import Interval
from studies.ratios import geometric_mean
from tuner.bench.contenders import PLAIN
from tuner.bench.result import BenchResult, Phase

FEWEST_PROMPTS = 2
"""Prompts, or batches of them, without which a category has no interval."""


class CategorySpeedup(Document):
    """A contender over plain decoding on the prompts of one category."""

    prompts: int
    """Number of counted prompts, or of batches."""
    over_plain: Interval
    end_to_end_over_plain: Interval
    mean_acceptance_length: float
    draft_acceptance_rate: float | None


class BenchVerdict(Document):
    """What beats plain decoding: contenders whose 95 % interval over it lies above 1, the fastest first."""

    decode: tuple[str, ...]
    end_to_end: tuple[str, ...]
    contradicted: tuple[str, ...]
    """Contenders that decode faster than plain decoding, but are slower end to end, both with 95 % confidence."""

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if not self.decode and not self.end_to_end:
            return "nothing beats plain decoding with 95 % confidence"
        decode = ", ".join(self.decode) or "nothing"
        both = self.decode == self.end_to_end
        said = decode if both else f"{decode} in decoding, {', '.join(self.end_to_end) or 'nothing'} end to end"
        against = (
            f"; {', '.join(self.contradicted)} decodes faster but is slower end to end" if self.contradicted else ""
        )
        return f"faster than plain decoding with 95 % confidence: {said}{against}"


def categories(result: BenchResult) -> dict[str, tuple[int, ...]]:
    """Return the counted batches of each category, in the order of first appearance; batches of several are in none."""
    of_batches: dict[int, set[str | None]] = {}
    for sample in result.entries[PLAIN].samples:
        of_batches.setdefault(sample.batch, set()).add(sample.category)
    found: dict[str, list[int]] = {}
    for batch in result.counted:
        category = of_batches[batch].pop() if len(of_batches[batch]) == 1 else None
        if category is not None:
            found.setdefault(category, []).append(batch)
    return {name: tuple(batches) for name, batches in found.items()}


def by_category(result: BenchResult, name: str) -> dict[str, CategorySpeedup]:
    """Return the figures of a contender for each category with `FEWEST_PROMPTS` or more."""
    return {
        category: CategorySpeedup(
            prompts=len(batches),
            over_plain=result.over(name, PLAIN, Phase.DECODE, batches),
            end_to_end_over_plain=result.over(name, PLAIN, Phase.END_TO_END, batches),
            **_acceptance(result, name, batches),
        )
        for category, batches in categories(result).items()
        if len(batches) >= FEWEST_PROMPTS
    }


def _acceptance(result: BenchResult, name: str, batches: Sequence[int]) -> dict[str, float | None]:
    figures = result.entries[name].acceptance(batches)
    return figures.model_dump(include={"mean_acceptance_length", "draft_acceptance_rate"})


def category_mean(result: BenchResult, name: str, phase: Phase) -> Interval | None:
    """Return the geometric mean over the categories of a contender's speed-up over plain decoding, all of equal weight.

    None if there are no two categories, or if one has too few prompts for an interval.
    """
    batches = categories(result).values()
    if len(batches) < 2 or any(len(each) < FEWEST_PROMPTS for each in batches):
        return None
    return geometric_mean([result.ratio(name, PLAIN, phase, each) for each in batches])


def verdict(result: BenchResult, batches: Sequence[int] | None = None) -> BenchVerdict:
    """Return what beats plain decoding on all counted batches, or on some of them."""
    others = [name for name in result.entries if name != PLAIN]
    decode, whole = (
        {name: result.over(name, PLAIN, phase, batches) for name in others}
        for phase in (Phase.DECODE, Phase.END_TO_END)
    )
    return BenchVerdict(
        decode=_above_1(decode),
        end_to_end=_above_1(whole),
        contradicted=tuple(name for name in _above_1(decode) if whole[name].ci95[1] < 1.0),
    )


def _above_1(speedups: dict[str, Interval]) -> tuple[str, ...]:
    faster = [name for name, speedup in speedups.items() if speedup.ci95[0] > 1.0]
    return tuple(sorted(faster, key=lambda name: -speedups[name].value))


def verdicts(result: BenchResult) -> Iterator[tuple[str, BenchVerdict]]:
    """Yield each category with enough prompts, and its verdict."""
    for category, batches in categories(result).items():
        if len(batches) >= FEWEST_PROMPTS:
            yield category, verdict(result, batches)
