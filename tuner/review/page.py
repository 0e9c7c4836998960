"""The HTML report of a search: one file that needs no network, with the script of its charts inside. Pure of data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from studies.contract import TrialRecord, TrialState
from studies.measurement import Measurement
from tuner.review.document import SearchResult, trial_name
from tuner.review.tables import final_rows
from tuner.review.verdict import verdict
from tuner.stage_clock import spoken

SECTIONS = (
    (
        "progress",
        "Progress of the search",
        "Points are trials on tuning prompts; hollow ones were pruned. The square frames the winner.",
    ),
    (
        "time",
        "Where the time of a token goes",
        "Measured on held-out prompts. Verifying includes the choice of accepted tokens and the rollback of the cache.",
    ),
    (
        "acceptance",
        "Acceptance by position",
        "Share of the winner's rounds that accepted the token at this position.",
    ),
    (
        "prediction",
        "Predicted against measured",
        "Predictions choose what to measure; they are never reported as measurements.",
    ),
    (
        "layers",
        "Layers that the drafts skip",
        "A column for each trial whose draft runs a part of the model; the frame is the winner's. No frame: it runs none.",
    ),
    ("prompts", "Speed-up by prompt", "Of the winner, on held-out prompts."),
    ("categories", "Speed-up by category", "Of the winner, on held-out prompts, with 95 % intervals."),
)
"""Charts with their titles and notes, in order."""


def report_page(result: SearchResult) -> str:
    """Return the report as HTML."""
    import jinja2
    import markupsafe
    from plotly.offline import get_plotlyjs

    from tuner.review.charts import CHARTS

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tuner.review", ""), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["code"] = _code
    charts = {name: draw(result) for name, draw in CHARTS.items()}
    shown = {
        name: None
        if figure is None
        else markupsafe.Markup(
            figure.to_html(
                div_id=f"chart-{name}",
                full_html=False,
                include_plotlyjs=False,
                config={"displayModeBar": False, "responsive": True},
            )
        )
        for name, figure in charts.items()
    }
    script = markupsafe.Markup(f"<script>{get_plotlyjs()}</script>")
    return environment.get_template("page.html.j2").render(
        result=result,
        verdict=verdict(result),
        charts=shown,
        sections=SECTIONS,
        script=script,
        rows=list(_rows(result)),
        kinds=list(_kinds(result.trials)),
        trials=list(_trials(result)),
        provenance=list(_provenance(result)),
    )


def _code(sentence: str) -> str:
    """Return a sentence as HTML: escaped, with `code` between backticks as such."""
    import markupsafe

    return markupsafe.Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(markupsafe.escape(sentence))))


def _rows(result: SearchResult) -> Iterator[dict[str, Any]]:
    for row in final_rows(result):
        few = f"on {result.comparison.num_prompts} of these prompts: " if row.is_stock and result.comparison else ""
        yield {"name": row.name, "description": f"{few}{row.description}", "won": row.won, "cells": row.cells}


def _kinds(trials: tuple[TrialRecord, ...]) -> Iterator[dict[str, Any]]:
    """Yield each kind of draft with its trials by state, and the best speed-up."""
    for kind in dict.fromkeys(record.candidate.draft.kind for record in trials):
        own = [record for record in trials if record.candidate.draft.kind == kind]
        states = Counter(record.state for record in own)
        best = max((record.speedup for record in own if record.speedup is not None), default=None)
        yield {
            "kind": kind.replace("_", " "),
            "trials": len(own),
            "complete": states[TrialState.COMPLETE],
            "pruned": states[TrialState.PRUNED],
            "failed": states[TrialState.FAIL],
            "best": "" if best is None else f"{best:.2f}",
        }


def _trials(result: SearchResult) -> Iterator[dict[str, Any]]:
    """Yield all trials, the fastest first, with what became of each."""
    raced = {each.trial: each.measurement for each in result.race}
    for record in sorted(result.trials, key=lambda each: -(each.speedup or 0.0)):
        name = trial_name(record)
        won = name == result.winner.trial
        yield {
            "name": name,
            "won": won,
            "speedup": "" if record.measurement is None else f"{record.measurement.speedup:.2f}",
            "description": record.candidate.describe(parameters=True),
            "outcome": "won the race" if won else _outcome(record, raced.get(name)),
        }


def _outcome(record: TrialRecord, raced: Measurement | None) -> str:
    if record.repeat_of is not None:
        return f"repeats {record.study}/{record.repeat_of}"
    if record.state is not TrialState.COMPLETE:
        return f"{'pruned' if record.state is TrialState.PRUNED else 'failed'}: {record.reason}"
    return "not among the finalists" if raced is None else f"lost the race, with {raced.speedup:.2f}"


def _provenance(result: SearchResult) -> Iterator[tuple[str, str]]:
    origin, noise = result.provenance, result.noise
    yield "command", origin.command
    yield "revision", origin.revision or "unknown"
    yield "date", origin.date
    yield "device", origin.device
    yield "load", f"at most {noise.load} on {noise.cores} cores" if noise.load is not None else "unknown"
    if noise.waiting is not None:
        yield "waiting", f"decoding waited for a processor for {noise.waiting:.0%} of its time in the confirmation"
    if noise.plain_variation is not None:
        yield "plain decoding", f"varied by {noise.plain_variation:.0%} between blocks on the same prompts"
    if noise.cost_error is not None:
        yield "cost table", f"held-out passes predicted within {noise.cost_error:.1%} (median)"
    yield "versions", ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    target = result.profile.target
    yield "model", f"{target.model}, {target.dtype}, weights {target.weights_sha256[:12]}"
    yield (
        "search",
        f"{result.cost.trials} trials, {result.cost.seconds:.0f} s; distilling {result.cost.distillation_seconds:.0f} s",
    )
    yield "time", ", ".join(f"{stage} {spoken(seconds)}" for stage, seconds in result.stages.items())
    yield "MLflow run", result.run_id
