"""Comparison of draft-length rules with all fixed lengths, on one draft.

All are measured side by side on the same prompts. The best fixed length is chosen with hindsight, by measuring all lengths on
the prompts of the comparison.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.deploy.custom_generate import check_target
from decoding.documents.atomic_write import write_atomically
from decoding.draft_length import DraftLengthRule, Fixed
from decoding.drafters.build import build_drafter
from decoding.drafts import Draft
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding, DraftProfile, Interval
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample, ratio_interval
from tuner.errors import ConfigError
from tuner.evaluation.rules.contenders import rules_to_compare
from tuner.evaluation.rules.settings import RulesEvaluation
from tuner.inputs.models import Loaded, eos_token_ids, load
from tuner.inputs.prompts import PromptSet, load_prompts
from tuner.inputs.row_filter import split_filter
from tuner.measuring.baseline import decode_baseline
from tuner.measuring.clock import WallClock
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.results import stamped

MIXED = "mixed"


@dataclass(frozen=True)
class TextKind:
    """One kind of text, and the indices of its prompts in the bench."""

    name: str
    warm_up: tuple[int, ...]
    """Indices of the prompts on which adaptive rules are warmed up."""
    measured: tuple[int, ...]
    """Indices of the prompts that are measured."""


@dataclass(frozen=True)
class RuleEntry:
    """One rule and its measurement on the prompts of all kinds, interleaved."""

    label: str
    rule: DraftLengthRule
    measurement: Measurement

    def on(self, indices: Iterable[int]) -> Measurement:
        """Return the measurement restricted to the prompts `indices`."""
        wanted = set(indices)
        return Measurement(samples=tuple(s for s in self.measurement.samples if s.prompt in wanted))


@dataclass(frozen=True)
class RuleComparison:
    """Result of `compare_rules`."""

    draft: Draft
    kinds: tuple[TextKind, ...]
    entries: tuple[RuleEntry, ...]
    facts: dict[str, Any]

    @property
    def columns(self) -> dict[str, tuple[int, ...]]:
        """Prompt indices by table column: each kind, and `MIXED` for several kinds."""
        columns = {kind.name: kind.measured for kind in self.kinds}
        return columns if len(columns) == 1 else {**columns, MIXED: tuple(p for k in self.kinds for p in k.measured)}

    def best_fixed(self, column: str) -> RuleEntry:
        """Return the fixed length that was fastest on the prompts of `column`."""
        fixed = [entry for entry in self.entries if isinstance(entry.rule, Fixed)]
        return max(fixed, key=lambda entry: entry.on(self.columns[column]).speedup)

    def over_best_fixed(self, entry: RuleEntry, column: str) -> Interval:
        """Return a rule's speed relative to `column`'s best fixed length, on its prompts."""
        indices = self.columns[column]
        return ratio_interval(entry.on(indices), self.best_fixed(column).on(indices))


def compare_rules(settings: RulesEvaluation, progress: Progress) -> RuleComparison:
    """Measure all rules and fixed lengths on the profile's draft.

    Raises `ConfigError`, `DatasetError`, `ProfileError` or `TargetMismatchError` for wrong input.
    """
    profile = DraftProfile.load(settings.profile)
    if not profile.draft.drafts:
        raise ConfigError(f"{settings.profile} decodes plainly: it has no draft whose length a rule could choose")
    names = _dataset_names(settings.dataset)
    decoding = _decoding(settings, profile)
    loaded = _load(settings, profile, progress)
    target = Target(loaded.model, profile.decoding.runner, exact_width=profile.decoding.exact_width)
    heads = HeadFolder(target, settings.profile.parent)
    build_drafter(target, profile.draft, heads=heads)  # report a missing head before any computation
    found = [_load_prompts(settings, dataset, loaded, target) for dataset in settings.dataset]
    for note in (note for each in found for note in each.notes):
        progress.say(note)
    bench = _open_bench(settings, decoding, found, loaded, target, heads, progress)
    parts = [(name, len(each.tuning), len(each.held_out)) for name, each in zip(names, found, strict=True)]
    kinds = _kinds(parts, bench, progress)
    entries = _measure(settings, profile, kinds, bench, progress)
    return RuleComparison(profile.draft, kinds, entries, _facts(settings, profile, decoding, loaded, target))


def _dataset_names(datasets: Sequence[str]) -> list[str]:
    """Return a name for each data set. Raises `ConfigError` unless they are distinct."""
    names = [_dataset_name(dataset) for dataset in datasets]
    if len(set(names)) < len(names) or MIXED in names:
        raise ConfigError(f"the datasets need distinct names, none of them {MIXED!r}; got {', '.join(names)}")
    return names


def _dataset_name(dataset: str) -> str:
    """Return the values of the filter, such as `math` for `questions.jsonl#task=math`, or else the name of the file."""
    source, chosen = split_filter(dataset)
    return Path(source).stem if chosen is None else "|".join(chosen.values)


def _decoding(settings: RulesEvaluation, profile: DraftProfile) -> Decoding:
    """Return the profile's decoding at the temperature of the settings. Raises `ConfigError` for a top-p without sampling."""
    if settings.temperature is None:
        decoding = profile.decoding
    else:
        decoding = profile.decoding.model_copy(update={"temperature": settings.temperature})
    if settings.top_p < 1.0 and decoding.temperature == 0.0:
        raise ConfigError("top_p applies to sampling: set a temperature above 0")
    return decoding


def _load(settings: RulesEvaluation, profile: DraftProfile, progress: Progress) -> Loaded:
    """Load the profile's model, or the one that the settings name, and check that the profile fits it."""
    identity = profile.target
    name = settings.model or identity.model
    progress.stage(f"loading {name}")
    loaded = load(name, revision=identity.revision, dtype=identity.dtype, device=settings.device)
    check_target(profile, loaded.model)
    return loaded


