"""The plan of an export: what a profile becomes under the rules of an engine, lengths, lookups and layers. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoding.drafts.lookup import SuffixMatch
from tuner.errors import ExportError
from tuner.export.schedule import check_schedule
from tuner.export.shape import moved_settings, shape_of

if TYPE_CHECKING:
    from decoding.drafts import DraftDocument
    from decoding.drafts.lookup import CopySettings
    from decoding.profile import DraftProfile
    from tuner.export.engines.contract import Engine
    from tuner.export.schedule import MeasuredSchedule
    from tuner.export.shape import DraftShape

DRAFT_FOLDER = "draft"


AUTOMATON_NGRAMS, AUTOMATON_NGRAM = 5, 2
"""Longest n-gram that stands for a suffix automaton where an engine has none, and the only one where it has one length."""


@dataclass(frozen=True)
class NgramSettings:
    """A lookup: n-gram lengths and most tokens to copy."""

    longest: int
    shortest: int
    max_tokens: int
    automaton: SuffixMatch | None = None
    """The settings of the profile's automaton, where the engine has one, in place of n-grams."""

    def describe(self) -> str:
        """Return how tokens to copy are found."""
        if self.automaton is not None:
            return "the engine's own suffix automaton"
        return f"n-grams of {self.longest} to {self.shortest} tokens"


@dataclass(frozen=True)
class FixedLength:
    """Number of tokens to draft per round where the engine has no rule for it, and the reason for the number."""

    num_tokens: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """What the settings of an engine are written from."""

    profile: DraftProfile
    model: str
    """Folder (absolute) or hub id of the target, as the engine is to load it."""
    dtype: str
    out: Path
    """Folder of the export, absolute, where it will be in the end."""
    shape: DraftShape | None
    """Layers of the draft model; None if a lookup drafts alone."""
    length: FixedLength
    threshold: float | None
    """Top-1 probability below which the engine ends a draft; None without such a rule."""
    lookup: NgramSettings | None
    """Prompt lookup, alone or before the draft model, as far as the engine has one."""
    bits: int | None = None
    """Bits to which the engine itself quantises the draft's weights; None for the weights as exported."""
    measured_schedule: MeasuredSchedule | None = None
    """Tokens to draft by number of sequences, as measured in the engine."""

    @property
    def draft(self) -> Path:
        return self.out / DRAFT_FOLDER

    @property
    def needs_draft_folder(self) -> bool:
        """True if a draft model is written: there is one, and it is not the whole target, quantised."""
        return self.shape is not None and not self.shape.is_whole

    @property
    def schedule(self) -> list[tuple[int, int, int]] | None:
        """Tokens to draft by number of sequences, [first, last, tokens].

        The measured one, else one of a single entry; None for a draft that was tuned on single sequences, and for a lookup alone.
        """
        if self.measured_schedule is not None:
            return list(self.measured_schedule.entries)
        if self.shape is None:
            return None
        batch_size = self.profile.measured.batch_size if self.profile.measured else 1
        return None if batch_size == 1 else [(1, batch_size, self.length.num_tokens)]

    def with_length(self, num_tokens: int, schedule: MeasuredSchedule | None = None) -> Plan:
        """Return the plan with drafts of up to `num_tokens`, also where a lookup drafts alone."""
        lookup = self.lookup
        if self.shape is None and lookup is not None:
            lookup = replace(lookup, max_tokens=num_tokens)
        length = FixedLength(num_tokens, "as measured")
        return replace(self, length=length, lookup=lookup, measured_schedule=schedule)


