"""What a search leaves: the profile, its result in the storage, and figures, artifacts and description of its run in MLflow."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from decoding.draft_length import Fixed
from decoding.drafts import PlainDecoding
from decoding.exit_heads import prompt_sha256
from decoding.profile import (
    CategoryFigures,
    DatasetFacts,
    DraftProfile,
    EndToEndFigures,
    EngineFacts,
    Exactness,
    Measured,
    PrefillSeconds,
    ProfileOrigin,
    Rates,
    SearchCost,
    StockFigures,
)
from studies.contract import TrialRecord, best_trials
from studies.measurement import Measurement
from tuner.config import SearchConfig
from tuner.errors import SearchError, without_password
from tuner.inputs.models import target_identity
from tuner.measuring.contender import PROFILE
from tuner.measuring.machine import MachineNoise
from tuner.registry import log_profile
from tuner.results import device_name, git_revision, versions
from tuner.review.document import MeasuredCandidate, SearchResult, StockComparison
from tuner.review.markdown import search_note
from tuner.review.page import report_page
from tuner.review.tables import measured_metrics, samples_csv, trials_csv
from tuner.review.verdict import verdict
from tuner.search.storage import FINISHED, StudyStore
from tuner.search.study_trials import RUN_ID
from tuner.search.task import Task, settings_sha256, token_ids
from tuner.tracking import DatasetInput, Tracker


def profile_of(
    task: Task,
    winner: MeasuredCandidate,
    refused: str | None,
    noise: MachineNoise,
    comparison: StockComparison | None,
    cost: SearchCost,
    run_id: str,
    engine: EngineFacts | None,
    confirmations: int,
) -> DraftProfile:
    """Return the profile of the winner, or of plain decoding if no speed-up is claimed, which `refused` says why.

    The heads of a winner that has some are copied beside the profile; `ExitHeadError` if that fails.
    """
    candidate, wins = winner.candidate, refused is None
    return DraftProfile(
        name=f"{task.config.resolved_experiment()}-{winner.study.replace('_', '-') if wins else 'plain'}",
        target=target_identity(task.loaded, task.target),
        draft=task.head_folder.copy_beside(candidate.draft, task.config.out) if wins else PlainDecoding(),
        draft_length=candidate.draft_length if wins else Fixed(),
        decoding=task.decoding
        if wins and candidate.draft.reads_history
        else task.decoding.model_copy(update={"history": 0}),
        measured=_measured(task, winner.measurement, noise, comparison, cost, confirmations) if wins else None,
        provenance=ProfileOrigin(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            study=winner.study,
            origin=winner.origin if wins and winner.origin != winner.study else None,
            git_revision=git_revision(Path(__file__).parent),
            mlflow_run_id=run_id,
            engine=engine,
        ),
    )


def _measured(
    task: Task,
    measurement: Measurement,
    noise: MachineNoise,
    comparison: StockComparison | None,
    cost: SearchCost,
    confirmations: int,
) -> Measured:
    return Measured(
        confirmations=confirmations,
        speedup=measurement.speedup_interval(),
        tokens_per_second=Rates(draft=measurement.draft_tokens_per_second, plain=measurement.plain_tokens_per_second),
        end_to_end=_end_to_end(measurement),
        categories=_categories(measurement),
        stock=_stock(comparison),
        draft_acceptance_rate=measurement.draft_acceptance_rate,
        mean_acceptance_length=measurement.mean_acceptance_length,
        tokens_per_round=measurement.tokens_per_round,
        noise=noise.disturbances,
        exact=Exactness(
            prompts=measurement.num_prompts, identical=measurement.num_identical, ties=measurement.num_ties
        ),
        search=cost,
        batch_size=task.config.batch_size,
        device=device_name(task.target.device),
        versions=versions(),
        dataset=DatasetFacts(
            name=task.config.dataset,
            fingerprint=task.prompts.fingerprint,
            tuning_prompts=len(task.prompts.tuning),
            held_out_prompts=len(task.prompts.held_out),
            max_new_tokens=task.config.max_new_tokens,
            seed=task.config.seed,
            held_out_sha256=tuple(prompt_sha256(prompt.token_ids) for prompt in task.prompts.held_out),
        ),
    )


def _end_to_end(measurement: Measurement) -> EndToEndFigures | None:
    whole = measurement.end_to_end
    if whole is None:
        return None
    return EndToEndFigures(
        speedup=whole.speedup_interval(),
        tokens_per_second=Rates(draft=whole.draft.tokens_per_second, plain=whole.plain.tokens_per_second),
        time_to_first_token_seconds=PrefillSeconds(
            draft=whole.time_to_first_token_seconds, plain=whole.plain_time_to_first_token_seconds
        ),
        prefill_over_plain=whole.prefill_over_plain(),
    )


def _categories(measurement: Measurement) -> dict[str, CategoryFigures]:
    """Return the figures of each category with two samples or more."""
    return {
        name: CategoryFigures(
            prompts=each.num_prompts,
            speedup=each.speedup_interval(),
            end_to_end_speedup=None if each.end_to_end is None else each.end_to_end.speedup_interval(),
        )
        for name, each in measurement.by_category().items()
        if len(each.samples) >= 2
    }


def _stock(comparison: StockComparison | None) -> dict[str, StockFigures]:
    """Return the profile's speed over stock generation's."""
    if comparison is None:
        return {}
    return {
        name: StockFigures(prompts=comparison.num_prompts, profile_over_it=each.profile_over_it)
        for name, each in comparison.contenders.items()
        if name != PROFILE
    }


def save_best_so_far(task: Task, records: Iterable[TrialRecord]) -> tuple[TrialRecord | None, Path | None]:
    """Return the best trial, and the path of its unconfirmed profile if it was faster than plain decoding."""
    best = next(iter(best_trials(records, 1)), None)
    if best is None or (best.speedup or 0.0) <= 1.0 or not best.candidate.draft.drafts:
        return best, None
    out = task.config.out.with_suffix(".unconfirmed.yaml")
    DraftProfile(
        name=f"{task.config.resolved_experiment()}-unconfirmed",
        target=target_identity(task.loaded, task.target),
        draft=task.head_folder.copy_beside(best.candidate.draft, out),
        draft_length=best.candidate.draft_length,
        decoding=task.decoding,
    ).save(out)
    return best, out


def head_cautions(task: Task, winner: MeasuredCandidate) -> tuple[str, ...]:
    """Return what a reader should know about the heads of the winner."""
    used = set(winner.candidate.draft.files)
    exits = [layer for layer, draft in task.heads.items() if draft.head in used]
    found = [task.head_folder.facts(layer) for layer in exits]
    wanted = Path(task.config.distillation.training_dataset or task.config.dataset).name
    cautions = [
        f"The exit head was trained on {Path(facts.training.dataset).name}, not on {wanted}."
        for facts in found
        if facts is not None and facts.training is not None and Path(facts.training.dataset).name != wanted
    ]
    tuning = token_ids(task.prompts.tuning)
    if used and (count := task.head_folder.num_trained_on(exits, tuning)):
        cautions.append(
            f"Heads were trained on {count} of the {len(tuning)} tuning prompts, so trials overrate them; held-out figures do not."
        )
    return tuple(cautions)


def command_line() -> str:
    """Return the command of this process, without passwords in addresses."""
    words = ["sdtune", *sys.argv[1:]]
    return shlex.join(re.sub(r"(://[^/@\s:]*):[^/@\s]+@", r"\1:***@", word) for word in words)


def keep_result(store: StudyStore, settings: str, result: SearchResult) -> None:
    """Store the result of a whole run; its trials are stored already."""
    finished = datetime.now(UTC).isoformat(sep=" ", timespec="minutes")
    kept = result.model_dump(mode="json", by_alias=True, exclude={"trials"})
    store.keep(FINISHED, {"settings": settings, "finished": finished, "result": kept})


def finished_result(store: StudyStore, settings: str | None = None) -> tuple[SearchResult, str] | None:
    """Return the result of the last whole run and when it finished; None if there is none that can be read.

    With `settings`, only that of the same command.
    """
    noted = store.noted(FINISHED)
    if noted is None or settings not in (None, noted["settings"]):
        return None
    try:
        return SearchResult.model_validate(noted["result"]), noted["finished"]
    except ValidationError:  # of another version: its confirmations still count
        return None


def earlier_race(store: StudyStore, num_trials: int) -> list[MeasuredCandidate]:
    """Return the finalists of the last whole run, if no trial was added since: another race would be another draw."""
    found = finished_result(store)
    return list(found[0].race) if found is not None and found[0].cost.trials == num_trials else []


def write_stored(config: SearchConfig) -> SearchResult:
    """Write the profile of a search that other hosts have ended, and return its result. Raises `SearchError` without one."""
    store = StudyStore(config.storage, config.resolved_experiment())
    try:
        found = finished_result(store, settings_sha256(config))
    finally:
        store.close()
    if found is None:
        raise SearchError(f"no result is stored in {without_password(config.storage)}")
    for name in found[0].profile.draft.files:
        if not (copy := config.out.parent / name).exists():
            shutil.copy(config.heads / name, copy)
    found[0].profile.save(config.out)
    return found[0]


def open_tracker(task: Task, store: StudyStore) -> Tracker:
    """Open the run of the search in MLflow, or the one that an earlier run of it began."""
    config = task.config
    # What finds the run of a search that was killed before it stored a study, which names the run.
    identity = json.dumps({**task.identity, "storage": config.storage}, sort_keys=True)
    # Both addresses may hold passwords.
    settings = config.model_dump(mode="json", exclude={"studies", "storage", "tracking_uri", "distillation"})
    return Tracker.open(
        config.tracking_uri,
        config.resolved_experiment(),
        run_id=store.noted(RUN_ID),
        params={
            **{key: ",".join(value) if isinstance(value, list) else value for key, value in settings.items()},
            "device_name": device_name(task.target.device),
            "precision": str(task.target.dtype),
            "git_revision": git_revision(Path(__file__).parent),
            **{f"version.{package}": version for package, version in versions().items()},
        },
        dataset=DatasetInput(name=config.dataset, fingerprint=task.prompts.fingerprint, source=config.dataset),
        identity=hashlib.sha256(identity.encode()).hexdigest(),
    )


def track_result(tracker: Tracker, result: SearchResult, task: Task) -> None:
    """Log figures, profile, tables and report of a search, mark the winning trial, and describe the run."""
    winner, out, noise = result.winner, task.config.out, result.noise
    figures = {
        "search_seconds": result.cost.seconds,
        "distillation_seconds": result.cost.distillation_seconds,
        "trials": float(result.cost.trials),
        **measured_metrics(result.confirmed),
        "machine/plain_variation": noise.plain_variation,
        "machine/waiting": noise.waiting,
        "machine/load": noise.load,
        "machine/cost_table_error": noise.cost_error,
    }
    for name, each in (result.comparison.contenders if result.comparison else {}).items():
        if name != PROFILE:
            figures[f"stock/{name}_tokens_per_second"] = each.tokens_per_second.value
            figures[f"stock/profile_over_{name}"] = each.profile_over_it.value
    tags = {
        "decision": result.profile.draft.kind,
        "winner": winner.candidate.describe(),
        "winner_origin": winner.origin,
        "profile": result.profile.name,
        "verdict": str(verdict(result).shipping),
        "noisy": str(bool(noise.disturbances)).lower(),
    }
    tracker.log_figures({name: value for name, value in figures.items() if value is not None}, tags)
    if (trial := result.winning_trial) is not None:
        tracker.name_winner(trial)
    for path in (out, *(out.parent / name for name in result.profile.draft.files)):
        tracker.log_artifact(path)
    log_profile(tracker.tracking_uri, tracker.run_id, result.profile, out.parent)
    tracker.log_document(result.settings, "config.yaml")
    for name, text in {
        "trials.csv": trials_csv(result.trials),
        "held_out.csv": samples_csv(result.rivals),
        "race.csv": samples_csv(result.race),
        "search.json": result.model_dump_json(by_alias=True),
        "report.html": report_page(result),
    }.items():
        tracker.log_text(text, name)
    # Last: a description promises the rest.
    tracker.describe(search_note(result, profile_path=str(out)))
