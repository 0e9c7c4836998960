"""One search on a planted problem: real decoding, charged by the problem's prices."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from studies.contract import Problem, TrialRecord, best_trials
from studies.searches.registry import STUDIES, compared_searches, create_study
from tuner.evaluation.planted.problem import DECODING, MAX_TOKENS, PlantedProblem
from tuner.executors.local import LocalExecutor
from tuner.progress import Progress
from tuner.search.budget import Budget
from tuner.search.storage import StudyStore, sqlite_url
from tuner.search.trials import run_study


def run_search(
    name: str, planted: PlantedProblem, progress: Progress, **settings: Any
) -> tuple[TrialRecord | None, list[TrialRecord]]:
    """Run a search of a comparison to its end, and return its best trial and all trials.

    Whole blocks are skipped, drafts have at most `MAX_TOKENS` tokens, and all precisions with a price are offered.
    """
    bench = planted.bench
    problem = Problem(
        planted.target,
        bench.prompts,
        bench.continuations,
        earlier={},
        seed=planted.seed,
        decoding=DECODING,
        costs=lambda max_tokens: planted.table,
    )
    study_name, changes = compared_searches()[name]
    given: dict[str, Any] = {"max_tokens": MAX_TOKENS, "whole_blocks": True, **changes, **settings}
    if planted.bits:
        given["bits"] = planted.bits
    progress.stage(f"seed {planted.seed}: {name}")
    study = create_study(study_name, problem, STUDIES[study_name].load().Settings.model_validate(given))
    with TemporaryDirectory() as folder:
        stored = StudyStore(sqlite_url(Path(folder) / "trials.db"), "planted").open(study, {})
        records, _ = run_study(
            study, stored, LocalExecutor(bench), bench.indices, Budget(None, None), lambda record: None
        )
    best = best_trials(records, 1, expected=study.expected())
    return (best[0] if best else None), records
