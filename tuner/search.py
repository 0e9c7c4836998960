"""One search, from configuration to profile: load, studies, race of the finalists, held-out confirmation, profile.

Reads top to bottom in the order things happen. What is tried is decided in `studies`, how a trial runs in `tuner.trials`,
how it is measured in `tuner.measure`; this file only passes one's results to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from decoding.draft_length import Fixed
from decoding.errors import ProfileError, UnsupportedModelError
from decoding.fingerprint import fingerprint, tokenizer_sha256
from decoding.probe import probe
from decoding.profile import (
    DatasetFacts,
    Decoding,
    DraftProfile,
    Exactness,
    Interval,
    Measured,
    PlainDecoding,
    Provenance,
    Rates,
    SearchCost,
)
from decoding.profile import Target as ProfileTarget
from decoding.target import Target
from studies import STUDIES
from studies.contract import Problem, Study, TrialRecord, best_trials
from studies.measurement import Measurement
from tuner.config import SearchConfig
from tuner.environment import device_name, git_revision, versions
from tuner.errors import SearchError, TrackingError
from tuner.loading import Loaded, eos_token_ids, load
from tuner.measure import Bench
from tuner.prompts import Prompt, PromptSet, load_prompts
from tuner.race import Finalist, race
from tuner.report import ResultRow, skipped_layers_picture, speedup_picture, trials_csv
from tuner.storage import StudyStore
from tuner.tracking import DatasetInput, Tracker
from tuner.trials import Budget, run_study

RUN_ID = "mlflow_run_id"


class Progress(Protocol):
    """What a search tells whoever is watching; the command line draws it, tests keep it quiet."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A new stage of `total` steps begins."""

    def advance(self, steps: int = 1) -> None:
        """Some steps of the stage are done."""

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """A trial has finished; `best` is the best so far."""

    def say(self, line: str) -> None:
        """Something worth a line of its own."""


@dataclass(frozen=True)
class Task:
    """Everything a search needs, loaded and checked, nothing written yet."""

    config: SearchConfig
    loaded: Loaded
    target: Target
    prompts: PromptSet
    identity: Mapping[str, Any]
    """What makes a stored study resumable: model, data and how they are decoded."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `rows` are the lines of the final table, all measured on held-out prompts."""

    profile: DraftProfile
    winner: TrialRecord
    """The winner of the race; the profile is its only if `confirmed` has its interval above 1."""
    confirmed: Measurement
    """The winner on the held-out prompts."""
    rows: tuple[ResultRow, ...]
    studies: Mapping[str, str]
    """Why each study that ran ended."""
    num_trials: int
    search_seconds: float


class InterruptedSearchError(SearchError):
    """The user stopped the search; `best` is the best trial so far and `profile_written` whether a profile came of it."""

    def __init__(self, best: TrialRecord | None, out: Path | None) -> None:
        self.best = best
        self.out = out
        super().__init__("interrupted")


def prepare(config: SearchConfig, progress: Progress) -> Task:
    """Load model and prompts and check all that can be checked before anything is run or written."""
    check_writable(config.out)
    progress.stage(f"loading {config.model}")
    loaded = load(config.model, revision=config.revision, dtype=config.dtype, device=config.device)
    capabilities = probe(loaded.model)
    if capabilities.refusal:
        raise UnsupportedModelError(capabilities.refusal)
    if config.prefix_reuse and not capabilities.prefix_reuse:
        progress.say("this model cannot be verified from the middle: prefix reuse is off")
        config = config.model_copy(update={"prefix_reuse": False})
    target = Target(loaded.model)
    prompts = load_prompts(
        config.dataset,
        loaded.tokenizer,
        num_tuning=config.tuning_prompts,
        num_held_out=config.held_out_prompts,
        max_new_tokens=config.max_new_tokens,
        context_length=target.context_length,
        seed=config.seed,
        prompt_column=config.prompt_column,
        group_column=config.group_column,
        chat_template=config.chat_template,
        max_prompt_tokens=config.max_prompt_tokens,
    )
    identity = {
        "model": list(vars(fingerprint(loaded.model)).values()),
        "data": prompts.fingerprint,
        "device": device_name(target.device),
        "precision": str(target.dtype),
        "decoding": {
            "max_new_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "prompts_per_trial": config.prompts_per_trial,
            "prefix_reuse": config.prefix_reuse,
        },
    }
    return Task(config, loaded, target, prompts, identity)


