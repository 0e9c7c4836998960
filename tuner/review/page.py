"""The HTML report of a search: one file that needs no network, with the script of its charts inside. Pure of data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from studies.contract import TrialRecord, TrialState
from studies.measurement import Measurement
from tuner.review.document import SearchReview, described, trial_name
from tuner.review.tables import final_rows
from tuner.review.verdict import verdict

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
    ("prompts", "Speed-up by prompt", "Of the winner, on held-out prompts."),
    ("categories", "Speed-up by category", "Of the winner, on held-out prompts, with 95 % intervals."),
    ("cost", "Cost of the search", "Seconds by stage of the last run of the search."),
)
"""Charts with their titles and notes, in order."""


def report_page(review: SearchReview) -> str:
    """Return the report as HTML."""
    import jinja2
    import markupsafe
    from plotly.offline import get_plotlyjs

    from tuner.review.charts import CHARTS

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tuner.review", ""), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["code"] = _code
    charts = {name: draw(review) for name, draw in CHARTS.items()}
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
        review=review,
        verdict=verdict(review),
        charts=shown,
        sections=SECTIONS,
        script=script,
        rows=list(_rows(review)),
        layers=_layers(review),
        no_layers=_no_layers(review),
        kinds=list(_kinds(review.trials)),
        trials=list(_trials(review)),
        provenance=list(_provenance(review)),
    )


def _code(sentence: str) -> str:
    """Return a sentence as HTML: escaped, with `code` between backticks as such."""
    import markupsafe

    return markupsafe.Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(markupsafe.escape(sentence))))


def _rows(review: SearchReview) -> Iterator[dict[str, Any]]:
    for row in final_rows(review):
        few = f"on {review.comparison.num_prompts} of these prompts: " if row.is_stock and review.comparison else ""
        yield {"name": row.name, "description": f"{few}{row.description}", "won": row.won, "cells": row.cells}


def _layers(review: SearchReview) -> dict[str, list[bool]] | None:
    """Return which sublayers the winner's draft leaves out; None if it runs no part of the model."""
    trial, num_layers = review.winning_trial, review.profile.target.num_layers
    if trial is None or not trial.candidate.draft.runs_model:
        return None
    skip = trial.candidate.draft.skipped(num_layers)
    return {
        "attention": [layer in skip.skip_attention for layer in range(num_layers)],
        "mlp": [layer in skip.skip_mlp for layer in range(num_layers)],
    }


def _no_layers(review: SearchReview) -> str:
    trial = review.winning_trial
    return (
        "" if trial is None else f"The winner runs no part of the model to draft: {trial.candidate.draft.describe()}."
    )


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


def _trials(review: SearchReview) -> Iterator[dict[str, Any]]:
    """Yield all trials, the fastest first, with what became of each."""
    raced = {each.trial: each.measurement for each in review.race}
    for record in sorted(review.trials, key=lambda each: -(each.speedup or 0.0)):
        name = trial_name(record)
        yield {
            "name": name,
            "won": name == review.winner,
            "speedup": "" if record.measurement is None else f"{record.measurement.speedup:.2f}",
            "description": described(record),
            "outcome": _outcome(record, won=name == review.winner, raced=raced.get(name)),
        }


def _outcome(record: TrialRecord, *, won: bool, raced: Measurement | None) -> str:
    if record.repeat_of is not None:
        return f"repeats {record.study}/{record.repeat_of}"
    if record.state is not TrialState.COMPLETE:
        return f"{'pruned' if record.state is TrialState.PRUNED else 'failed'}: {record.reason}"
    if won:
        return "won the race"
    if raced is not None:
        return f"lost the race, with {raced.speedup:.2f}" if raced.samples else "lost the race"
    return "not among the finalists"


def _provenance(review: SearchReview) -> Iterator[tuple[str, str]]:
    origin, noise = review.provenance, review.noise
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
    yield (
        "model",
        f"{review.profile.target.model}, {review.profile.target.dtype}, weights {review.profile.target.weights_sha256[:12]}",
    )
    yield (
        "search",
        f"{len(review.trials)} trials, {review.search_seconds:.0f} s; distilling {review.distillation_seconds:.0f} s",
    )
    yield "MLflow run", review.run_id
