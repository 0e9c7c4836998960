"""`sdtune compare-rules`: every draft-length rule on one draft, side by side on the same prompts, against every fixed length.

The best fixed length is found by measuring all of them, on the very prompts of the comparison: a bar that no rule is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.deploy.custom_generate import check_target
from decoding.documents.atomic_write import write_atomically
from decoding.draft_length import RULES, CostAwareRule, DraftLengthRule, Fixed
from decoding.drafts import Draft, EarlyExit, PlainDecoding
from decoding.exit_heads import ExitHeads
from decoding.profile import DraftProfile, Interval
from decoding.target import Target
from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample, ratio_interval
from tuner.errors import ConfigError
from tuner.inputs.models import eos_token_ids, load
from tuner.inputs.prompts import Prompt, load_prompts
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.results import stamped

MIXED = "mixed"


@dataclass(frozen=True)
class TextKind:
    """One kind of text: where it is from, and its prompts in the bench."""

    name: str
    learning: tuple[int, ...]
    """Places of the prompts that a learning rule is taught by."""
    measured: tuple[int, ...]


@dataclass(frozen=True)
class RuleEntry:
    """One rule and what was measured of it, on all kinds together, kind after kind in turns."""

    label: str
    rule: DraftLengthRule
    measurement: Measurement

    def on(self, indices: Iterable[int]) -> Measurement:
        """Its samples of some prompts."""
        wanted = set(indices)
        return Measurement(samples=tuple(s for s in self.measurement.samples if s.prompt in wanted))


@dataclass(frozen=True)
class RuleComparison:
    """What `compare_rules` found; the names of the kinds end with `MIXED` if there are several."""

    draft: Draft
    kinds: tuple[TextKind, ...]
    entries: tuple[RuleEntry, ...]
    facts: dict[str, Any]

    @property
    def columns(self) -> dict[str, tuple[int, ...]]:
        """The prompts of each column of the table: those of each kind, and of all."""
        columns = {kind.name: kind.measured for kind in self.kinds}
        return columns if len(columns) == 1 else {**columns, MIXED: tuple(p for k in self.kinds for p in k.measured)}

    def best_fixed(self, column: str) -> RuleEntry:
        """The fixed length that was fastest on the prompts of a column."""
        fixed = [entry for entry in self.entries if isinstance(entry.rule, Fixed)]
        return max(fixed, key=lambda entry: entry.on(self.columns[column]).speedup)

    def over_best_fixed(self, entry: RuleEntry, column: str) -> Interval:
        """How many times as fast as the best fixed length a rule is, on the same prompts."""
        indices = self.columns[column]
        return ratio_interval(entry.on(indices), self.best_fixed(column).on(indices))


def compare_rules(
    profile_path: Path,
    datasets: Sequence[str],
    *,
    model: str | None,
    prompts: int,
    learning_prompts: int,
    max_tokens: int,
    max_new_tokens: int,
    prompt_column: str | None,
    seed: int,
    device: str,
    progress: Progress,
) -> RuleComparison:
    """Measure every fixed length up to `max_tokens` and every other rule on the profile's draft.

    `prompts` of each dataset are measured, others (`learning_prompts`) teach the rules that learn. Raises `ConfigError`,
    `DatasetError`, `ProfileError` or `TargetMismatchError` for what the user can put right.
    """
    profile = DraftProfile.load(profile_path)
    if isinstance(profile.draft, PlainDecoding):
        raise ConfigError(f"{profile_path} decodes plainly: there is no draft whose length a rule could choose")
    names = [Path(dataset).stem for dataset in datasets]
    if len(set(names)) < len(names) or MIXED in names:
        raise ConfigError(f"the datasets need names of their own, and none may be {MIXED!r}; got {', '.join(names)}")
    progress.stage(f"loading {model or profile.target.model}")
    loaded = load(
        model or profile.target.model, revision=profile.target.revision, dtype=profile.target.dtype, device=device
    )
    check_target(profile, loaded.model)
    target = Target(loaded.model, profile.decoding.runner, exact_width=profile.decoding.exact_width)
    heads = ExitHeads(target, profile_path.parent)
    if isinstance(profile.draft, EarlyExit) and profile.draft.head is not None:
        heads.get(profile.draft)  # a head that is missing is told before anything is run
    texts: list[Prompt] = []
    parts: list[tuple[str, int, int]] = []
    for name, dataset in zip(names, datasets, strict=True):
        found = load_prompts(
            dataset,
            loaded.tokenizer,
            num_tuning=learning_prompts,
            num_held_out=prompts,
            max_new_tokens=max_new_tokens,
            context_length=target.context_length,
            seed=seed,
            prompt_column=prompt_column,
        )
        parts.append((name, len(found.tuning), len(found.held_out)))
        texts += [*found.tuning, *found.held_out]
    progress.stage("decoding all prompts plainly", len(texts))
    bench = Bench(
        target,
        [prompt.token_ids for prompt in texts],
        max_new_tokens=max_new_tokens,
        temperature=profile.decoding.temperature,
        eos_token_ids=eos_token_ids(loaded.model),
        prefix_reuse=profile.decoding.prefix_reuse,
        heads=heads,
        seed=seed,
        on_progress=progress.advance,
    )
    kinds = _kinds(parts, bench, progress)
    entries = _measure(profile, kinds, bench, max_tokens, progress)
    described = {
        "profile": profile.name,
        "draft": profile.draft.model_dump(mode="json"),
        "model": loaded.name,
        "temperature": profile.decoding.temperature,
        "datasets": list(datasets),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    facts = stamped(described, target.device)
    return RuleComparison(profile.draft, kinds, entries, facts)


def _kinds(parts: Sequence[tuple[str, int, int]], bench: Bench, progress: Progress) -> tuple[TextKind, ...]:
    """The prompts of each kind by their index in the bench, those left out that end too soon."""
    index_of = {row: index for index, row in enumerate(bench.rows)}
    kinds, start = [], 0
    for name, num_learning, num_measured in parts:
        middle, end = start + num_learning, start + num_learning + num_measured
        learning = tuple(index_of[row] for row in range(start, middle) if row in index_of)
        measured = tuple(index_of[row] for row in range(middle, end) if row in index_of)
        if len(measured) < 2 or not learning:
            raise ConfigError(
                f"{len(measured)} of {num_measured} prompts of {name}, and {len(learning)} of {num_learning} to learn from, are "
                "continued at a length worth measuring: at least 2 and 1 are needed; give prompts with longer continuations"
            )
        if len(measured) < num_measured:
            progress.say(f"{name}: {num_measured - len(measured)} prompts end too soon to measure and are left out")
        kinds.append(TextKind(name, learning, measured))
        start = end
    return tuple(kinds)


def _measure(
    profile: DraftProfile, kinds: Sequence[TextKind], bench: Bench, max_tokens: int, progress: Progress
) -> tuple[RuleEntry, ...]:
    rules: dict[str, DraftLengthRule] = {f"fixed {n}": Fixed(max_tokens=n) for n in range(1, max_tokens + 1)}
    learning = _in_turns([kind.learning for kind in kinds])
    for name, rule in RULES.items():
        if rule is Fixed:
            continue
        rules[name] = rule(rule=name, max_tokens=max_tokens)
        if issubclass(rule, CostAwareRule):
            taught = bench.warm_up_rule(Candidate(draft=profile.draft, draft_length=rules[name]), learning)
            rules[f"{name}, warm"] = taught.draft_length
    if profile.draft_length not in rules.values():
        rules["the profile's own"] = profile.draft_length
    indices = _in_turns([kind.measured for kind in kinds])
    progress.stage("all rules on all prompts", len(rules) * len(indices))

    def advance(sample: PromptSample) -> None:
        progress.advance()

    candidates = [Candidate(draft=profile.draft, draft_length=rule) for rule in rules.values()]
    measurements = bench.side_by_side(candidates, indices, on_sample=advance)
    return tuple(RuleEntry(*parts) for parts in zip(rules, rules.values(), measurements, strict=True))


def _in_turns(groups: Sequence[Sequence[int]]) -> list[int]:
    """One of each group in turn, while there are any: no kind comes in one piece."""
    longest = max(len(group) for group in groups)
    return [group[index] for index in range(longest) for group in groups if index < len(group)]


def write_json(comparison: RuleComparison, path: Path) -> None:
    """All figures with their intervals, every sample, device and versions; whole or not at all."""
    rows = []
    for entry in comparison.entries:
        columns = {}
        for column, indices in comparison.columns.items():
            measured = entry.on(indices)
            columns[column] = {
                "speedup": measured.speedup_interval().model_dump(mode="json"),
                "over_best_fixed": comparison.over_best_fixed(entry, column).model_dump(mode="json"),
                "acceptance_rate": measured.acceptance_rate,
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
