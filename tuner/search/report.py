"""The result of a search: tables, pictures and a CSV. Measures nothing and imports no MLflow."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from decoding.drafts import Draft, LayerSkip, compact_indices
from decoding.probe import Capabilities
from decoding.profile import DraftProfile, EndToEndFigures, Interval, Measured, ProfileOrigin
from studies.contract import TrialRecord, TrialState
from tuner.review.document import trial_name
from tuner.review.verdict import shipping
from tuner.tables import facts_grid, spaced
from tuner.trial_columns import trial_metrics, trial_params

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STRIP_WIDTH = 40
"""Layers per line of the strip of skipped layers."""
MOST_TICKS = 30
"""Most trial numbers under the picture of the skipped layers."""
SKIP_COLOURS = {
    "kept": "#f2f2f2",
    "attention skipped": "#e69f00",
    "MLP skipped": "#56b4e9",
    "both skipped": "#1b3a5c",
}
"""Colour of each value of a skip grid, in order."""
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442"]
"""One colour per study: Okabe and Ito's palette, which colour-blind readers can distinguish."""


def profile_panel(profile: DraftProfile) -> RenderableType:
    """Return a profile on one screen."""
    facts = facts_grid()
    _add_draft(facts, profile)
    facts.add_row("verdict", Text(shipping(profile), style="bold"))
    if profile.measured is not None:
        _add_figures(facts, profile.measured)
    else:
        reason = "not confirmed on held-out prompts" if profile.draft.drafts else "nothing beat plain decoding"
        facts.add_row("measured", reason)
    if profile.provenance is not None:
        _add_origin(facts, profile.provenance)
    return Panel(facts, title=Text(profile.name), title_align="left")


def _add_draft(facts: Table, profile: DraftProfile) -> None:
    target, decoding = profile.target, profile.decoding
    facts.add_row("target", f"{target.model}, {target.architecture}, {target.num_layers} layers, {target.dtype}")
    facts.add_row("draft", spaced(profile.draft.describe()))
    if (skip := _skipped(profile.draft, target.num_layers)) is not None:
        facts.add_row("", _strip(skip, target.num_layers))
    for name in profile.draft.files:
        facts.add_row("head", name)
    if profile.draft.drafts:
        facts.add_row("stops", profile.draft_length.describe())
    mode = "" if decoding.exact_width is None else f", bit-exact on {decoding.exact_width} positions"
    facts.add_row("decoding", f"temperature {decoding.temperature:g}, runner {decoding.runner}{mode}")


def _add_figures(facts: Table, measured: Measured) -> None:
    low, high = measured.speedup.ci95
    rates, exact, data, cost = measured.tokens_per_second, measured.exact, measured.dataset, measured.search
    speedup = f"{measured.speedup.value:.2f}x, 95 % interval {low:.2f} to {high:.2f}"
    facts.add_row("speed-up", Text(f"{speedup}, of decoding", style="bold"))
    if measured.noise:
        facts.add_row("noise", "; ".join(measured.noise))
    per_round = f"{measured.mean_acceptance_length or measured.tokens_per_round:.2f} tokens a round"
    facts.add_row("rates", f"{rates.draft:.1f} tokens/s, plain {rates.plain:.1f}; {per_round}")
    if measured.end_to_end is not None:
        _add_end_to_end(facts, measured.end_to_end)
    for name, figures in measured.categories.items():
        whole = "" if figures.end_to_end_speedup is None else f"; end to end {figures.end_to_end_speedup}"
        facts.add_row(name, f"{figures.speedup}{whole}, {figures.prompts} prompts")
    for name, against in measured.stock.items():
        facts.add_row(f"over {name}", f"{against.profile_over_it} of its decoding speed, {against.prompts} prompts")
    if measured.batch_size > 1:
        batch = f"{measured.batch_size} prompts in lockstep, also for plain decoding; rates are per batch"
        facts.add_row("batch", batch)
    facts.add_row("accepted", f"{measured.draft_acceptance_rate:.0%} of the drafted tokens")
    identical = f"{exact.identical} of {exact.prompts} held-out prompts identical"
    facts.add_row("exact", f"{identical}, {exact.ties} numerical ties")
    held_out = f"{exact.prompts} of {data.held_out_prompts} held out measured"
    sizes = f"{data.tuning_prompts} tuning, {held_out}, {data.max_new_tokens} tokens"
    if measured.confirmations > 1:
        facts.add_row("confirmed", f"as winner number {measured.confirmations} on the same held-out prompts")
    facts.add_row("data", f"{data.name}: {sizes}")
    heads = f"; {cost.distillation_seconds:.0f} s to distil exit heads" if cost.distillation_seconds else ""
    facts.add_row("search", f"{cost.trials} trials, {cost.seconds:.0f} s{heads}")
    facts.add_row("device", measured.device)
    facts.add_row("versions", ", ".join(f"{name} {version}" for name, version in measured.versions.items()))


