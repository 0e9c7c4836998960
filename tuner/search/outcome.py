"""Outcome of a search: the verdict on the winner, its profile, and the figures for MLflow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from decoding.draft_length import Fixed
from decoding.drafts import Draft, PlainDecoding
from decoding.exit_heads import prompt_sha256
from decoding.profile import (
    CategoryFigures,
    DatasetFacts,
    DraftProfile,
    EndToEndFigures,
    EngineFacts,
    Exactness,
    Interval,
    Measured,
    PrefillSeconds,
    ProfileOrigin,
    Rates,
    SearchCost,
    StockFigures,
)
from studies.contract import TrialRecord, best_trials
from studies.measurement import Measurement
from tuner.inputs.environment import device_name, git_revision, versions
from tuner.inputs.models import target_identity
from tuner.measuring.machine import MachineNoise
from tuner.registry import log_profile
from tuner.review.document import StockComparison, TextPair
from tuner.review.verdict import ShipVerdict
from tuner.search.decision import Confirmed
from tuner.search.held_out import ResultRow
from tuner.search.race import Finalist
from tuner.search.report import trials_csv
from tuner.search.stock import PROFILE, StockOutcome
from tuner.search.task import Task
from tuner.stage_clock import Stage
from tuner.tracking import Tracker
from tuner.trial_columns import measured_metrics


@dataclass(frozen=True)
class SearchEffort:
    """Cost of a search."""

    num_trials: int
    search_seconds: float
    """Seconds of all trials and of preparing the studies."""
    distillation_seconds: float
    """Seconds of distilling the exit heads that the studies drafted with, in this run or an earlier one."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search. `rows` are the lines of the final table, all measured on held-out prompts."""

    profile: DraftProfile
    winner: TrialRecord
    """Winner of the race. It is in the profile only if the interval of `confirmed` lies above 1."""
    confirmed: Measurement
    """The winner measured on the held-out prompts."""
    rows: tuple[ResultRow, ...]
    studies: Mapping[str, str]
    """Reason for the end of each study, and its remarks."""
    cost: SearchEffort
    noise: MachineNoise
    objection: str | None = None
    """Why the profile decodes plainly; None if it has the winner."""
    stages: Mapping[Stage, float] = field(default_factory=dict)
    """Seconds of each stage of this run."""
    cuts: tuple[str, ...] = ()
    """What was done on fewer prompts than configured, to keep within the time."""
    race: tuple[Finalist, ...] = ()
    """The finalists, the fastest first."""
    candidates: tuple[Confirmed, ...] = ()
    """The candidates of `rows`, the winner first."""
    texts: tuple[TextPair, ...] = ()
    """A few held-out prompts with their continuations."""
    comparison: StockComparison | None = None
    no_comparison: str | None = None
    """Why there is no comparison with stock generation."""
    address: str | None = None
    """Page of the search in the MLflow UI."""
    verdict: ShipVerdict | None = None
    """What the result supports; None until it is reviewed."""


def conclude(
    task: Task,
    winner: Finalist,
    refused: str | None,
    noise: MachineNoise,
    confirmed: Sequence[Confirmed],
    stock: StockOutcome,
    ended: Mapping[str, str],
    cost: SearchEffort,
    run_id: str,
    engine: EngineFacts | None = None,
    confirmations: int = 1,
) -> SearchResult:
    """Return the profile of the winner, or of plain decoding if its speed-up is not confirmed, and the rows of the table.

    `refused` is why no speed-up is claimed; `engine` is the one in which they were measured, `confirmations` the number of winners
    confirmed on these prompts so far. The exit head of a winner that has one is copied beside the profile; `ExitHeadError` if that
    fails.
    """
    trial = winner.trial
    measurement = next(each.measurement for each in confirmed if each.trial.candidate.key == trial.candidate.key)
    interval = measurement.speedup_interval()
    wins = refused is None
    profile = DraftProfile(
        name=f"{task.config.resolved_experiment()}-{trial.study.replace('_', '-') if wins else 'plain'}",
        target=target_identity(task.loaded, task.target),
        draft=_placed(task, trial.candidate.draft, task.config.out) if wins else PlainDecoding(),
        draft_length=trial.candidate.draft_length if wins else Fixed(),
        decoding=task.decoding,
        measured=_measured(task, measurement, interval, noise, stock.comparison, cost, confirmations) if wins else None,
        provenance=ProfileOrigin(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            study=trial.study,
            origin=trial.origin if wins and trial.origin != trial.study else None,
            git_revision=git_revision(Path(__file__).parent),
            mlflow_run_id=run_id,
            engine=engine,
        ),
    )
    rows = [ResultRow(label="plain decoding", description="the whole model, token by token", measurement=None)]
    rows += [_row(each, measurement) for each in confirmed]
    return SearchResult(
        profile,
        trial,
        measurement,
        tuple(rows),
        dict(ended),
        cost,
        noise,
        refused,
        comparison=stock.comparison,
        no_comparison=stock.reason,
    )


