"""`sdtune evaluate integrity` from its settings to its results on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType

from decoding.documents.strict_yaml import suggest
from tuner.errors import ConfigError
from tuner.evaluation.integrity.coverage import CoverageCheck, check_coverage
from tuner.evaluation.integrity.null_benches import Family, families
from tuner.evaluation.integrity.nulls import NullCheck, check_nulls
from tuner.evaluation.integrity.report import coverage_table, nulls_table
from tuner.evaluation.integrity.settings import IntegrityEvaluation
from tuner.evaluation.task import facts_of, prepare_check
from tuner.progress import Progress
from tuner.results import write_json, write_text
from tuner.search.task import Task, open_bench

NAME = "integrity"


def run_and_write(settings: IntegrityEvaluation, progress: Progress) -> RenderableType:
    """Search among candidates that cannot win, then check intervals unless `configurations` is 0; return the tables.

    Finished parts are on disk before the next begins. Raises `SdtuneError` for errors of the user.
    """
    chosen = _families(settings.family, settings.copies)
    task = prepare_check(settings.config, settings.out, progress)
    nulls: list[NullCheck] = []
    shown: RenderableType = ""
    tuning = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
    held_out = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
    for family in chosen:
        found = check_nulls(
            task,
            tuning,
            held_out,
            family,
            num_runs=settings.num_runs,
            repetitions=settings.repetitions,
            fresh=settings.fresh,
            progress=progress,
        )
        nulls.append(found)
        shown = _write(task, settings.out, nulls, None)
    if settings.configurations:
        shown = _write(task, settings.out, nulls, _coverage(task, settings, progress))
    return shown


def _coverage(task: Task, settings: IntegrityEvaluation, progress: Progress) -> CoverageCheck:
    prompts = [*task.prompts.tuning, *task.prompts.held_out]
    bench = open_bench(task, prompts, "decoding all prompts plainly", progress)
    return check_coverage(
        task,
        bench,
        count=settings.configurations,
        num_passes=settings.passes,
        max_tokens=settings.max_tokens,
        progress=progress,
    )


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
