"""The problem of a study: the part of a task that it may know, and the costs of passes on this device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from decoding.drafts import DraftDocument, EarlyExit
from decoding.lockstep import shared_batch_size
from studies.contract import Problem, TrialRecord
from studies.costs.table import CostTable
from tuner.measuring.cost_table import cost_table
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.task import Task
from tuner.stage_clock import Stage

COSTS_SHARE = 0.1
"""Share of a study's time after which a cost table of a disturbed machine is not measured for longer."""


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
    """Return the problem of a study on the tuning prompts of `bench`, after the trials of `records`.

    `seconds` is the search time that the study may use; `costs_folder` overrides the folder in which measured costs are kept.
    """
    earlier: dict[str, list[TrialRecord]] = {}
    for record in records:
        earlier.setdefault(record.study, []).append(record)

    def costs(max_tokens: int) -> CostTable:
        return _costs(task, bench, max_tokens, seconds, progress, costs_folder)

    return Problem(
        target=task.target,
        prompts=bench.prompts,
        continuations=bench.continuations,
        earlier=earlier,
        seed=task.config.seed,
        batch_size=bench.batch_size,
        decoding=task.decoding,
        head_drafts=heads,
        feature_draft=task.feature_draft,
        heads=task.head_folder,
        costs=costs,
        seconds=seconds,
        accepts=_anything if task.deployment is None else task.deployment.rules.accepts,
    )


def _costs(
    task: Task, bench: Bench, max_tokens: int, seconds: float | None, progress: Progress, folder: Path | None
) -> CostTable:
    """Return the costs of passes on this device, measured unless they are stored, and say what they are."""
    lengths = [len(prompt) for prompt in bench.prompts]
    with task.budget.clock.stage(Stage.COSTS):
        table = cost_table(
            task.target,
            max_tokens=max_tokens,
            contexts=tuple(sorted({min(lengths), max(lengths) + bench.max_new_tokens})),
            progress=progress,
            num_sequences=task.config.batch_size,
            bits=task.config.wanted_bits(task.target.device),
            folder=folder,
            most_seconds=math.inf if seconds is None else COSTS_SHARE * seconds,
            seed=task.config.seed,
        )
    task.watch.note_cost_error(table.error.median)
    decode_in_lockstep = shared_batch_size(task.target, task.config.batch_size)
    progress.say(
        f"{f'{decode_in_lockstep} sequences in lockstep: ' if decode_in_lockstep > 1 else ''}{table.describe()}"
    )
    return table


def _anything(draft: DraftDocument) -> bool:
    return True
