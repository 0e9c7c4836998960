"""Exit heads that a search wants and does not have: distilled first if that was allowed and there is time, else left out."""

from __future__ import annotations

import math
from dataclasses import replace

from decoding.drafts import EarlyExit, compact_indices
from tuner.heads.distill import distil_and_track
from tuner.heads.limits import distillation_time, heads_that_fit
from tuner.heads.plan import MOST_EVALUATED, num_training_prompts, of_search
from tuner.inputs.memory import ModelSize, free_bytes
from tuner.measuring.baseline import Pulse
from tuner.progress import Progress
from tuner.search.budget import enough
from tuner.search.task import Task, token_ids
from tuner.stage_clock import Stage, spoken

DISTILL_SHARE = 0.5
"""Most of the search's time left that distilling may be expected to take, where it has no limit of its own."""


def distillation_seconds(task: Task, pulse: Pulse) -> float | None:
    """Return the expected seconds of distilling missing heads; None if there is none to distil."""
    config = task.config
    if not task.missing_heads or config.distill == "never":
        return None
    size, num_heads = ModelSize.of(task.target.model), len(task.missing_heads)
    lengths = [len(prompt.token_ids) for prompt in task.prompts.tuning]
    most = config.distillation.prompt_tokens
    fit = heads_that_fit(size, min(most, max(lengths)), config.distillation, free_bytes(str(task.target.device)))
    return distillation_time(
        size,
        config.distillation,
        pulse,
        num_heads=num_heads,
        heads_at_once=config.distillation.heads_at_once or fit or num_heads,
        num_prompts=num_training_prompts(config, task.prompts),
        prompt_tokens=min(most, sum(lengths) / len(lengths)),
        num_evaluated=min(len(task.prompts.held_out), MOST_EVALUATED),
    ).total


def provide_heads(task: Task, expected: float | None, progress: Progress) -> dict[int, EarlyExit]:
    """Return the heads that the studies need, after distilling missing ones if that is allowed and there is time for it.

    Another process may have made them meanwhile. `expected` is the seconds that distilling takes, None if nothing is distilled.

    Distillation with a limit of its own (`distillation.timeout`) comes on top of `--timeout`; without
    one it must fit within it.
    """
    exits = [*task.heads, *task.missing_heads]
    if not task.head_folder.missing(task.missing_heads):
        return task.head_folder.drafts(exits, held_out=token_ids(task.prompts.held_out))
    if expected is None or not _is_wanted(task, expected, progress):
        if task.config.distill == "never":
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
    return task.head_folder.drafts(exits, held_out=token_ids(task.prompts.held_out))


def _is_wanted(task: Task, expected: float, progress: Progress) -> bool:
    """Announce the distillation and return True, or say why there is none and how to have it."""
    config = task.config
    missing = compact_indices(task.missing_heads)
    own = config.distillation.timeout
    if own is None and expected > DISTILL_SHARE * task.budget.left:
        progress.say(
            f"no exit head in {config.heads} for exit {missing}, and distilling takes about {spoken(expected)} of the "
            f"{spoken(task.budget.left)} left: searching without. `sdtune distill` makes them, and --set distillation.timeout="
            f"{enough(expected)} gives them that time on top of --timeout"
        )
        return False
    on_top = "" if own is None or config.timeout is None else " on top of --timeout"
    seconds = expected if own is None else min(expected, own)
    limit = "" if own is None else f", at most {spoken(own)}{on_top}"
    progress.say(
        f"distilling exit heads for exit {missing} into {config.heads} first: about {spoken(seconds)}{limit} "
        "(--set distill=never declines)"
    )
    return True