def _load_prompts(settings: RulesEvaluation, dataset: str, loaded: Loaded, target: Target) -> PromptSet:
    """Load the prompts of one data set: `tuning` warms up adaptive rules, `held_out` is measured."""
    return load_prompts(
        dataset,
        loaded.tokenizer,
        num_tuning=settings.warm_up_prompts,
        num_held_out=settings.prompts,
        max_new_tokens=settings.max_new_tokens,
        context_length=target.context_length,
        seed=settings.seed,
        settings=settings,
    )


def _open_bench(
    settings: RulesEvaluation,
    decoding: Decoding,
    found: Sequence[PromptSet],
    loaded: Loaded,
    target: Target,
    heads: HeadFolder,
    progress: Progress,
) -> Bench:
    """Decode the prompts of all data sets plainly, one data set after the other, and return the bench on them."""
    prompts = [prompt.token_ids for each in found for prompt in (*each.tuning, *each.held_out)]
    progress.stage("decoding all prompts plainly", len(prompts))
    ending = Ending(settings.max_new_tokens, eos_token_ids(loaded.model))
    baseline = decode_baseline(target, prompts, ending, on_progress=progress.advance)
    clock = WallClock(target.device)
    return Bench(
        target, baseline, decoding=decoding, heads=heads, seed=settings.seed, clock=clock, top_p=settings.top_p
    )


def _facts(
    settings: RulesEvaluation, profile: DraftProfile, decoding: Decoding, loaded: Loaded, target: Target
) -> dict[str, Any]:
    described = {
        "profile": profile.name,
        "draft": profile.draft.model_dump(mode="json"),
        "model": loaded.name,
        "temperature": decoding.temperature,
        "top_p": settings.top_p,
        "datasets": list(settings.dataset),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    return stamped(described, target.device)


def _kinds(parts: Sequence[tuple[str, int, int]], bench: Bench, progress: Progress) -> tuple[TextKind, ...]:
    """Return the kinds; prompts whose continuations end too soon are left out."""
    index_of = {row: index for index, row in enumerate(bench.baseline.rows)}
    kinds, start = [], 0
    for name, num_warm_up, num_measured in parts:
        middle, end = start + num_warm_up, start + num_warm_up + num_measured
        warm_up = tuple(index_of[row] for row in range(start, middle) if row in index_of)
        measured = tuple(index_of[row] for row in range(middle, end) if row in index_of)
        if len(measured) < 2 or not warm_up:
            raise ConfigError(
                f"{len(measured)} of {num_measured} prompts of {name}, and {len(warm_up)} of {num_warm_up} for warm-up, have "
                "continuations long enough to measure: at least 2 and 1 are needed; give prompts with longer continuations"
            )
        if len(measured) < num_measured:
            progress.say(f"{name}: {num_measured - len(measured)} prompts end too soon to measure and are left out")
        kinds.append(TextKind(name, warm_up, measured))
        start = end
    return tuple(kinds)


def _measure(
    settings: RulesEvaluation, profile: DraftProfile, kinds: Sequence[TextKind], bench: Bench, progress: Progress
) -> tuple[RuleEntry, ...]:
    warm_up_prompts = _interleaved([kind.warm_up for kind in kinds])

    def warm_up(rule: DraftLengthRule) -> DraftLengthRule:
        return bench.warm_up_rule(Candidate(draft=profile.draft, draft_length=rule), warm_up_prompts).draft_length

    rules = rules_to_compare(settings, profile.draft_length, warm_up)
    indices = _interleaved([kind.measured for kind in kinds])
    progress.stage("measuring all rules on all prompts", len(rules) * len(indices))

    def advance(sample: PromptSample) -> None:
        progress.advance()

    candidates = [Candidate(draft=profile.draft, draft_length=rule) for rule in rules.values()]
    measurements = bench.side_by_side(candidates, indices, on_sample=advance)
    return tuple(RuleEntry(*parts) for parts in zip(rules, rules.values(), measurements, strict=True))


def _interleaved(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the elements of all groups, one per group in turn."""
    longest = max(len(group) for group in groups)
    return [group[index] for index in range(longest) for group in groups if index < len(group)]


def write_json(comparison: RuleComparison, path: Path) -> None:
    """Write all figures with intervals, every sample, and the provenance, atomically."""
    rows = []
    for entry in comparison.entries:
        columns = {}
        for column, indices in comparison.columns.items():
            measured = entry.on(indices)
            whole = measured.end_to_end
            columns[column] = {
                "speedup": measured.speedup_interval().model_dump(mode="json"),
                "over_best_fixed": comparison.over_best_fixed(entry, column).model_dump(mode="json"),
                "end_to_end_speedup": None if whole is None else whole.speedup_interval().model_dump(mode="json"),
                "draft_acceptance_rate": measured.draft_acceptance_rate,
                "mean_acceptance_length": measured.mean_acceptance_length,
                "tokens_per_round": measured.tokens_per_round,
                "drafted_per_round": measured.drafted_per_round,
                "identical": measured.num_identical,
                "prompts": len(measured.samples),
            }
        rows.append({"label": entry.label, "rule": entry.rule.model_dump(mode="json"), "columns": columns})
    samples = {entry.label: entry.measurement.model_dump(mode="json")["samples"] for entry in comparison.entries}
    best = {column: comparison.best_fixed(column).label for column in comparison.columns}
    document = {
        **comparison.facts,
        "best_fixed": best,
        "rules": rows,
        "samples": samples,
    }
    write_atomically(path, json.dumps(document, indent=1).encode(), what="the comparison", error=ConfigError)
