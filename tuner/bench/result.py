"""The result of a bench: every contender's measurement, what beats plain decoding, and the facts. Data only.

In this process all contenders take turns. In an engine each draft takes turns with plain decoding alone: its server needs memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decoding.documents.strict_yaml import Document
from decoding.profile import Interval
from studies.measurement import Measurement
from studies.ratios import geometric_mean
from tuner.measuring.comparison import Compared, Phase
from tuner.measuring.contender import PLAIN, Contender

PROFILE = "profile"
"""Name of the contender under test."""


@dataclass(frozen=True)
class BenchResult:
    """All contenders on the same prompts."""

    contenders: Mapping[str, Contender]
    everything: Mapping[str, Measurement]
    """All samples of each contender; with repeats, their sums."""
    compared: Compared
    """The samples that all contenders decoded at some length, to which rates and ratios refer."""
    left_out: dict[str, str]
    """Contenders that could not be measured, with the reasons."""
    prompt_lengths: tuple[int, ...]
    """Tokens of each prompt."""
    facts: dict[str, Any]
    """Task, device and versions as plain data."""
    remarks: tuple[str, ...] = ()
    batch_size: int = 1
    repeats: int = 1
    engine: str | None = None
    """The engine and its version; None for a bench in this process."""

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean length of the prompts that count."""
        size = self.batch_size
        counted = [n for index in self.compared.counted for n in self.prompt_lengths[index * size : (index + 1) * size]]
        return sum(counted) / len(counted)

    @property
    def units(self) -> str:
        """The unit of rates and intervals in words."""
        return units_of(self.batch_size)

    def profile_over(self, name: str, phase: Phase) -> Interval | None:
        """Return the profile's speed-up over a contender; None where the two did not take turns."""
        apart = self.engine is not None and name not in (PROFILE, PLAIN)
        return None if apart else self.compared.over(PROFILE, name, phase)

    @property
    def num_different(self) -> int:
        """Number of sequences that differ from plain decoding's, ties apart."""
        return sum(each.num_prompts - each.num_identical - each.num_ties for each in self.everything.values())

    def first_token_seconds(self, name: str) -> float:
        """Return the mean prefill seconds of a batch."""
        whole = self.compared.measurements[name].end_to_end
        assert whole is not None, "a bench times the prefill of every sample"
        return whole.time_to_first_token_seconds / self.repeats


def units_of(batch_size: int) -> str:
    """Return the unit of rates and intervals in words."""
    return "prompts" if batch_size == 1 else f"batches of {batch_size} prompts"


class BenchVerdict(Document):
    """What beats plain decoding: contenders whose 95 % interval over it lies above 1, the fastest first."""

    decode: tuple[str, ...]
    end_to_end: tuple[str, ...]
    contradicted: tuple[str, ...]
    """Contenders that decode faster than plain decoding, but are slower end to end, both with 95 % confidence."""

    @classmethod
    def of(cls, compared: Compared) -> BenchVerdict:
        """Return what beats plain decoding on these samples."""
        others = [name for name in compared.measurements if name != PLAIN]
        decode, whole = ({name: compared.over(name, PLAIN, phase) for name in others} for phase in Phase)
        return cls(
            decode=_above_1(decode),
            end_to_end=_above_1(whole),
            contradicted=tuple(name for name in _above_1(decode) if whole[name].ci95[1] < 1.0),
        )

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


def _above_1(speedups: Mapping[str, Interval]) -> tuple[str, ...]:
    faster = [name for name, speedup in speedups.items() if speedup.ci95[0] > 1.0]
    return tuple(sorted(faster, key=lambda name: -speedups[name].value))


def category_mean(compared: Compared, name: str, phase: Phase) -> Interval | None:
    """Return the geometric mean over the categories of a contender's speed-up over plain decoding, all of equal weight.

    None if there are no two categories, or if one has too few prompts for an interval.
    """
    known, all_categories = compared.by_category(), compared.measurements[PLAIN].by_category()
    if len(all_categories) < 2 or len(known) < len(all_categories):
        return None
    return geometric_mean([each.ratio(name, PLAIN, phase) for each in known.values()])
