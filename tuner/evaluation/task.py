"""What the tuner's checks of itself have in common: how they begin, what they say of the task, and how results are written.

A check works on the task of a search: the same configuration, the same prompts, the same exit heads. It makes no heads, stores no
trials and writes no profile, only its results into a folder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoding.drafts import EarlyExit
from decoding.target import Target
from studies.prediction.skip_space import SkipSpace
from tuner.config import SearchConfig
from tuner.evaluation.random_candidates import RandomCandidates
from tuner.progress import Progress
from tuner.results import check_results_folder, public_name, stamped
from tuner.search.task import Task, prepare, refuse_batches, token_ids


def prepare_check(config: SearchConfig, out: Path, progress: Progress) -> Task:
    """Load and check all that a check of this configuration works on; its results will lie in the folder `out`.

    That is made when the first result is written. Raises `ConfigError` if nothing could be written there, and what
    `tuner.search.task.prepare` raises.
    """
    refuse_batches(config, "this evaluation")
    place = check_results_folder(out)
    # Heads are taken as they are, and no profile is written: a place is named where one could be.
    return prepare(config.model_copy(update={"distill": "never", "out": place / "profile.yaml"}), progress)


def head_drafts(task: Task) -> dict[int, EarlyExit]:
    """All exits whose head lies in the folder of heads, whether a study wants them or not; by exit layer.

    Raises `ExitHeadError` for heads that do not belong to the task.
    """
    exits = range(1, task.target.num_layers)
    return task.head_folder.drafts(exits, held_out=token_ids(task.prompts.held_out))


def random_candidates(
    target: Target, heads: Mapping[int, EarlyExit], rules: tuple[str, ...], max_tokens: int
) -> RandomCandidates:
    """Random configurations of the task's model."""
    return RandomCandidates(SkipSpace.of(target), target.num_layers, heads, rules, max_tokens)


def facts_of(task: Task) -> dict[str, Any]:
    """What a reader must know to place the figures of a check. Models and data are named by their last part, wherever they lie."""
    config = task.config
    facts = {
        "model": public_name(config.model),
        "dataset": public_name(config.dataset),
        "prompts": task.prompts.fingerprint,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "prefix_reuse": config.prefix_reuse,
        "runner": task.target.runner.name,
        "exact_width": task.target.runner.exact_width,
        "seed": config.seed,
        "dtype": str(task.target.dtype).removeprefix("torch."),
    }
    return stamped(facts, task.target.device)