def _add_end_to_end(facts: Table, figures: EndToEndFigures) -> None:
    low, high = figures.speedup.ci95
    rates, first = figures.tokens_per_second, figures.time_to_first_token_seconds
    speedup = f"{figures.speedup.value:.2f}x, 95 % interval {low:.2f} to {high:.2f}"
    facts.add_row("end to end", f"{speedup}; {rates.draft:.1f} tokens/s, plain {rates.plain:.1f}")
    facts.add_row("first token", f"after {first.draft * 1000:.1f} ms, plain {first.plain * 1000:.1f}")


def _add_origin(facts: Table, origin: ProfileOrigin) -> None:
    facts.add_row("created", f"{origin.created} by {origin.study}")
    if origin.origin is not None:
        facts.add_row("proposed by", spaced(origin.origin))
    if origin.engine is not None:
        facts.add_row("measured in", f"{origin.engine.name} {origin.engine.version}")
    sources = {"git revision": origin.git_revision, "MLflow run": origin.mlflow_run_id}
    if known := [f"{name} {value}" for name, value in sources.items() if value]:
        facts.add_row("from", ", ".join(known))


def capabilities_panel(found: Capabilities) -> RenderableType:
    """Return the capabilities of a model that the probe found."""
    facts = facts_grid()
    facts.add_row(
        "model", f"{found.architecture}, {found.num_parameters / 1e6:.1f} M parameters, {found.dtype} on {found.device}"
    )
    if found.num_layers is not None:
        facts.add_row("blocks", _share(found.skippable_blocks, found.num_layers))
        facts.add_row("attention", _share(found.skippable_attention, found.num_layers))
        facts.add_row("MLP", _share(found.skippable_mlp, found.num_layers))
        facts.add_row("rollback", "the cache rolls back exactly")
        facts.add_row("prefix reuse", "yes" if found.prefix_reuse else "no: every verification runs the whole model")
    verdict = Text("can be tuned: speculative decoding gives the tokens of plain decoding", style="bold green")
    facts.add_row(
        "verdict", verdict if found.is_supported else Text(f"cannot be tuned: {found.refusal}", style="bold red")
    )
    return Panel(facts, title="sdtune doctor", title_align="left")


