"""The problem of a study: the part of a task that it may know, and the costs of passes on this device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
        return costs_of(task, _contexts(bench), max_tokens, seconds, progress, costs_folder=costs_folder)

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


def costs_of(
    task: Task,
    contexts: Sequence[int],
    max_tokens: int,
    seconds: float | None,
    progress: Progress,
    *,
    costs_folder: Path | None = None,
) -> CostTable:
    """Return the costs of passes of a search after these contexts, measured unless they are stored.

    See `build_problem` for the rest.
    """
    with task.budget.clock.stage(Stage.COSTS):
        table = cost_table(
            task.target,
            max_tokens=max_tokens,
            contexts=contexts,
            progress=progress,
            num_sequences=task.config.batch_size,
            bits=task.config.wanted_bits(task.target.device),
            folder=costs_folder,
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


def _contexts(bench: Bench) -> tuple[int, ...]:
    """Return the shortest and the longest context of decoding, in tokens."""
    lengths = [len(prompt) for prompt in bench.prompts]
    return tuple(sorted({min(lengths), max(lengths) + bench.max_new_tokens}))
