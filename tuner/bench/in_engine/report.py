"""The report of a bench in an engine: table and JSON. Measures nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType

from tuner.bench.in_engine.result import EngineDraft, EngineResult
from tuner.tables import facts_grid, figures_table

LONGEST_NAME = 24
"""Characters of a draft's name beside which the figures fit into the table."""


def engine_table(result: EngineResult) -> RenderableType:
    """Return a line per draft, the profile's first and the others by speed, and a legend below."""
    texts = result.drafts[0].texts
    title = f"{result.title} ({result.version}): {texts.num_texts} prompts (95 % intervals over prompts)"
    headings = (
        "plain\ntok/s",
        "tok/s",
        "over plain",
        "end to end",
        "accepted/\ndrafted",
        "per\nround",
        "iden-\ntical",
    )
    table = figures_table(title, "draft", *headings)
    own, *others = result.drafts
    fastest_first = sorted(others, key=lambda each: each.texts.measurement.speedup_interval().value, reverse=True)
    names = [each.name for each in (own, *fastest_first)] + list(result.failed)
    shown = _short(names)
    for draft in (own, *fastest_first):
        table.add_row(shown[draft.name], *_cells(draft))
    for name in result.failed:
        table.add_row(shown[name], "failed")
    legend = facts_grid()
    for name in names:
        if shown[name] != name:
            legend.add_row(shown[name], name)
    for term, meaning in _legend(result):
        legend.add_row(term, meaning)
    return Group(table, legend)


def _short(names: Sequence[str]) -> dict[str, str]:
    """Return what the table calls each draft: flags are long, and are numbered."""
    return {name: name if len(name) <= LONGEST_NAME else f"flags {number}" for number, name in enumerate(names)}


def engine_json(result: EngineResult) -> dict[str, Any]:
    """Return all figures with their intervals and samples as plain data."""
    return {
        **result.facts,
        "predicted": {"speedup": result.predicted.value, "explanation": result.predicted.explanation},
        "drafts": {each.name: _figures(each) for each in result.drafts},
        "failed": result.failed,
        "remarks": list(result.remarks),
        "samples": {
            each.name: [sample.model_dump(mode="json") for sample in each.texts.measurement.samples]
            for each in result.drafts
        },
    }


def _figures(draft: EngineDraft) -> dict[str, Any]:
    measurement, texts = draft.texts.measurement, draft.texts
    whole = measurement.end_to_end
    return {
        "flags": shlex.join(draft.flags),
        "speedup": measurement.speedup_interval().model_dump(mode="json"),
        "end_to_end_speedup": None if whole is None else whole.speedup_interval().model_dump(mode="json"),
        "plain_tokens_per_second": measurement.plain_tokens_per_second,
        "draft_tokens_per_second": measurement.draft_tokens_per_second,
        "num_draft_tokens": measurement.num_draft_tokens,
        "num_accepted_draft_tokens": measurement.num_accepted_draft_tokens,
        "rounds": measurement.num_spec_steps,
        "texts": texts.num_texts,
        "identical": texts.num_identical,
        "ties": texts.num_ties,
        "too_short": texts.num_too_short,
        "seconds": draft.seconds,
    }


def _cells(draft: EngineDraft) -> tuple[str, ...]:
    measurement, texts = draft.texts.measurement, draft.texts
    whole = measurement.end_to_end
    ties = f"\n+ {texts.num_ties} ties" if texts.num_ties else ""
    return (
        f"{measurement.plain_tokens_per_second:.1f}",
        f"{measurement.draft_tokens_per_second:.1f}",
        f"{measurement.speedup_interval()}",
        "" if whole is None else f"{whole.speedup_interval()}",
        f"{measurement.num_accepted_draft_tokens}/\n{measurement.num_draft_tokens}",
        f"{measurement.mean_acceptance_length:.2f}",
        f"{texts.num_identical}/{texts.num_texts}{ties}",
    )


def _legend(result: EngineResult) -> Iterator[tuple[str, str]]:
    yield (
        "over plain",
        f"decode phase by {result.title}'s own clock, over its own plain decoding of the same prompts, in turns",
    )
    yield "per round", "tokens that a round with a draft adds on average: accepted ones, and one of the target"
    predicted = result.predicted
    value = "none" if predicted.value is None else f"{predicted.value:.2f}"
    yield "predicted", f"{value}: {predicted.explanation}"
    yield "verdict", _verdict(result)
    if result.num_different:
        yield "different", f"{result.num_different} texts differ from {result.title}'s own plain decoding"
    for remark in result.remarks:
        yield "remark", remark
    for name, reason in result.failed.items():
        yield "failed", f"{name}: {reason}"


def _verdict(result: EngineResult) -> str:
    """Return what the intervals say of the profile's draft, and the fastest other draft that beats plain decoding."""
    profile, *others = [(each.name, each.texts.measurement.speedup_interval()) for each in result.drafts]
    low, high = profile[1].ci95
    if low > 1:
        text = f"the profile's draft is faster than plain decoding in {result.title}"
    elif high < 1:
        text = f"decode plainly in {result.title} rather than with the profile's draft, which is slower there"
    else:
        text = f"no gain is proved in {result.title}: the interval of the profile's draft reaches 1"
    faster = [(interval.value, name) for name, interval in others if interval.ci95[0] > 1]
    return f"{text}; the fastest other draft: {max(faster)[1]}" if faster else text
