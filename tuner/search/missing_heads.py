"""Exit heads that a search wants and does not have: distilled first if that was allowed and there is time, else left out."""

from __future__ import annotations

import math
from dataclasses import replace

from decoding.drafts import EarlyExit, compact_indices
from tuner.heads.distill import distil_and_track, of_search
from tuner.heads.time_plan import DistillationTime
from tuner.progress import Progress
from tuner.search.task import Task, token_ids
from tuner.search.time_budget import enough
from tuner.stage_clock import Stage, spoken

DISTILL_SHARE = 0.5
"""Most of the search's time left that distilling may be expected to take, where it has no limit of its own."""


def provide_heads(task: Task, expected: DistillationTime | None, progress: Progress) -> dict[int, EarlyExit]:
    """Return the heads that the studies need, after distilling missing ones if that is allowed and there is time for it.

    Distillation with a limit of its own (`distillation.timeout`) comes on top of `--timeout`; without
    one it must fit within it.
    """
    if expected is None or not _is_wanted(task, expected, progress):
        if task.missing_heads and task.config.distill == "never":
            missing = compact_indices(task.missing_heads)
            progress.say(
                f"no exit head in {task.config.heads} for exit {missing}: searching without (--set distill=auto makes them)"
            )
        return dict(task.heads)
    before = task.budget.clock.seconds().get(Stage.DISTILLING, 0.0)
    with task.budget.clock.stage(Stage.DISTILLING):
        work = of_search(task.config, task.loaded, task.target, task.prompts, progress)
        if task.config.distillation.timeout is None and not math.isinf(task.budget.left):
            work = replace(work, most_seconds=DISTILL_SHARE * task.budget.left)
        distil_and_track(work, task.missing_heads, task.config, progress)
    if task.config.distillation.timeout is not None:
        task.budget.on_top += task.budget.clock.seconds()[Stage.DISTILLING] - before
    exits = [*task.heads, *task.missing_heads]
    return task.head_folder.drafts(exits, held_out=token_ids(task.prompts.held_out))


def _is_wanted(task: Task, expected: DistillationTime, progress: Progress) -> bool:
    """Announce the distillation and return True, or say why there is none and how to have it."""
    config = task.config
    missing = compact_indices(task.missing_heads)
    own = config.distillation.timeout
    if own is None and expected.total > DISTILL_SHARE * task.budget.left:
        progress.say(
            f"no exit head in {config.heads} for exit {missing}, and distilling takes about {spoken(expected.total)} of the "
            f"{spoken(task.budget.left)} left: searching without. `sdtune distill` makes them, and --set distillation.timeout="
            f"{enough(expected.total)} gives them that time on top of --timeout"
        )
        return False
    on_top = "" if own is None or config.timeout is None else " on top of --timeout"
    seconds = expected.total if own is None else min(expected.total, own)
    limit = "" if own is None else f", at most {spoken(own)}{on_top}"
    progress.say(
        f"distilling exit heads for exit {missing} into {config.heads} first: about {spoken(seconds)}{limit} "
        "(--set distill=never declines)"
    )
    return True
