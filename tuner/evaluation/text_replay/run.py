"""`sdtune evaluate text-replay` from its settings to its results on disk."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from rich.console import Group, RenderableType

from decoding.documents.strict_yaml import Document
from decoding.profile import Interval
from studies.contract import Candidate, TrialRecord, best_trials
from studies.measurement import Measurement
from tuner.drift.contract import ObservedText
from tuner.errors import ConfigError
from tuner.evaluation.predictions.accuracy import Accuracy, accuracy
from tuner.evaluation.tables import new_table
from tuner.evaluation.task import facts_of, prepare_check
from tuner.evaluation.text_replay.settings import TextReplayEvaluation
from tuner.measuring.clock import WallClock
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.results import write_json, write_text
from tuner.search.storage import StudyStore
from tuner.search.task import Task, open_bench
from tuner.service.contract import TextReplay
from tuner.service.retuning import NUM_KNOWN, NUM_REPLAYED, WARM_START, first_measured
from tuner.service.text_replay import replay_texts
from tuner.stage_clock import Stage

NAME = "text_replay"
CHUNK = 6
"""Candidates that are measured side by side and share one plain decoding per prompt."""


class ReplayedAndMeasured(Document):
    """One candidate: its old figure, its prediction, and what it does."""

    candidate: Candidate
    old: float | None
    """Speed-up in the earlier search's trial, on its texts; None for a lookup that the replay has added."""
    predicted: float
    measured: Interval
    measurement: Measurement


class ReplayCheck(Document):
    """All candidates of one replay, by their predictions, and the time spent."""

    replay: TextReplay
    cost_seconds: float
    """Time of measuring the costs of passes, 0 if they were stored; part of the replay's seconds."""
    decoding_seconds: float
    """Time of real decoding, of all candidates."""
    candidates: tuple[ReplayedAndMeasured, ...]

    def of_predictions(self) -> Accuracy:
        """Return the agreement of predictions and measurements."""
        return accuracy([each.predicted for each in self.candidates], [each.measured.value for each in self.candidates])

    def of_known(self) -> tuple[Accuracy, Accuracy]:
        """Return the agreement of predictions, and of old figures, for the candidates that have both."""
        known = [(each.predicted, each.old, each.measured.value) for each in self.candidates if each.old is not None]
        predicted, old, measured = (list(each) for each in zip(*known, strict=True))
        return accuracy(predicted, measured), accuracy(old, measured)

    def best_first(self) -> tuple[float, float, float]:
        """Return the best measured speed-up of those that are measured first: by the replay, by old figures, and of all."""
        champion = max(self.candidates, key=lambda each: each.old or 0.0)
        speedups = {each.candidate.key: each.measured.value for each in self.candidates}
        replayed = first_measured([each.candidate for each in self.candidates], champion.candidate)
        known = [each for each in self.candidates if each.old is not None]
        by_age = sorted(known, key=lambda each: -(each.old or 0.0))[: NUM_KNOWN + 1]
        return (
            max(speedups[each.key] for each in replayed),
            max(each.measured.value for each in by_age),
            max(speedups.values()),
        )


def run_and_write(settings: TextReplayEvaluation, progress: Progress) -> RenderableType:
    """Replay, then decode, and return the tables. Raises `SdtuneError` for errors of the user."""
    task = prepare_check(settings.config, settings.out, progress)
    known = best_trials(_stored(settings), NUM_REPLAYED)
    if len(known) < 2:
        raise ConfigError(f"{settings.experiment}: at least 2 finished trials are needed, and there are {len(known)}")
    logged = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly, as production", progress)
    held_out = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
    if settings.processor_time:
        held_out = by_processor_time(task, held_out)
    check = compared(task, known, logged, held_out, progress)
    shown = Group(*tables(check))
    write_json(settings.out, NAME, {**facts_of(task), "check": check.model_dump(mode="json")})
    write_text(settings.out, NAME, shown)
    return shown


