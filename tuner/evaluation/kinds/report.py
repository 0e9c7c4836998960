"""Reports of the kinds: three tables, a CSV and JSON. Measures nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from decoding.profile import Interval
from studies.measurement import Measurement
from tuner.evaluation.kinds.document import KindRow, KindsFound
from tuner.evaluation.kinds.figures import additions, has_tasks, over_plain
from tuner.tables import figures_table

MEBIBYTE = 2**20
FIRST_WIDTH, COLUMN_WIDTH, FEWEST_COLUMNS = 28, 19, 180
UNKNOWN = "-"


def table_width(found: KindsFound) -> int:
    """Return the columns that the tables need."""
    return max(FEWEST_COLUMNS, FIRST_WIDTH + COLUMN_WIDTH * (len(_tasks(found)) + 1))


def kinds_tables(found: KindsFound) -> RenderableType:
    """Return the tables of all kinds, of their tasks, and of what each kind adds, and the facts below them."""
    tables = [_kinds_table(found), _tasks_table(found), _additions_table(found)]
    if found.predicted_only:
        tables.append(_predicted_table(found.predicted_only))
    return Group(*tables, *(Text(line) for line in _facts(found)))


def _kinds_table(found: KindsFound) -> Table:
    table = figures_table(
        "Kinds of drafts alone and combined: speed-up over plain decoding",
        "kind",
        "setting",
        "per round",
        "draft step",
        "measured",
        "predicted",
        "MiB",
        "distilling, s",
        "packing, s",
        "choosing, s",
        "identical",
    )
    table.columns[1].justify = "left"
    for row in found.rows:
        measured = row.measurement
        ties = f" + {measured.num_ties} tie{'s' if measured.num_ties > 1 else ''}" if measured.num_ties else ""
        table.add_row(
            Text(row.name),
            Text(f"{row.candidate.draft.describe()}; {row.candidate.draft_length.describe()}"),
            f"{measured.mean_acceptance_length:.2f}",
            f"{row.draft_step:.3f}",
            f"{over_plain(measured)}",
            f"{row.predicted:.2f}",
            *_preparation(row),
            f"{measured.num_identical}/{measured.num_prompts}{ties}",
        )
    return table


def _preparation(row: KindRow) -> tuple[str, ...]:
    seconds = row.distillation_seconds
    distilling = f"{seconds:.0f}" if seconds else UNKNOWN
    if row.footprint is None:
        return UNKNOWN, distilling, UNKNOWN, f"{row.choosing_seconds:.1f}"
    memory = f"{row.footprint.memory_bytes / MEBIBYTE:.1f}"
    return memory, distilling, f"{row.footprint.packing_seconds:.1f}", f"{row.choosing_seconds:.1f}"


def _tasks_table(found: KindsFound) -> Table:
    table = figures_table("Measured speed-up on each task", "kind", *_tasks(found), "overall")
    for row in found.rows:
        tasks = row.measurement.by_category()
        table.add_row(Text(row.name), *map(_speedup, tasks.values()), f"{over_plain(row.measurement)}")
    return table


def _speedup(measured: Measurement) -> str:
    """Return a speed-up with its interval, or without one if there is a single prompt."""
    return f"{measured.speedup_interval()}" if len(measured.samples) > 1 else f"{measured.speedup:.2f}"


def _additions_table(found: KindsFound) -> Table:
    table = figures_table("What each kind adds: best measured with it over best without it", "kind", "best with it")
    table.add_column("best without it", overflow="fold")
    table.add_column("ratio", justify="right")
    table.columns[1].justify = "left"
    for each in additions(found.rows):
        table.add_row(Text(each.kind), Text(each.best_with), Text(each.best_without), f"{each.ratio}")
    return table


def _predicted_table(rows: Sequence[KindRow]) -> Table:
    table = figures_table("Combinations that were predicted only", "kind", "setting", "draft step", "predicted")
    table.columns[1].justify = "left"
    for row in sorted(rows, key=lambda row: -row.predicted):
        setting = f"{row.candidate.draft.describe()}; {row.candidate.draft_length.describe()}"
        table.add_row(Text(row.name), Text(setting), f"{row.draft_step:.3f}", f"{row.predicted:.2f}")
    return table


def _facts(found: KindsFound) -> Iterator[str]:
    plain = found.rows[0].measurement.plain_tokens_per_second
    whole = has_tasks(found.rows[0].measurement)
    over_what = "geometric mean over the tasks" if whole else "over all prompts, as a task has fewer than two so far"
    yield (
        f"measured   on {found.num_done} held-out prompts, {over_what}, 95 % intervals; plain decoding: {plain:.1f} tokens/s"
    )
    yield "predicted  on the tuning prompts, by which the settings were chosen; draft step: in plain passes"
    yield "MiB        tensors that the draft holds beside the model, without keys and values"
    yield "adds       the best settings are chosen on the prompts they are measured on; below 1, no setting with it pays"
    yield (
        f"shared     {found.shared.cost_seconds:.0f} s for the costs, {found.shared.survey_seconds:.0f} s for reading the tuning "
        "texts"
    )
    yield f"costs      {found.shared.costs}"
    yield from found.notes


def _tasks(found: KindsFound) -> list[str]:
    return list(found.rows[0].measurement.by_category())


def kinds_csv(found: KindsFound) -> str:
    """Return a CSV with a line per kind and task, and one per kind over all tasks (`all`)."""
    file = io.StringIO()
    lines = [line for row in found.rows for line in _lines(row)]
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _lines(row: KindRow) -> Iterator[dict[str, Any]]:
    tasks = row.measurement.by_category()
    yield _line(row, "all", row.measurement, over_plain(row.measurement), row.predicted)
    for task, measured in tasks.items():
        interval = measured.speedup_interval() if len(measured.samples) > 1 else None
        yield _line(row, task, measured, interval, row.predicted_by_task.get(task))


def _line(
    row: KindRow, task: str, measured: Measurement, interval: Interval | None, predicted: float | None
) -> dict[str, Any]:
    low, high = (None, None) if interval is None else interval.ci95
    taken = row.footprint
    return {
        "kind": row.name,
        "task": task,
        "draft": row.candidate.draft.describe(),
        "rule": row.candidate.draft_length.describe(),
        "speedup": measured.speedup if interval is None else interval.value,
        "low": low,
        "high": high,
        "predicted": predicted,
        "mean_acceptance_length": measured.mean_acceptance_length,
        "draft_acceptance_rate": measured.draft_acceptance_rate,
        "draft_step": row.draft_step,
        "memory_bytes": None if taken is None else taken.memory_bytes,
        "distillation_seconds": row.distillation_seconds,
        "packing_seconds": None if taken is None else taken.packing_seconds,
        "choosing_seconds": row.choosing_seconds,
        "identical": measured.num_identical,
        "ties": measured.num_ties,
        "prompts": measured.num_prompts,
    }


def kinds_json(found: KindsFound) -> dict[str, Any]:
    """Return all rows with their samples, the speed-ups and what each kind adds, as plain data."""
    return {
        "kinds": [
            {**row.model_dump(mode="json"), "speedup": over_plain(row.measurement).model_dump(mode="json")}
            for row in found.rows
        ],
        "predicted_only": [row.model_dump(mode="json", exclude={"measurement"}) for row in found.predicted_only],
        "additions": [
            {
                "kind": each.kind,
                "best_with": each.best_with,
                "best_without": each.best_without,
                "ratio": each.ratio.model_dump(mode="json"),
            }
            for each in additions(found.rows)
        ],
        "shared": found.shared.model_dump(mode="json"),
        "notes": list(found.notes),
    }
