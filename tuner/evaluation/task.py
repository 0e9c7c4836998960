"""The common start of evaluations that work on the task of a search: its configuration, prompts and exit heads.

An evaluation makes no heads, stores no trials and writes no profile, only results into a folder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoding.drafts import BitWidth, EarlyExit, FeatureHeadDraft
from decoding.target import Target
from studies.prediction.skip_space import SkipSpace
from tuner.config import SearchConfig
from tuner.evaluation.random_candidates import RandomCandidates
from tuner.progress import Progress
from tuner.results import check_results_folder, public_name, stamped
from tuner.search.task import Task, prepare, refuse_batches, token_ids


def prepare_check(config: SearchConfig, out: Path, progress: Progress) -> Task:
    """Load and check the task of an evaluation whose results go into the folder `out`.

    The folder is created with the first result. Raises `ConfigError` for batches or a folder that cannot be written, and the
    errors of `tuner.search.task.prepare`.
    """
    refuse_batches(config, "this evaluation")
    place = check_results_folder(out)
    # No profile is written, but `prepare` checks that its folder is writable.
    return prepare(config.model_copy(update={"distill": "never", "out": place / "profile.yaml"}), progress)


def head_drafts(task: Task) -> dict[int, EarlyExit]:
    """Return the drafts of all exits that have a head in the folder of heads, by exit layer.

    Raises `ExitHeadError` for heads that do not belong to the task.
    """
    exits = range(1, task.target.num_layers)
    return task.head_folder.drafts(exits, held_out=token_ids(task.prompts.held_out))


def feature_draft(task: Task) -> FeatureHeadDraft | None:
    """Return the draft of the feature head in the folder of heads, if it has one; errors are those of `head_drafts`."""
    return task.head_folder.feature_draft(held_out=token_ids(task.prompts.held_out))


def random_candidates(
    target: Target,
    heads: Mapping[int, EarlyExit],
    rules: tuple[str, ...],
    max_tokens: int,
    bits: tuple[BitWidth, ...] = (),
    feature: FeatureHeadDraft | None = None,
    *,
    with_leaves: bool = False,
) -> RandomCandidates:
    """Return a source of random candidates for the model; those of `bits` are quantised, and `feature` is the feature head.

    Some have side leaves if asked for, as far as the model can verify them.
    """
    space, with_leaves = SkipSpace.of(target), with_leaves and target.checks.takes_trees
    return RandomCandidates(space, target.num_layers, heads, rules, max_tokens, bits, feature, with_leaves)


def facts_of(task: Task) -> dict[str, Any]:
    """Return the facts that figures depend on, stamped; models and data are named by the last part of their paths."""
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
