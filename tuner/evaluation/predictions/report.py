"""Report of predictions against decoding: tables, CSV, picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tuner.evaluation.predictions.accuracy import Accuracy
from tuner.evaluation.predictions.check import Compared, PredictionCheck
from tuner.evaluation.predictions.rule_tuning import NEAR, TuningCheck
from tuner.evaluation.tables import ALL
from tuner.tables import figures_table

COLOURS = ("#1b6ca8", "#d55e00", "#2e8b57", "#8e5ea2", "#b8860b")


def predictions_table(check: PredictionCheck) -> RenderableType:
    """Return tables of prediction accuracy: overall, by kind of draft, by rule, by component."""
    groups = check.by_group()
    plain: RenderableType = _accuracy_table("Predicted vs measured speed-up", groups, check.raw)
    corrected = _accuracy_table(
        "Corrected by the residual of all other configurations (leave one out)",
        {ALL: groups[ALL]},
        check.corrected,
    )
    if len(categories := check.by_category()) > 1:
        by_category = _accuracy_table("By category of the prompts", {}, check.raw)
        for name, found in categories.items():
            _add(by_category, name, found)
        plain = Group(plain, by_category)
    parts = _accuracy_table("Components of the prediction", {}, check.raw)
    _add(parts, "tokens per round", check.tokens_per_round(check.pairs))
    _add(parts, "cost per round", check.round_cost(check.pairs))
    return Group(plain, corrected, parts, *(Text(line) for line in _prediction_facts(check)))


def _accuracy_table(
    title: str, groups: dict[str, tuple[Compared, ...]], of: Callable[[Sequence[Compared]], Accuracy]
) -> Table:
    table = figures_table(
        title, "configurations", "count", "Spearman", "Pearson (log)", "median error", "worst", "measured / predicted"
    )
    for name, pairs in groups.items():
        _add(table, name, of(pairs))
    return table


def _add(table: Table, name: str, found: Accuracy) -> None:
    table.add_row(
        name,
        str(found.count),
        *("" if each is None else f"{each:.3f}" for each in (found.spearman, found.pearson_of_logs)),
        f"{found.median_error:.1%}",
        f"{found.worst_error:.1%}",
        f"{found.bias:.3f}",
    )


def _prediction_facts(check: PredictionCheck) -> list[str]:
    samples = [sample for pair in check.pairs for sample in pair.measurement.samples]
    wrong = sum(not (sample.identical or sample.tie) for sample in samples)
    per_draft = check.prediction_seconds / len(check.pairs)
    return [
        f"seconds  {check.cost_seconds:.1f} for the costs, {check.prediction_seconds:.1f} for the predictions ({per_draft:.2f} "
        f"each), {check.decoding_seconds:.1f} for decoding",
        f"costs    {check.costs.describe()}",
        f"outputs  {wrong} of {len(samples)} differ from plain decoding",
    ]


def tuning_table(check: TuningCheck) -> RenderableType:
    """Return a table of rules tuned by replay and by decoding."""
    title = "Rules tuned by replay vs by real decoding (speed-ups on held-out prompts, 95 % intervals)"
    table = figures_table(
        title, "draft and rule", "ratio", "replay", "decoding", "replay, s", "decoding, s", "time ratio"
    )
    for each in check.tuned:
        table.add_row(
            Text(f"{each.draft.describe()}; {each.replayed.rule}", overflow="fold"),
            f"{each.ratio:.3f}",
            f"{each.replayed_speedup.value:.2f}",
            f"{each.decoded_speedup.value:.2f}",
            f"{each.replay_seconds:.2f}",
            f"{each.decoding_seconds:.1f}",
            f"{each.replay_seconds / each.decoding_seconds:.3f}",
        )
    lines = [
        f"ratio    {check.ratio:.3f} (geometric mean); {check.num_level} of {len(check.tuned)} at {NEAR} or above",
        f"seconds  {check.shared_seconds:.1f} for costs and texts, shared by all; including them, tuning by replay took "
        f"{check.share_of_seconds:.3f} of the time of tuning by decoding ({check.tuned[0].num_trials} trials each)",
    ]
    return Group(table, *(Text(line) for line in lines))


def pairs_csv(check: PredictionCheck) -> str:
    """Return a CSV with one line per configuration: predictions and measurements."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = (
        "predicted corrected measured low high predicted_tokens_per_round measured_tokens_per_round predicted_round_cost "
        "measured_round_cost"
    )
    writer.writerow(["kind", "draft", "rule", "setting", *figures.split(), "prompts", "identical", "ties"])
    for pair in check.pairs:
        rule = pair.candidate.draft_length
        values = (
            pair.predicted,
            pair.corrected,
            pair.measured.value,
            *pair.measured.ci95,
            pair.predicted_tokens_per_round,
            pair.measured_tokens_per_round,
            pair.predicted_round_cost,
            pair.measured_round_cost,
        )
        shown = [f"{value:.4f}" for value in values]
        measured = pair.measurement
        counts = [len(measured.samples), measured.num_identical, measured.num_ties]
        writer.writerow([pair.kind, pair.candidate.draft.describe(), rule.rule, rule.describe(), *shown, *counts])
    return text.getvalue()


def pairs_picture(check: PredictionCheck) -> bytes:
    """Return a PNG of measured against predicted speed-ups, with 95 % intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.subplots()
    groups = {name: pairs for name, pairs in check.by_group().items() if name in {pair.kind for pair in check.pairs}}
    for index, (kind, pairs) in enumerate(groups.items()):
        values = [pair.measured.value for pair in pairs]
        bars = [
            [max(pair.measured.value - pair.measured.ci95[0], 0.0) for pair in pairs],
            [max(pair.measured.ci95[1] - pair.measured.value, 0.0) for pair in pairs],
        ]
        predicted = [pair.predicted for pair in pairs]
        axes.errorbar(
            predicted, values, yerr=bars, fmt="o", ms=4, lw=0.8, color=COLOURS[index % len(COLOURS)], label=kind
        )
    ends = [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
    axes.plot(ends, ends, color="#888888", lw=1, label="as predicted")
    axes.set(xlabel="predicted speed-up", ylabel="measured speed-up", title="Random configurations")
    axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130, metadata={"Software": None})
    return picture.getvalue()
