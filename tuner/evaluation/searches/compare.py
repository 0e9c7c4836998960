"""Comparison of searches on the same problem with the same budget.

A search selects by its own measurements on tuning prompts, which overrate the selected candidate. So each candidate that was
the best so far of any search at any time is measured again on held-out prompts, all side by side. Only these figures are
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from decoding.drafts import compact_indices
from studies.contract import Candidate
from tuner.config import SearchConfig
from tuner.errors import ConfigError, SearchError
from tuner.evaluation.searches.held_out import HeldOutSamples
from tuner.evaluation.searches.result import SearchComparison
from tuner.evaluation.searches.rivals import Rival, check, rivals
from tuner.evaluation.searches.runs import Limits, SearchRun, SearchRunner
from tuner.output_paths import check_writable
from tuner.progress import Progress
from tuner.results import stamped
from tuner.search.storage import sqlite_url
from tuner.search.task import Task, open_bench, prepare, refuse_batches

TRIALS_FILE, HELD_OUT_FILE, REPORT_FILE = "searches.db", "held_out.jsonl", "searches.json"
OF_ONE_SEARCH = {"study", "trials", "timeout", "finalists", "studies", "distill", "distillation"}
PLACES_ON_DISK = {"heads", "storage", "tracking_uri", "experiment", "out"}


def compare_searches(
    config: SearchConfig, names: Sequence[str], *, num_seeds: int, limits: Limits, out: Path, progress: Progress
) -> SearchComparison:
    """Run the searches `names` (default: all) with `num_seeds` seeds each, and measure their incumbents.

    Seeds are consecutive, starting with the configuration's. A seed determines the order of the tuning prompts and the sampler.
    Results are stored in the folder `out` and reused. Raises `SdtuneError` for wrong input.
    """
    refuse_batches(config, "sdtune evaluate searches")
    chosen = rivals(names, config)
    _check_folder(out)
    task = _prepare(config, chosen, out, progress)
    # Studies may plan by the seconds, so a run with another limit is a different run, not a longer one.
    measured = HeldOutSamples(out / HELD_OUT_FILE, {**task.identity, "budget in seconds": limits.seconds})
    tuning = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
    runs = _run_all(
        SearchRunner(task, tuning, sqlite_url(out / TRIALS_FILE), limits, progress), chosen, num_seeds, progress
    )
    _check_budget(runs, limits)
    held_out = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
    warm_up = range(min(task.config.prompts_per_trial, len(tuning.prompts)))
    progress.stage("warming up adaptive rules")
    measured.complete(_incumbents(runs, limits), held_out, lambda each: tuning.warm_up_rule(each, warm_up), progress)
    ordered = {rival.name: tuple(sorted(_of(rival, runs), key=lambda run: run.seed)) for rival in chosen}
    return SearchComparison(ordered, limits, measured.measurements(), len(held_out.prompts), _facts(task, chosen))


def _check_folder(out: Path) -> None:
    try:
        out.mkdir(exist_ok=True)
    except OSError as cause:
        raise ConfigError(f"cannot create the folder {out}: {cause.strerror}") from None
    check_writable(out / REPORT_FILE, what="the comparison", name=REPORT_FILE, error=ConfigError)


def _prepare(config: SearchConfig, chosen: Sequence[Rival], out: Path, progress: Progress) -> Task:
    """Return the task shared by all searches; missing heads are not trained."""
    settings: dict[str, dict[str, Any]] = {}
    for rival in chosen:
        settings.setdefault(rival.study, rival.settings.model_dump(mode="json"))
    changes = {"study": tuple(settings), "studies": settings, "distill": "never", "out": out / REPORT_FILE}
    task = prepare(config.model_copy(update=changes), progress)
    for rival in chosen:
        check(rival, task.target)
    if task.missing_heads:
        missing = compact_indices(task.missing_heads)
        progress.say(
            f"no exit head in {config.heads} for exit {missing}: comparing without it (sdtune distill makes one)"
        )
    return task


def _run_all(runner: SearchRunner, chosen: Sequence[Rival], num_seeds: int, progress: Progress) -> list[SearchRun]:
    """Run all searches for each seed.

    The order rotates, so that no search always has the cold machine.
    """
    runs: list[SearchRun] = []
    for turn in range(num_seeds):
        seed, first = runner.task.config.seed + turn, turn % len(chosen)
        for rival in [*chosen[first:], *chosen[:first]]:
            progress.stage(
                f"{rival.name}, seed {seed}, run {len(runs) + 1} of {num_seeds * len(chosen)}", runner.limits.trials
            )
            runs.append(run := runner.run(rival, seed))
            progress.say("; ".join([f"{rival.name}, seed {seed}: {run.ended}", *run.remarks]))
    return runs


def _check_budget(runs: Sequence[SearchRun], limits: Limits) -> None:
    if any(run.within(limits) for run in runs):
        return
    first = [points[0] for run in runs if (points := run.points())]
    if not first:
        why = "; ".join(dict.fromkeys(f"{run.search}: {run.ended}" for run in runs))
        raise SearchError(f"no search finished a trial within {limits}: {why}")
    raise SearchError(
        f"the budget of {limits} is too small for a single trial: the fastest search needed "
        f"{min(point.seconds for point in first):.1f} s for preparation and its first trial, and the smallest first trial "
        f"{min(point.tokens for point in first)} tokens; raise the budget"
    )


def _incumbents(runs: Sequence[SearchRun], limits: Limits) -> Iterator[Candidate]:
    """Yield every candidate that was ever the best so far within a run's budget."""
    for run in runs:
        for point in run.within(limits):
            if point.incumbent is not None:
                yield point.incumbent.candidate


def _of(rival: Rival, runs: Sequence[SearchRun]) -> list[SearchRun]:
    return [run for run in runs if run.search == rival.name]


def _facts(task: Task, chosen: Sequence[Rival]) -> dict[str, Any]:
    """Return the problem, the searches' settings, and the provenance, without folders of this machine."""
    facts = {
        "problem": task.config.model_dump(mode="json", exclude={*OF_ONE_SEARCH, *PLACES_ON_DISK}),
        "searches": {
            rival.name: {"study": rival.study, "settings": rival.settings.model_dump(mode="json")} for rival in chosen
        },
        "heads": {str(layer): head.head_sha256 for layer, head in task.heads.items()},
        "prompts_fingerprint": task.prompts.fingerprint,
        "dtype": str(task.target.dtype).removeprefix("torch."),
    }
    return stamped(facts, task.target.device)
