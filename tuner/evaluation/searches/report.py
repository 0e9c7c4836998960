"""Report of a comparison of searches: table, CSV, picture, and JSON with all data."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from decoding.documents.atomic_write import write_atomically
from decoding.profile import Interval
from studies.measurement import Measurement
from tuner.errors import ConfigError
from tuner.evaluation.searches.curves import Curve
from tuner.evaluation.searches.result import Axis, SearchComparison
from tuner.evaluation.searches.runs import SearchRun
from tuner.tables import facts_grid, figures_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ["#d55e00", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#000000", "#999999", "#8c510a", "#7570b3"]
"""One colour per search, in order; most are from the colour-blind safe palette of Okabe and Ito."""
WIDE = 30
"""Ratio of the last step to the first above which the picture's axis is logarithmic."""
CSV_COLUMNS = (
    *("search", "seed", "trial", "state", "seconds", "tokens", "counts", "tuning_speedup"),
    *("incumbent_trial", "incumbent_held_out_speedup", "draft", "draft_length"),
)


def searches_table(found: SearchComparison) -> RenderableType:
    """Return a table of the searches: held-out speed-up, spending, comparison with the reference."""
    num_seeds = len(found.runs[found.reference])
    columns = ("speed-up", f"over {found.reference}", "trials", "seconds", "tokens", "identical")
    table = figures_table(
        f"Held-out speed-up after {found.limits}, {num_seeds} seed{'s' if num_seeds > 1 else ''} (95 % intervals)",
        "search",
        *columns,
        f"{found.reference} matches after",
    )
    for search in found.searches:
        same, of = found.identical(search)
        early = "*" if any(run.finished_early for run in found.runs[search]) else " "
        table.add_row(
            search,
            _interval(found.speedup(search)),
            "" if search == found.reference else _interval(found.over_reference(search)),
            f"{found.num_trials(search):.1f}{early}",
            f"{found.spent(search, 'seconds'):.1f}",
            f"{found.spent(search, 'tokens'):,.0f}",
            f"{same}/{of}",
            "" if search == found.reference else _reach(found, search),
        )
    legend = facts_grid()
    for term, meaning in _legend(found):
        legend.add_row(term, meaning)
    return Group(table, legend)


def _legend(found: SearchComparison) -> Iterator[tuple[str, str]]:
    yield "speed-up", "of the search's best candidate over plain decoding; 1 if it found nothing faster"
    yield (
        "trials ...",
        "means over seeds; seconds include preparation, trials that ended beyond the budget do not count",
    )
    yield (
        f"{found.reference} matches after",
        f"share of the search's seconds and tokens that {found.reference} needed to reach the same speed-up",
    )
    for search in found.searches:
        ended = [f"seed {run.seed}: {run.ended}" for run in found.runs[search] if run.finished_early]
        if ended:
            yield f"* {search}", f"finished early and kept its best; {'; '.join(ended)}"
        if empty := [str(run.seed) for run in found.runs[search] if not found.counted(run)]:
            yield search, f"no trial ended within the budget with seed {', '.join(empty)}"
        if lossy := [str(run.seed) for run in found.runs[search] if not _is_lossless(found, run)]:
            yield (
                search,
                f"output differs from plain decoding on held-out prompts, so its speed-up counts as 1: seed {', '.join(lossy)}",
            )


def _is_lossless(found: SearchComparison, run: SearchRun) -> bool:
    measured = found.measured(found.final(run))
    return measured is None or measured.is_lossless


def _interval(interval: Interval) -> str:
    return f"{interval.value:.2f} [{interval.ci95[0]:.2f}, {interval.ci95[1]:.2f}]"


def _reach(found: SearchComparison, search: str) -> str:
    seconds, tokens = found.reach(search, "seconds").share, found.reach(search, "tokens").share
    if seconds is None or tokens is None:
        return "not reached"
    return f"{seconds:.0%} s, {tokens:.0%} tok"


