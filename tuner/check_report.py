"""What the checks found, for people: tables for the terminal and the text file, a CSV and a picture of all pairs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from statistics import fmean

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from decoding.profile import Interval
from studies.prediction_error import Accuracy
from tuner.check_coverage import CoverageCheck
from tuner.check_integrity import MOST_CLAIMS, NullCheck
from tuner.check_predictions import ALL, Compared, PredictionCheck
from tuner.check_rule_tuning import NEAR, TuningCheck

COLOURS = ("#1b6ca8", "#d55e00", "#2e8b57", "#8e5ea2", "#b8860b")


def predictions_table(check: PredictionCheck) -> RenderableType:
    """How good the predictions were, over all configurations and by kind of draft and of rule."""
    groups = check.by_group()
    plain = _accuracy_table("Predicted against measured speed-up", groups, check.raw)
    corrected = _accuracy_table(
        "The same with the correction that all other configurations teach (leave one out)",
        {ALL: groups[ALL]},
        check.corrected,
    )
    parts = _accuracy_table("What the predictions are made of", {}, check.raw)
    _add(parts, "tokens a round", check.tokens_per_round(check.pairs))
    _add(parts, "cost of a round", check.round_cost(check.pairs))
    return Group(plain, corrected, parts, *(Text(line) for line in _prediction_facts(check)))


def _accuracy_table(
    title: str, groups: dict[str, tuple[Compared, ...]], of: Callable[[Sequence[Compared]], Accuracy]
) -> Table:
    table = _table(
        title, "configurations", "number", "Spearman", "Pearson (log)", "median error", "worst", "measured / predicted"
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
        f"texts    {wrong} of {len(samples)} were not those of plain decoding",
    ]


def tuning_table(check: TuningCheck) -> RenderableType:
    """Rules tuned by replay against rules tuned by real decoding, on held-out prompts."""
    title = "Rules tuned by replay alone, over the same rules tuned by real decoding (held-out prompts, 95 % intervals)"
    table = _table(title, "draft and rule", "ratio", "replay", "decoding", "replay, s", "decoding, s", "share of s")
    for each in check.tuned:
        table.add_row(
            Text(f"{each.draft.describe()}; {each.replayed.rule}", overflow="fold"),
            _shown(each.ratio),
            f"{each.replayed_speedup.value:.2f}",
            f"{each.decoded_speedup.value:.2f}",
            f"{each.replay_seconds:.2f}",
            f"{each.decoding_seconds:.1f}",
            f"{each.replay_seconds / each.decoding_seconds:.3f}",
        )
    lines = [
        f"ratio    {check.ratio:.3f} (geometric mean); {check.num_level} of {len(check.tuned)} at {NEAR} or above",
        f"seconds  {check.shared_seconds:.1f} for costs and texts, shared by all; with them replay took "
        f"{check.share_of_seconds:.3f} of the seconds of real tuning ({check.tuned[0].num_trials} trials each)",
    ]
    return Group(table, *(Text(line) for line in lines))


def nulls_table(checks: Sequence[NullCheck]) -> RenderableType:
    """How often a speed-up was claimed where none can be, family by family."""
    title = f"Speed-ups claimed where none can be (at most {MOST_CLAIMS:.0%} of the runs should)"
    table = _table(title, "candidates", "number", "best trial", "confirmed", "runs", "claims", "share, 95 % interval")
    for check in checks:
        table.add_row(
            check.family,
            str(check.num_candidates),
            f"{fmean(run.best_trial for run in check.runs):.3f}",
            f"{fmean(run.confirmed.value for run in check.runs):.3f}",
            str(len(check.runs)),
            str(check.num_claims),
            f"{check.share.value:.1%} [{check.share.ci95[0]:.1%}, {check.share.ci95[1]:.1%}]",
        )
    lines = []
    for check in checks:
        banks = [measured.speedup_interval() for measured in check.in_bank]
        known = f"; {', '.join(map(_shown, banks))} in the bank of held-out prompts" if banks else "; decoded anew"
        lines.append(f"{check.family:<10} speed-up {check.truth}{known}")
    return Group(table, *(Text(line) for line in lines))


def coverage_table(check: CoverageCheck) -> RenderableType:
    """How often a confirmation's interval held the value of the other passes, by kind of draft."""
    title = "Confirmations whose 95 % interval holds the value of a long re-measurement (at least 90 % should)"
    table = _table(title, "configurations", "number", "intervals", "hold it", "claim too much", "claim too little")
    for name, confirmations in check.by_kind().items():
        shares = (
            sum(each.is_covered for each in confirmations),
            sum(each.is_above for each in confirmations),
            sum(each.is_below for each in confirmations),
        )
        number = sum(name in (ALL, each.kind) for each in check.configurations)
        shown = (f"{share / len(confirmations):.1%}" for share in shares)
        table.add_row(name, str(number), str(len(confirmations)), *shown)
    line = (
        f"intervals  of {check.prompts_drawn} prompts drawn from one pass over {check.prompts_in_all}; from pass to pass a "
        f"speed-up varies by {check.spread_of_passes:.1%}, the prompts being the same"
    )
    return Group(table, Text(line))


def pairs_csv(check: PredictionCheck) -> str:
    """One line a configuration: what was foretold and what was measured."""
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
    """A PNG of measured over predicted speed-up, a point for each configuration with its 95 % interval."""
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
    axes.plot(ends, ends, color="#888888", lw=1, label="as foretold")
    axes.set(xlabel="predicted speed-up", ylabel="measured speed-up", title="Random configurations")
    axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130, metadata={"Software": None})
    return picture.getvalue()


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")  # a figure that is cut is none
    return table


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.ci95[0]:.3f}, {interval.ci95[1]:.3f}]"