def search(task: Task, progress: Progress) -> SearchResult:
    """Run the studies, race their finalists, confirm the winner on held-out prompts, write and track the profile.

    Raises `InterruptedSearchError` when the user stops it (finished trials are on disk, the best so far is written), and
    `SearchError` if no trial of any study could be measured.
    """
    config = task.config
    store = StudyStore(config.storage, config.resolved_experiment())
    tracker = _open_tracker(task, store)
    records: dict[str, list[TrialRecord]] = {}
    try:
        tuning = _bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
        ended = _run_studies(task, store, tracker, tuning, records, progress)
        finalists = _race(task, tuning, records, ended, progress)
        held_out = _bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
        confirmed = _confirm(finalists, held_out, progress)
        result = _conclude(task, records, finalists, confirmed, held_out, ended, tracker.run_id)
        result.profile.save(config.out)
        _track_result(tracker, result, records, task)
    except KeyboardInterrupt:
        tracker.close("KILLED")
        raise InterruptedSearchError(*_save_best_so_far(task, records)) from None
    except BaseException:
        tracker.close("FAILED")
        raise
    tracker.close("FINISHED")
    return result


def check_writable(out: Path) -> None:
    """Raise `ProfileError` if a profile could not be written to `out`."""
    if out.is_dir():
        raise ProfileError(
            f"cannot write the profile {out}: it is a folder; name a file such as {out / 'profile.yaml'}"
        )
    if not out.parent.is_dir():
        raise ProfileError(f"cannot write the profile {out}: there is no folder {out.parent}")
    try:
        with (out.parent / f".{out.name}.check").open("w"):
            pass
        (out.parent / f".{out.name}.check").unlink()
    except OSError as cause:
        raise ProfileError(f"cannot write the profile {out}: {cause.strerror}") from None


def _open_tracker(task: Task, store: StudyStore) -> Tracker:
    config = task.config
    try:
        return Tracker.open(
            config.tracking_uri,
            config.resolved_experiment(),
            run_id=store.noted(RUN_ID),
            params=_run_params(task),
            dataset=DatasetInput(name=config.dataset, fingerprint=task.prompts.fingerprint, source=config.dataset),
        )
    except TrackingError:
        store.discard_if_new()
        raise


def _bench(task: Task, prompts: Sequence[Prompt], stage: str, progress: Progress) -> Bench:
    progress.stage(stage, len(prompts))
    bench = Bench(
        task.target,
        [prompt.token_ids for prompt in prompts],
        max_new_tokens=task.config.max_new_tokens,
        temperature=task.config.temperature,
        eos_token_ids=eos_token_ids(task.loaded.model),
        prefix_reuse=task.config.prefix_reuse,
        seed=task.config.seed,
        on_progress=progress.advance,
    )
    if bench.num_too_short:
        progress.say(f"{bench.num_too_short} of {len(prompts)} prompts end too soon to measure and are left out")
    return bench


def _run_studies(
    task: Task,
    store: StudyStore,
    tracker: Tracker,
    bench: Bench,
    records: dict[str, list[TrialRecord]],
    progress: Progress,
) -> dict[str, str]:
    """Run the asked studies in order, each knowing the trials of those before it; fills `records`, returns why each ended."""
    config = task.config
    places = range(min(config.prompts_per_trial, len(bench.prompts)))
    ended = {}
    for place, name in enumerate(config.study):
        study = _create_study(name, task, bench, records)
        stored = store.open(study, task.identity)
        stored.note(RUN_ID, tracker.run_id)
        records[name] = stored.records()
        share = _share_of_time(config, store.spent_seconds(), len(config.study) - place)
        if records[name]:
            progress.say(f"{name}: {len(records[name])} finished trials found in {store.url}, going on from there")
        for record in records[name]:
            tracker.log_trial(record)
        progress.stage(name, _expected_trials(task, name))
        progress.advance(len(records[name]))

        def keep(record: TrialRecord, name: str = name) -> None:
            records[name].append(record)
            tracker.log_trial(record)
            best = best_trials((r for done in records.values() for r in done), 1)
            progress.trial(record, best[0] if best else None)

        _, ended[name] = run_study(study, stored, bench, places, Budget(config.trials, share), keep)
        progress.say(f"{name}: {ended[name]}")
    return ended


def _share_of_time(config: SearchConfig, spent_seconds: float, studies_left: int) -> float | None:
    """An equal share of the search time that is left, so that the first study does not take it all."""
    return None if config.timeout is None else max(0.0, config.timeout - spent_seconds) / studies_left


def _create_study(name: str, task: Task, bench: Bench, records: Mapping[str, Sequence[TrialRecord]]) -> Study:
    problem = Problem(
        target=task.target,
        prompts=tuple(bench.prompts),
        continuations=tuple(bench.greedy_texts),
        earlier=dict(records),
        seed=task.config.seed,
    )
    return STUDIES[name].create(problem, task.config.study_settings(name))