def searches_csv(found: SearchComparison) -> str:
    """Return a CSV of all trials, with the budget spent and the incumbent."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for runs in found.runs.values():
        for run in runs:
            writer.writerows(_trial_rows(found, run))
    return text.getvalue()


def _trial_rows(found: SearchComparison, run: SearchRun) -> Iterator[dict[str, Any]]:
    num_counted = len(found.counted(run))
    for index, point in enumerate(run.points()):
        counts = index < num_counted
        trial, incumbent = point.trial, point.incumbent
        yield {
            "search": run.search,
            "seed": run.seed,
            "trial": trial.number,
            "state": trial.state.value,
            "seconds": round(point.seconds, 4),
            "tokens": point.tokens,
            "counts": int(counts),
            "tuning_speedup": None if trial.speedup is None else round(trial.speedup, 5),
            "incumbent_trial": None if incumbent is None else incumbent.number,
            # Incumbents from beyond the budget have no held-out measurement.
            "incumbent_held_out_speedup": round(found.held_out_speedup(incumbent), 5) if counts else None,
            "draft": trial.candidate.draft.describe(),
            "draft_length": trial.candidate.draft_length.describe(),
        }


def searches_json(found: SearchComparison) -> dict[str, Any]:
    """Return all figures with intervals, every incumbent, every held-out sample, and the facts."""
    return {
        **found.facts,
        "limits": found.limits.model_dump(mode="json"),
        "reference": found.reference,
        "results": {search: _result(found, search) for search in found.searches},
        "runs": [_run(found, run) for runs in found.runs.values() for run in runs],
        "held_out": [
            {
                "candidate": json.loads(key),
                "speedup": measured.speedup,
                "end_to_end_speedup": _end_to_end(measured),
                **measured.model_dump(mode="json"),
            }
            for key, measured in found.held_out.items()
            if measured.samples
        ],
    }


def _end_to_end(measured: Measurement) -> dict[str, Any] | None:
    whole = measured.end_to_end
    return None if whole is None else whole.speedup_interval().model_dump(mode="json")


def _result(found: SearchComparison, search: str) -> dict[str, Any]:
    same, of = found.identical(search)
    reached = {axis: found.reach(search, axis) for axis in ("seconds", "tokens")}
    return {
        "speedup": found.speedup(search).model_dump(mode="json"),
        "speedup_of_each_seed": [float(each) for each in found.finals(search).speedups()],
        "over_reference": found.over_reference(search).model_dump(mode="json"),
        "trials": found.num_trials(search),
        "seconds": found.spent(search, "seconds"),
        "tokens": found.spent(search, "tokens"),
        "identical": same,
        "texts": of,
        "reference_reached": {axis: {"at": each.at, "share": each.share} for axis, each in reached.items()},
    }


def _run(found: SearchComparison, run: SearchRun) -> dict[str, Any]:
    seconds, tokens = run.spent(found.limits)
    final = found.final(run)
    return {
        "search": run.search,
        "seed": run.seed,
        "preparation_seconds": run.preparation_seconds,
        "seconds": seconds,
        "tokens": tokens,
        "trials": len(found.counted(run)),
        "ended": run.ended,
        "finished_early": run.finished_early,
        "remarks": list(run.remarks),
        "final": None if final is None else final.candidate.model_dump(mode="json"),
        "tuning_speedup": None if final is None else final.speedup,
        "held_out_speedup": found.held_out_speedup(final),
    }


def searches_picture(found: SearchComparison, file: IO[bytes]) -> None:
    """Draw the held-out speed-up of the best so far against seconds and tokens.

    Thick lines are searches (means over seeds), thin lines are seeds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(found, "seconds", left)
    _draw(found, "tokens", right)
    left.set(xlabel="seconds of search, preparation included", ylabel="held-out speed-up of the best so far")
    right.set(xlabel="tokens decoded in measuring")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.savefig(file, dpi=130)


def _draw(found: SearchComparison, axis: Axis, axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    curves = {search: [found.curve(run, axis) for run in runs] for search, runs in found.runs.items()}
    steps = [start for of_seeds in curves.values() for curve in of_seeds for start, _ in curve if start > 0]
    limit = getattr(found.limits, axis)
    first, last = min(steps, default=1.0), limit or max(steps, default=1.0)
    is_wide = last > WIDE * first
    begin = first / 2 if is_wide else 0.0
    for index, (search, of_seeds) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        mean = found.mean_curve(search, axis)
        # A finished search keeps its best to the end of the budget. Without a budget the curve ends with its last step.
        end = limit or (mean[-1][0] if mean else begin)
        if len(of_seeds) > 1:
            for curve in of_seeds:
                axes.step(*_extended(curve, begin, end), where="post", color=colour, lw=0.6, alpha=0.4)
        width = 2.4 if search == found.reference else 1.6
        axes.step(*_extended(mean, begin, end), where="post", color=colour, lw=width, label=search)
    axes.axhline(1.0, color="#888888", linestyle="--", linewidth=1)
    if is_wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())  # labels of minor ticks overlap the major ones
    axes.set_xlim(begin, last * 1.02)


def _extended(curve: Curve, begin: float, end: float) -> tuple[list[float], list[float]]:
    """Return x and y of a curve, extended to `begin` and `end`."""
    points = [(begin, 1.0), *curve, (end, curve[-1][1] if curve else 1.0)]
    return [start for start, _ in points], [value for _, value in points]


def write_report(found: SearchComparison, folder: Path) -> None:
    """Write `searches.csv`, `searches.json` and `searches.png` atomically; raise `ConfigError` if that fails."""
    picture = io.BytesIO()
    searches_picture(found, picture)
    files = {
        "searches.csv": searches_csv(found).encode(),
        "searches.json": json.dumps(searches_json(found), indent=1).encode(),
        "searches.png": picture.getvalue(),
    }
    for name, content in files.items():
        write_atomically(folder / name, content, what="the comparison", error=ConfigError)
