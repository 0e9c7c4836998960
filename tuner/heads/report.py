"""Report of a distillation: table of exits, CSV of the loss curve."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.table import Table

from decoding.exit_heads import HeadFacts
from tuner.tables import figures_table

CURVE_EVERY = 10
"""Training steps per row of the curve."""


def exits_table(facts: Mapping[int, HeadFacts]) -> Table:
    """Return a table of exits: acceptance and agreement without and with a head."""
    title = "Exits on held-out prompts, without and with a head"
    table = figures_table(title, "exit", *("acceptance", "with head", "agreement", "with head"))
    for exit_layer, of_head in facts.items():
        if of_head.training is not None:
            before, after = of_head.training.before, of_head.training.after
            figures = (before.acceptance, after.acceptance, before.agreement, after.agreement)
            table.add_row(str(exit_layer), *(f"{figure:.3f}" for figure in figures))
    return table


def feature_head_table(facts: HeadFacts) -> Table:
    """Return a table of a feature head by the step of a round: acceptance and agreement before and after the training."""
    title = "Feature head on held-out prompts, by the step of a round"
    table = figures_table(title, "step", *("acceptance", "trained", "agreement", "trained"))
    if facts.training is not None:
        steps = zip(facts.training.before_by_step, facts.training.after_by_step, strict=True)
        for step, (before, after) in enumerate(steps, start=1):
            figures = (before.acceptance, after.acceptance, before.agreement, after.agreement)
            table.add_row(str(step), *(f"{figure:.3f}" for figure in figures))
    return table


def heads_table(facts: Mapping[int, HeadFacts]) -> Table:
    """Return the table of exit heads, or of a feature head, which a distillation makes alone."""
    feature = [of_head for of_head in facts.values() if of_head.is_feature_head]
    return feature_head_table(feature[0]) if feature else exits_table(facts)


def loss_curve_csv(losses: Sequence[Mapping[int, float]]) -> str:
    """Return the loss curve as CSV, in nats per token.

    Each row has the mean loss of each exit over `CURVE_EVERY` steps.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    exits = list(losses[0]) if losses else []
    writer.writerow(["step", *(f"exit_{exit_layer}" for exit_layer in exits)])
    for first in range(0, len(losses), CURVE_EVERY):
        block = losses[first : first + CURVE_EVERY]
        means = (fmean(of_step[exit_layer] for of_step in block) for exit_layer in exits)
        writer.writerow([first + len(block), *(f"{mean:.4f}" for mean in means)])
    return text.getvalue()