def compared(
    task: Task, known: Sequence[TrialRecord], logged: Bench, held_out: Bench, progress: Progress
) -> ReplayCheck:
    """Replay the plain texts of `logged` with the candidates of `known`, the best first, then decode `held_out` with each."""
    texts = [
        ObservedText(number=number + 1, prompt=prompt, continuation=continuation)
        for number, (prompt, continuation) in enumerate(zip(logged.prompts, logged.continuations, strict=True))
        if len(continuation) > 1
    ]
    before = task.budget.clock.seconds().get(Stage.COSTS, 0.0)
    candidates = [record.candidate for record in known]
    found = replay_texts(task, candidates, candidates[0], texts, progress)
    cost_seconds = task.budget.clock.seconds().get(Stage.COSTS, 0.0) - before
    predicted = dict(zip((each.key for each in found.candidates), found.replay.predicted, strict=True))
    # Rules of one draft are too close to be told apart by a few prompts.
    of_drafts = {each.draft: each for each in reversed(found.candidates)}
    rated = [each for each in found.candidates if of_drafts[each.draft] == each]
    progress.stage("decoding with each candidate", len(rated) * len(held_out.indices))
    start = time.perf_counter()
    measured: list[Measurement] = []
    for first in range(0, len(rated), CHUNK):
        chunk = rated[first : first + CHUNK]
        measured += held_out.side_by_side(chunk, held_out.indices, lambda sample: progress.advance())
    old = {record.candidate.key: record.speedup for record in known}
    return ReplayCheck(
        replay=found.replay,
        cost_seconds=round(cost_seconds, 3),
        decoding_seconds=round(time.perf_counter() - start, 3),
        candidates=tuple(
            ReplayedAndMeasured(
                candidate=candidate,
                old=old.get(candidate.key),
                predicted=predicted[candidate.key].predicted_speedup,
                measured=measurement.speedup_interval(),
                measurement=measurement,
            )
            for candidate, measurement in zip(rated, measured, strict=True)
        ),
    )


def by_processor_time(task: Task, bench: Bench) -> Bench:
    """Return a bench of the same prompts that counts seconds of the processor.

    Raises `ConfigError` on a GPU or for more threads.
    """
    if task.target.device.type != "cpu" or torch.get_num_threads() > 1:
        raise ConfigError("--processor-time counts one thread of a CPU: give --device cpu --threads 1")
    clock = WallClock(task.target.device, time.process_time)
    return Bench(
        task.target, bench.baseline, decoding=task.decoding, heads=task.head_folder, seed=task.config.seed, clock=clock
    )


def tables(check: ReplayCheck) -> list[RenderableType]:
    """Return the tables: each candidate, and the agreement."""
    each_one = new_table("Predicted on logged texts, measured on others", "candidate", "old", "predicted", "measured")
    for each in check.candidates:
        old = "" if each.old is None else f"{each.old:.2f}"
        draft, rule = each.candidate.draft, each.candidate.draft_length
        each_one.add_row(
            f"{draft.describe()}; {rule.describe()}", old, f"{each.predicted:.2f}", _interval(each.measured)
        )
    agreement = new_table("Agreement with what was measured", "", "candidates", "Spearman", "median error", "bias")
    known, old_figures = check.of_known()
    for name, found in (
        ("predictions, lookups too", check.of_predictions()),
        ("predictions of stored candidates", known),
        ("old figures of these", old_figures),
    ):
        rank = "" if found.spearman is None else f"{found.spearman:.2f}"
        agreement.add_row(name, str(found.count), rank, f"{found.median_error:.1%}", f"{found.bias:.3f}")
    by_replay, by_age, of_all = check.best_first()
    costs = f"{check.cost_seconds:.1f} s of it for costs of passes"
    lines = [
        f"replay: {check.replay.seconds:.1f} s, {costs}; {check.replay.texts} texts, {check.replay.tokens} tokens, "
        f"{check.replay.left_out} left out",
        f"decoding: {check.decoding_seconds:.1f} s for {len(check.candidates)} candidates",
        f"best of those measured first: {by_replay:.2f}x by the replay, {by_age:.2f}x by old figures; of all {of_all:.2f}x",
    ]
    return [each_one, agreement, "\n".join(lines)]


def _interval(interval: Interval) -> str:
    return f"{interval.value:.2f} [{interval.ci95[0]:.2f}, {interval.ci95[1]:.2f}]"


def _stored(settings: TextReplayEvaluation) -> list[TrialRecord]:
    store = StudyStore(settings.storage, settings.experiment)
    try:
        names = [WARM_START, *settings.config.study]
        found = [stored.records() for name in names if (stored := store.find(name)) is not None]
    finally:
        store.close()
    return [record for records in found for record in records]