def plan_for(
    profile: DraftProfile,
    engine: Engine,
    draft: DraftDocument,
    config: Any,
    *,
    model: str,
    dtype: str,
    out: Path,
    asked: int | None = None,
    schedule: MeasuredSchedule | None = None,
) -> Plan:
    """Return the plan of `profile` in `engine`.

    `draft` is its draft as reduced for the engine, `config` the target's configuration, `asked` the user's number of tokens,
    `schedule` one that was measured in the engine.
    Raises `ExportError` for what the engine cannot express or would misread.
    """
    shape = shape_of(draft, profile.target.num_layers) if draft.runs_model else None
    threshold = profile.draft_length.fixed_threshold if engine.stops_below and shape is not None else None
    length = fixed_length(profile, asked, has_threshold=threshold is not None)
    plan = Plan(
        profile=profile,
        model=model,
        dtype=dtype,
        out=out,
        shape=shape,
        length=length,
        threshold=threshold,
        lookup=lookup_of(profile, engine, length),
        bits=draft.parts.bits,
    )
    moved = (
        moved_settings(config.get_text_config(), shape) if shape is not None and not engine.reads_layer_lists else ()
    )
    if schedule is not None:
        check_schedule(schedule, profile, engine)
        plan = plan.with_length(schedule.most_tokens, schedule)
    if moved:
        raise ExportError(
            f"{engine.title} may derive {', '.join(moved)} from the index of a layer, and the draft's layers have others than the "
            "target's first ones: --to hf reads them from the configuration, and --to folder keeps everything"
        )
    engine.check(plan, config)
    return plan


def fixed_length(profile: DraftProfile, asked: int | None, *, has_threshold: bool) -> FixedLength:
    """Return the number of tokens that an engine drafts per round.

    `asked` is the user's. An engine that stops at the rule's threshold drafts up to the rule's limit. Otherwise it is the number
    that the profile's rounds drafted on average, lookups included: accepted tokens per round over the acceptance rate.
    """
    rule, measured = profile.draft_length, profile.measured
    if asked is not None:
        return FixedLength(asked, "as asked")
    if rule.is_fixed or has_threshold:
        return FixedLength(rule.max_tokens, "the rule's max_tokens")
    if measured is None or measured.draft_acceptance_rate <= 0:
        return FixedLength(rule.max_tokens, "the rule's max_tokens, as the profile has no measured draft length")
    mean = (measured.tokens_per_round - 1) / measured.draft_acceptance_rate
    num_tokens = min(max(round(mean), 1), rule.max_tokens)
    copies = ", copies included" if profile.draft.parts.lookup is not None else ""
    return FixedLength(num_tokens, f"the profile's rounds drafted {mean:.2f} tokens on average{copies}")


def lookup_of(profile: DraftProfile, engine: Engine, length: FixedLength) -> NgramSettings | None:
    """Return the profile's lookup as far as `engine` has one; raise `ExportError` for one alone that it does not have."""
    draft = profile.draft
    first = draft.parts.lookup
    if draft.runs_model:
        return _copies(first, engine, first.max_tokens) if first is not None and engine.looks_up_first else None
    if not engine.looks_up_alone:
        raise ExportError(f"{engine.title} has no prompt lookup: --to hf, vllm and llama.cpp have one")
    assert draft.copying is not None, "a draft without a model is a lookup"
    return _copies(draft.copying, engine, length.num_tokens)


def _copies(copying: CopySettings, engine: Engine, max_tokens: int) -> NgramSettings:
    """Return copies as the engine looks for them: by an automaton if both have one, else by n-grams."""
    if copying.ngram_lengths is not None:
        longest, shortest = copying.ngram_lengths
        return NgramSettings(longest, shortest if engine.has_ngram_range else longest, max_tokens)
    assert isinstance(copying, SuffixMatch), "copies are found by n-grams or by an automaton"
    shortest = min(copying.min_match, AUTOMATON_NGRAMS)
    if engine.has_automaton:
        return NgramSettings(AUTOMATON_NGRAMS, shortest, max_tokens, copying)
    if engine.has_ngram_range:
        return NgramSettings(AUTOMATON_NGRAMS, shortest, max_tokens)
    only = max(AUTOMATON_NGRAM, shortest)
    return NgramSettings(only, only, max_tokens)