def _row(confirmed: Confirmed, winner: Measurement) -> ResultRow:
    trial, candidate, measured = confirmed.trial, confirmed.trial.candidate, confirmed.measurement
    rule = f"; {candidate.draft_length.describe()}" if candidate.draft.drafts else ""
    origin = f"; from {trial.origin}" if trial.origin != trial.study else ""
    prompts = {sample.prompt for sample in measured.samples}
    common = Measurement(samples=tuple(sample for sample in winner.samples if sample.prompt in prompts))
    fewer = ""
    if len(common.samples) < len(winner.samples):
        fewer = f"; on {common.num_prompts} prompts, where the winner has {common.speedup_interval()}"
    return ResultRow(confirmed.label, f"{candidate.draft.describe()}{rule}{origin}{fewer}", measured)


def _placed(task: Task, draft: Draft, profile: Path) -> Draft:
    """Return the draft with its files copied beside `profile`."""
    return task.head_folder.copy_beside(draft, profile)


def _measured(
    task: Task,
    measurement: Measurement,
    interval: Interval,
    noise: MachineNoise,
    comparison: StockComparison | None,
    cost: SearchEffort,
    confirmations: int,
) -> Measured:
    return Measured(
        confirmations=confirmations,
        speedup=interval,
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
        search=SearchCost(
            trials=cost.num_trials, seconds=cost.search_seconds, distillation_seconds=cost.distillation_seconds
        ),
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
        draft=_placed(task, best.candidate.draft, out),
        draft_length=best.candidate.draft_length,
        decoding=task.decoding,
    ).save(out)
    return best, out


def _stock_metrics(comparison: StockComparison | None) -> dict[str, float]:
    """Return the rates of stock generation, and the profile's speed over them."""
    if comparison is None:
        return {}
    figures = {}
    for name, each in comparison.contenders.items():
        if name != PROFILE:
            figures[f"stock/{name}_tokens_per_second"] = each.tokens_per_second.value
            figures[f"stock/profile_over_{name}"] = each.profile_over_it.value
    return figures


def track_result(tracker: Tracker, result: SearchResult, records: Sequence[TrialRecord], task: Task) -> None:
    """Log the figures of plain decoding and the winner, the profile and the table of trials."""
    figures = {
        "search_seconds": result.cost.search_seconds,
        "distillation_seconds": result.cost.distillation_seconds,
        "trials": float(result.cost.num_trials),
        **measured_metrics(result.confirmed),
        **_stock_metrics(result.comparison),
    }
    best = result.winner.candidate
    tags = {
        "decision": result.profile.draft.kind,
        "winner": f"{best.draft.describe()}; {best.draft_length.describe()}",
        "winner_origin": result.winner.origin,
        "profile": result.profile.name,
    }
    tracker.log_figures(figures, tags)
    with TemporaryDirectory() as folder:
        (Path(folder) / "trials.csv").write_text(trials_csv(records), encoding="utf-8")
        tracker.log_artifact(Path(folder) / "trials.csv")
    tracker.log_artifact(task.config.out)
    for name in result.profile.draft.files:
        tracker.log_artifact(task.config.out.parent / name)
    log_profile(tracker.tracking_uri, tracker.run_id, result.profile, task.config.out.parent)
