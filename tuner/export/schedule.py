"""The schedule that `sdtune tune --profile` measures: tokens to draft by number of sequences side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from decoding.documents.strict_yaml import Document, validate
from decoding.profile import Interval
from tuner.errors import ExportError

if TYPE_CHECKING:
    from decoding.profile import DraftProfile
    from studies.measurement import Measurement
    from tuner.export.engines.contract import Engine

KEY = "schedule"
"""Key of the schedule in `tune.json`."""
Entry = tuple[PositiveInt, PositiveInt, NonNegativeInt]
"""First and last number of sequences, both included, and the tokens to draft; 0 for plain decoding."""


class ScheduledLoad(Document):
    sequences: int = Field(ge=1)
    num_tokens: int = Field(ge=0)
    """Tokens to draft; 0 where no draft is proved to be faster than plain decoding."""
    speedup: Interval | None = None
    """All tokens over wall clock, relative to plain decoding; None where that is chosen."""
    scheduled: Interval | None = None
    """That of a server with the whole schedule where it drafts nothing; None if that was not measured."""


class MeasuredSchedule(Document):
    engine: str
    engine_version: str
    date: str
    """UTC, ISO 8601."""
    target_weights_sha256: str
    draft: dict[str, Any]
    """The profile's draft."""
    entries: tuple[Entry, ...] = Field(min_length=1)
    """From 1 sequence on, without gaps. The last entry holds for all larger numbers too."""
    loads: tuple[ScheduledLoad, ...]

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        ends = [0, *(last for _, last, _ in self.entries)]
        if any(first != end + 1 or last < first for (first, last, _), end in zip(self.entries, ends, strict=False)):
            raise ValueError("entries must be ranges from 1 on, without gaps: [[1, 3, 4], [4, 8, 0]]")
        return self

    @property
    def most_tokens(self) -> int:
        """The longest draft of the schedule; 0 if all of it is plain decoding."""
        return max(tokens for _, _, tokens in self.entries)

    def describe(self) -> str:
        """Return the entries in words."""
        return in_words(self.entries)

    def measured(self) -> Iterator[str]:
        for load in self.loads:
            found = f"{load.sequences} side by side: {_tokens(load.num_tokens)}"
            if load.speedup is not None:
                found += f", {load.speedup} over plain decoding"
            if load.scheduled is not None:
                found += f"; the whole schedule there {load.scheduled}"
            yield f"{found}."


def in_words(entries: Sequence[tuple[int, int, int]]) -> str:
    """Return a phrase such as `1 to 3 sequences: 4 tokens; from 4: plain decoding`."""
    parts = []
    for index, (first, last, tokens) in enumerate(entries):
        numbers = f"{first}" if first == last else f"{first} to {last}"
        if index == len(entries) - 1:
            numbers = f"from {first}" if index else "any number of"
        unit = "" if index else " sequence" if numbers == "1" else " sequences"
        parts.append(f"{numbers}{unit}: {_tokens(tokens)}")
    return "; ".join(parts)


def _tokens(number: int) -> str:
    return {0: "plain decoding", 1: "1 token"}.get(number, f"{number} tokens")


def read_schedule(path: Path) -> MeasuredSchedule:
    """Return the schedule of a `tune.json`; raise `ExportError` for a file without one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ExportError(f"--schedule {path} cannot be read: {cause}") from None
    if not isinstance(document, dict) or document.get(KEY) is None:
        raise ExportError(
            f"--schedule {path} holds no schedule: sdtune tune --profile PROFILE --sequences N --sequences M measures one"
        )
    return validate(MeasuredSchedule, document[KEY], source=f"{path}: {KEY}", error=ExportError)


def check_schedule(schedule: MeasuredSchedule, profile: DraftProfile, engine: Engine) -> None:
    """Raise `ExportError` unless the schedule was measured for this profile in this engine, and drafts somewhere."""
    if schedule.engine != engine.title:
        raise ExportError(
            f"the schedule was measured in {schedule.engine}, and this export is for {engine.title}: speeds do not transfer"
        )
    same_draft = schedule.draft == profile.draft.model_dump(mode="json")
    if not same_draft or schedule.target_weights_sha256 != profile.target.weights_sha256:
        raise ExportError(
            f"the schedule was measured with another draft or model than {profile.name!r}: measure it again"
        )
    if not schedule.most_tokens:
        raise ExportError(
            f"by the schedule no draft is faster than plain decoding in {schedule.engine}: serve without this export"
        )
    if not engine.has_schedule:
        raise ExportError(
            f"{engine.title} has no schedule by number of sequences: {schedule.describe()}. Export with --draft-tokens for the "
            "number of sequences that a server is to have, and serve without the draft where plain decoding is faster"
        )


def proved(measurement: Measurement) -> bool:
    """Return whether a draft is proved to be faster: its 95 % interval lies above 1 and no text differs, ties apart."""
    return measurement.speedup_interval().ci95[0] > 1 and not measurement.num_different


def figures_json(found: Measurement) -> dict[str, Any]:
    """Return the figures of a draft in an engine with their interval and samples as plain data."""
    return {
        "speedup": found.speedup_interval().model_dump(mode="json"),
        "plain_tokens_per_second": found.plain_tokens_per_second,
        "draft_tokens_per_second": found.draft_tokens_per_second,
        "rounds": found.num_spec_steps,
        "num_draft_tokens": found.num_draft_tokens,
        "num_accepted_draft_tokens": found.num_accepted_draft_tokens,
        "mean_acceptance_length": found.mean_acceptance_length,
        "texts": found.num_prompts,
        "identical": found.num_identical,
        "ties": found.num_ties,
        "samples": [sample.model_dump(mode="json") for sample in found.samples],
    }


def join_ranges(chosen: dict[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Return the entries of a schedule from the tokens to draft at each measured number of sequences, above 0 (our formulation).

    Nothing is drafted where that was not measured to pay: between two measured numbers the smaller of both lengths holds, below the
    smallest number and above the largest one 0. Raises ValueError without a measured number.
    """
    if not chosen:
        raise ValueError("a schedule needs at least one measured number of sequences")
    numbers = sorted(chosen)
    pieces: list[tuple[int, int, int]] = [(1, numbers[0] - 1, 0)]
    for number, following in pairwise([*numbers, None]):
        assert number is not None, "only the last is None"
        pieces.append((number, number, chosen[number]))
        if following is not None:
            pieces.append((number + 1, following - 1, min(chosen[number], chosen[following])))
    if chosen[numbers[-1]]:
        pieces.append((numbers[-1] + 1, numbers[-1] + 1, 0))
    entries: list[tuple[int, int, int]] = []
    for first, last, tokens in pieces:
        if first > last:
            continue
        if entries and entries[-1][2] == tokens:
            entries[-1] = (entries[-1][0], last, tokens)
        else:
            entries.append((first, last, tokens))
    return tuple(entries)
