"""The problem that a study is given: what of a task it may know, and how it gets to know the costs of this device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from decoding.drafts import EarlyExit
from decoding.lockstep import shared_batch_size
from studies.contract import Problem, TrialRecord
from studies.costs.table import CostTable
from tuner.measuring.cost_cache import cost_table
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.task import Task


def build_problem(
    task: Task,
    heads: Mapping[int, EarlyExit],
    bench: Bench,
    records: Iterable[TrialRecord],
    seconds: float | None,
    progress: Progress,
    *,
    costs_folder: Path | None = None,
) -> Problem:
    """The problem of a study that runs on the tuning prompts of `bench`, behind those that left `records`.

    `seconds` is the search time that the study may use; `costs_folder` keeps measured costs elsewhere than in the shared cache.
    """
    earlier: dict[str, list[TrialRecord]] = {}
    for record in records:
        earlier.setdefault(record.study, []).append(record)

    def costs(max_tokens: int) -> CostTable:
        table = cost_table(
            task.target,
            max_tokens=max_tokens,
            contexts=_contexts(bench),
            progress=progress,
            num_texts=bench.batch_size,
            folder=costs_folder,
            seed=task.config.seed,
        )
        decode_in_lockstep = shared_batch_size(task.target, bench.batch_size)
        progress.say(f"{f'{decode_in_lockstep} texts in step: ' if decode_in_lockstep > 1 else ''}{table.describe()}")
        return table

    return Problem(
        target=task.target,
        prompts=bench.prompts,
        continuations=bench.continuations,
        earlier=earlier,
        seed=task.config.seed,
        batch_size=bench.batch_size,
        decoding=task.decoding,
        head_drafts=heads,
        heads=task.head_folder,
        costs=costs,
        seconds=seconds,
    )


def _contexts(bench: Bench) -> tuple[int, ...]:
    """The shortest and the longest text that decoding will have in front of it."""
    lengths = [len(prompt) for prompt in bench.prompts]
    return tuple(sorted({min(lengths), max(lengths) + bench.max_new_tokens}))