def _expected_trials(task: Task, name: str) -> int | None:
    """The most trials a study may run, for the progress bar."""
    settings = task.config.study_settings(name)
    limits = [task.config.trials, getattr(settings, "max_trials", None), getattr(settings, "max_iterations", None)]
    return min((limit for limit in limits if limit is not None), default=None)


def _race(
    task: Task,
    bench: Bench,
    records: Mapping[str, Sequence[TrialRecord]],
    ended: Mapping[str, str],
    progress: Progress,
) -> list[Finalist]:
    """The best trials of all studies together, and the best of each, on the tuning prompts no trial has seen."""
    everything = [record for done in records.values() for record in done]
    best_of_each = [record for done in records.values() for record in best_trials(done, 1)]
    finalists = list(
        {r.candidate.key: r for r in [*best_trials(everything, task.config.finalists), *best_of_each]}.values()
    )
    if not finalists:
        failures = [f"the last trial said: {record.reason}" for record in everything if record.reason][-1:]
        why = "; ".join(failures or [f"{name}: {reason}" for name, reason in ended.items()])
        raise SearchError(f"no candidate could be measured in {len(everything)} trials; {why}")
    unseen = range(min(task.config.prompts_per_trial, len(bench.prompts)), len(bench.prompts))
    places = unseen if len(unseen) >= 2 else range(len(bench.prompts))
    progress.stage("race of the finalists", len(places) * len(finalists))
    return race(finalists, bench, places, on_lap=progress.advance)


def _confirm(finalists: Sequence[Finalist], bench: Bench, progress: Progress) -> dict[str, Measurement]:
    """Held-out measurements, by candidate, of the winner and of the best finalist of each study."""
    chosen = {finalist.trial.candidate.key: finalist.trial for finalist in [finalists[0], *_best_per_study(finalists)]}
    places = range(len(bench.prompts))
    progress.stage("confirmation on held-out prompts", len(places) * len(chosen))
    return {
        key: bench.measure(trial.candidate, places, on_sample=lambda _: progress.advance())
        for key, trial in chosen.items()
    }


def _best_per_study(finalists: Sequence[Finalist]) -> list[Finalist]:
    best: dict[str, Finalist] = {}
    for finalist in finalists:
        best.setdefault(finalist.trial.study, finalist)
    return list(best.values())


def _conclude(
    task: Task,
    records: Mapping[str, Sequence[TrialRecord]],
    finalists: Sequence[Finalist],
    confirmed: Mapping[str, Measurement],
    held_out: Bench,
    ended: Mapping[str, str],
    run_id: str,
) -> SearchResult:
    """The profile of the winner, or of plain decoding if the winner's interval does not lie above 1, and the table's rows."""
    winner = finalists[0].trial
    measurement = confirmed[winner.candidate.key]
    interval = measurement.speedup_interval()
    wins = interval.ci95[0] > 1.0 and measurement.is_lossless and finalists[0].measurement.is_lossless
    everything = [record for done in records.values() for record in done]
    seconds = sum(record.seconds for record in everything)
    measured = _measured(task, measurement, interval, held_out, len(everything), seconds) if wins else None
    profile = DraftProfile(
        name=f"{task.config.resolved_experiment()}-{winner.study.replace('_', '-') if wins else 'plain'}",
        target=_profile_target(task),
        draft=winner.candidate.draft if wins else PlainDecoding(),
        draft_length=winner.candidate.draft_length if wins else Fixed(),
        decoding=Decoding(temperature=task.config.temperature, prefix_reuse=task.config.prefix_reuse),
        measured=measured,
        provenance=Provenance(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            study=winner.study,
            git_revision=git_revision(Path(__file__).parent),
            mlflow_run_id=run_id,
        ),
    )
    rows = [ResultRow(label="plain decoding", description="the whole model, token by token", measurement=None)]
    for finalist in _best_per_study(finalists):
        rows.append(_row(finalist.trial.study, finalist.trial, confirmed))
    return SearchResult(profile, winner, measurement, tuple(rows), dict(ended), len(everything), seconds)


def _row(label: str, trial: TrialRecord, confirmed: Mapping[str, Measurement]) -> ResultRow:
    candidate = trial.candidate
    description = f"{candidate.draft.describe()}; {candidate.draft_length.describe()}"
    return ResultRow(label=label, description=description, measurement=confirmed[candidate.key])