def trials_csv(records: Sequence[TrialRecord]) -> str:
    """Return one line per trial, with the columns that MLflow shows."""
    rows = [
        {**trial_params(r), "state": r.state.value, "repeat_of": r.repeat_of, **trial_metrics(r), "reason": r.reason}
        for r in records
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def skipped_layers_picture(records: Sequence[TrialRecord], num_layers: int, winner: str | None, path: Path) -> None:
    """Draw the layers that each trial skipped: a column per trial, a row per layer; the winner (`study/number`) is framed."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    skips = [(r, _skipped(r.candidate.draft, num_layers)) for r in records if r.repeat_of is None]
    drawn = [(record, skip) for record, skip in skips if skip is not None]
    shown = [record for record, _ in drawn]
    width, height = max(7.0, 0.16 * len(shown) + 3), max(4.0, 0.14 * num_layers + 1.5)
    figure = Figure(figsize=(min(width, 16.0), min(height, 10.0)), layout="constrained")
    axes = figure.subplots()
    grid, colours = _skip_grid([skip for _, skip in drawn], num_layers), ListedColormap(list(SKIP_COLOURS.values()))
    axes.imshow(grid, cmap=colours, vmin=0, vmax=3, aspect="auto", interpolation="none", origin="lower")
    axes.set(xlabel="trial", ylabel="layer")
    framed = _frame_winner(axes, shown, num_layers, winner)
    axes.set_title(f"Layers skipped by the draft{framed}", pad=32)  # above the names of the studies
    _mark_studies(axes, shown)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    patches = [Patch(facecolor=colour, edgecolor="#999999") for colour in SKIP_COLOURS.values()]
    figure.legend(patches, list(SKIP_COLOURS), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def _skip_grid(skips: Sequence[LayerSkip], num_layers: int) -> np.ndarray:
    """Return [num_layers, trials]: the sum of 1 for skipped attention and 2 for a skipped MLP."""
    grid = np.zeros((num_layers, max(len(skips), 1)), dtype=int)
    for column, skip in enumerate(skips):
        grid[list(skip.skip_attention), column] += 1
        grid[list(skip.skip_mlp), column] += 2
    return grid


def _frame_winner(axes: Axes, shown: Sequence[TrialRecord], num_layers: int, winner: str | None) -> str:
    """Frame the column of the winner, and return its part of the title."""
    from matplotlib.patches import Rectangle

    if winner is None:
        return ""
    names = [trial_name(record) for record in shown]
    if winner not in names:
        return f"; the winner, {winner}, runs no layers"
    column = names.index(winner)
    axes.add_patch(Rectangle((column - 0.5, -0.5), 1, num_layers, fill=False, edgecolor="#d55e00", linewidth=2))
    return f"; framed: the winner, {winner}"


def _mark_studies(axes: Axes, shown: Sequence[TrialRecord]) -> None:
    """Label columns with trial numbers, and draw a line with the study's name before its first trial."""
    # Columns are not trial numbers: repeats are left out, and each study counts from 0.
    ticks = range(0, len(shown), max(1, -(-len(shown) // MOST_TICKS)))
    axes.set_xticks(ticks, [str(shown[index].number) for index in ticks])
    starts = [start for start, record in enumerate(shown) if start == 0 or record.study != shown[start - 1].study]
    for index, start in enumerate(starts):
        axes.axvline(start - 0.5, color="black", linewidth=1.5)
        height = 1.01 + 0.05 * (index % 2)  # neighbours at two heights: a study of few trials is narrower than its name
        axes.text(start - 0.5, height, f" {shown[start].study}", transform=axes.get_xaxis_transform(), va="bottom")


def speedup_picture(records: Sequence[TrialRecord], winner: str | None, confirmed: Interval | None, path: Path) -> None:
    """Draw the speed-up of each trial in order with its 95 % interval, the best so far, and plain decoding.

    The `winner` (`study/number`) is framed, with its speed-up on held-out prompts (`confirmed`).
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    _scatter_trials(axes, records)
    best, line = float("nan"), []
    for record in records:
        best = record.speedup if record.speedup is not None and not record.speedup <= best else best
        line.append(best)
    axes.step(range(len(line)), line, where="post", color="#1b3a5c", label="best so far")
    axes.axhline(1.0, color="#888888", linestyle="--", linewidth=1, label="plain decoding")
    _frame_point(axes, records, winner, confirmed)
    axes.set(
        xlabel="trials in the order they ran",
        ylabel="speed-up on tuning prompts",
        title="Measured speed-up over plain decoding",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=130)


def _frame_point(axes: Axes, records: Sequence[TrialRecord], winner: str | None, confirmed: Interval | None) -> None:
    """Frame the winner's trial, and draw its speed-up on held-out prompts beside the trials."""
    for index, record in enumerate(records):
        if trial_name(record) == winner and record.measurement is not None:
            axes.scatter(
                [index],
                [record.measurement.speedup],
                s=130,
                marker="s",
                facecolors="none",
                edgecolors="#d55e00",
                linewidths=2,
                label=f"winner, {winner}",
            )
    if confirmed is not None:
        reach = [[confirmed.value - confirmed.ci95[0]], [confirmed.ci95[1] - confirmed.value]]
        at, value = [len(records)], [confirmed.value]
        axes.errorbar(
            at, value, yerr=reach, fmt="D", color="#d55e00", markersize=6, capsize=4, label="winner, held-out prompts"
        )


def _draw_intervals(axes: Axes, measured: Sequence[tuple[int, TrialRecord]], colour: str) -> None:
    """Draw the 95 % intervals of trials with two prompts or more."""
    for index, record in measured:
        if record.measurement is not None and len(record.measurement.samples) > 1:
            low, high = record.measurement.speedup_interval().ci95
            axes.plot([index, index], [low, high], color=colour, linewidth=0.9, alpha=0.6, zorder=1)


def _scatter_trials(axes: Axes, records: Sequence[TrialRecord]) -> None:
    """Draw one point per trial, coloured by study; pruned and failed trials have markers of their own."""
    measured = [(index, r) for index, r in enumerate(records) if r.measurement and r.repeat_of is None]
    for number, study in enumerate(dict.fromkeys(record.study for record in records)):
        own = [(index, r.speedup) for index, r in measured if r.study == study and r.speedup is not None]
        colour = COLOURS[number % len(COLOURS)]
        axes.scatter([index for index, _ in own], [value for _, value in own], s=22, color=colour, label=study)
        of_study = [(index, r) for index, r in measured if r.study == study and r.state is TrialState.COMPLETE]
        _draw_intervals(axes, of_study, colour)
    pruned = [(index, r.measurement.speedup) for index, r in measured if r.state is TrialState.PRUNED and r.measurement]
    if pruned:
        points = [index for index, _ in pruned], [value for _, value in pruned]
        axes.scatter(*points, s=18, facecolors="none", edgecolors="#888", label="pruned")
    if failed := [index for index, r in enumerate(records) if r.state is TrialState.FAIL]:
        # Failed trials have no speed-up: they are drawn at the bottom, whatever the scale.
        foot = axes.get_xaxis_transform()
        axes.scatter(failed, [0.02] * len(failed), marker="x", color="#d55e00", transform=foot, label="failed")


def _skipped(draft: Draft, num_layers: int) -> LayerSkip | None:
    """Return what a draft skips, or None if it runs no part of the target."""
    return draft.skipped(num_layers) if draft.runs_model else None


def _strip(draft: LayerSkip, num_layers: int) -> RenderableType:
    """Return one character per layer: `#` kept, `.` skipped, attention above MLP, below a scale of layer indices."""
    lines = []
    for start in range(0, num_layers, STRIP_WIDTH):
        layers = range(start, min(start + STRIP_WIDTH, num_layers))
        lines.append(Text(f"{'layer':>9} " + "".join(f"{layer:<5}" for layer in layers[::5]).rstrip(), style="dim"))
        for name, skipped in (("attention", draft.skip_attention), ("MLP", draft.skip_mlp)):
            marks = "".join("." if layer in skipped else "#" for layer in layers)
            line = Text(f"{name:>9} {marks}")
            line.highlight_regex(r"\.+", "yellow")
            lines.append(line)
    return Group(*lines, Text(f"{'':>10}# runs in the draft, . is skipped", style="dim"))


def _share(layers: Sequence[int], num_layers: int) -> str:
    if len(layers) == num_layers:
        return f"all {num_layers} can be skipped"
    return (
        f"{len(layers)} of {num_layers} can be skipped: {compact_indices(tuple(layers))}"
        if layers
        else "cannot be skipped"
    )
