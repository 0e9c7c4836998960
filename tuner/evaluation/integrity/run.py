"""`sdtune check-integrity` from its configuration to its results on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType

from decoding.documents.strict_yaml import suggest
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.evaluation.integrity.coverage import CoverageCheck, check_coverage
from tuner.evaluation.integrity.null_benches import Family, families
from tuner.evaluation.integrity.nulls import NullCheck, check_nulls
from tuner.evaluation.integrity.report import coverage_table, nulls_table
from tuner.evaluation.task import facts_of, prepare_check
from tuner.progress import Progress
from tuner.results import write_json, write_text
from tuner.search.task import Task, open_bench

NAME = "integrity"


def run_and_write(
    config: SearchConfig,
    out: Path,
    *,
    family: Sequence[str],
    copies: int,
    runs: int,
    repetitions: int,
    fresh: bool,
    configurations: int,
    passes: int,
    max_tokens: int,
    progress: Progress,
) -> RenderableType:
    """Search among candidates that cannot win, then check intervals if `configurations` is not 0; the tables of what was found.

    What is done is on disk before the next part begins. Raises errors of ours for what the user can put right.
    """
    chosen = _families(family, copies)
    task = prepare_check(config, out, progress)
    tuning = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
    held_out = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
    nulls: list[NullCheck] = []
    shown: RenderableType = ""
    for each in chosen:
        found = check_nulls(
            task, tuning, held_out, each, num_runs=runs, repetitions=repetitions, fresh=fresh, progress=progress
        )
        nulls.append(found)
        shown = _write(task, out, nulls, None)
    if configurations:
        prompts = [*task.prompts.tuning, *task.prompts.held_out]
        bench = open_bench(task, prompts, "decoding all prompts plainly", progress)
        coverage = check_coverage(
            task, bench, count=configurations, num_passes=passes, max_tokens=max_tokens, progress=progress
        )
        shown = _write(task, out, nulls, coverage)
    return shown


def _families(names: Sequence[str], copies: int) -> list[Family]:
    known = families(copies)
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown family {name!r}; {suggest(name, known)}")
    return [known[name] for name in names or known]


def _write(task: Task, out: Path, nulls: Sequence[NullCheck], coverage: CoverageCheck | None) -> RenderableType:
    document = facts_of(task)
    document["nulls"] = [
        {"share": check.share.model_dump(mode="json"), **check.model_dump(mode="json")} for check in nulls
    ]
    shown: RenderableType = nulls_table(nulls)
    if coverage is not None:
        summary = {"share": coverage.share, "spread_of_passes": coverage.spread_of_passes}
        document["coverage"] = {**summary, **coverage.model_dump(mode="json")}
        shown = Group(shown, coverage_table(coverage))
    write_text(out, NAME, shown)
    write_json(out, NAME, document)
    return shown