def _measured(
    task: Task, measurement: Measurement, interval: Interval, bench: Bench, num_trials: int, seconds: float
) -> Measured:
    return Measured(
        speedup=interval,
        tokens_per_second=Rates(draft=measurement.draft_tokens_per_second, plain=measurement.plain_tokens_per_second),
        acceptance_rate=measurement.acceptance_rate,
        tokens_per_round=measurement.tokens_per_round,
        exact=Exactness(
            prompts=len(measurement.samples), identical=measurement.num_identical, ties=measurement.num_ties
        ),
        search=SearchCost(trials=num_trials, seconds=seconds),
        device=device_name(task.target.device),
        versions=versions(),
        dataset=DatasetFacts(
            name=task.config.dataset,
            fingerprint=task.prompts.fingerprint,
            tuning_prompts=len(task.prompts.tuning),
            held_out_prompts=len(bench.prompts),
            max_new_tokens=task.config.max_new_tokens,
        ),
    )


def _profile_target(task: Task) -> ProfileTarget:
    found = fingerprint(task.loaded.model)
    return ProfileTarget(
        model=task.loaded.name,
        revision=task.loaded.revision,
        architecture=type(task.loaded.model).__name__,
        num_layers=task.target.num_layers,
        dtype=str(task.target.dtype).removeprefix("torch."),
        device=str(task.target.device),
        config_sha256=found.config_sha256,
        weights_sha256=found.weights_sha256,
        tokenizer_sha256=tokenizer_sha256(task.loaded.tokenizer),
    )


def _run_params(task: Task) -> dict[str, str | int | float | bool | None]:
    """The parent run's parameters: every setting of the search, the device, the versions and the revision."""
    # The two addresses may hold passwords; MLflow knows its own, and the trials are in it too.
    settings = task.config.model_dump(mode="json", exclude={"studies", "storage", "tracking_uri"})
    flat = {key: ",".join(value) if isinstance(value, list) else value for key, value in settings.items()}
    return {
        **flat,
        "device_name": device_name(task.target.device),
        "precision": str(task.target.dtype),
        "git_revision": git_revision(Path(__file__).parent),
        **{f"version.{package}": version for package, version in versions().items()},
    }


def _track_result(
    tracker: Tracker, result: SearchResult, records: Mapping[str, Sequence[TrialRecord]], task: Task
) -> None:
    """Figures of the baseline and the winner, the profile, the trials as a table and the two pictures."""
    confirmed, interval = result.confirmed, result.confirmed.speedup_interval()
    figures = {
        "search_seconds": result.search_seconds,
        "trials": float(result.num_trials),
        "held_out_speedup": interval.value,
        "held_out_speedup_low": interval.ci95[0],
        "held_out_speedup_high": interval.ci95[1],
        "held_out_tokens_per_second": confirmed.draft_tokens_per_second,
        "plain_tokens_per_second": confirmed.plain_tokens_per_second,
        "held_out_acceptance_rate": confirmed.acceptance_rate,
        "held_out_tokens_per_round": confirmed.tokens_per_round,
        "held_out_prompts": float(len(confirmed.samples)),
        "held_out_identical": float(confirmed.num_identical),
    }
    best = result.winner.candidate
    tags = {
        "decision": result.profile.draft.kind,
        "winner": f"{best.draft.describe()}; {best.draft_length.describe()}",
        "profile": result.profile.name,
    }
    tracker.log_figures(figures, tags)
    everything = [record for done in records.values() for record in done]
    with TemporaryDirectory() as folder:
        (Path(folder) / "trials.csv").write_text(trials_csv(everything), encoding="utf-8")
        skipped_layers_picture(everything, task.target.num_layers, Path(folder) / "skipped_layers.png")
        speedup_picture(everything, Path(folder) / "speedup.png")
        for name in ("trials.csv", "skipped_layers.png", "speedup.png"):
            tracker.log_artifact(Path(folder) / name)
    tracker.log_artifact(task.config.out)


def _save_best_so_far(
    task: Task, records: Mapping[str, Sequence[TrialRecord]]
) -> tuple[TrialRecord | None, Path | None]:
    """The best trial yet, written beside the place of the confirmed profile if it was faster than plain decoding."""
    best = next(iter(best_trials((record for done in records.values() for record in done), 1)), None)
    if best is None or (best.speedup or 0.0) <= 1.0:
        return best, None
    out = task.config.out.with_suffix(".unconfirmed.yaml")
    DraftProfile(
        name=f"{task.config.resolved_experiment()}-unconfirmed",
        target=_profile_target(task),
        draft=best.candidate.draft,
        draft_length=best.candidate.draft_length,
        decoding=Decoding(temperature=task.config.temperature, prefix_reuse=task.config.prefix_reuse),
    ).save(out)
    return best, out
