"""Comparison of draft-length rules tuned by replay alone with rules tuned by real decoding.

Both methods start with the rule's defaults and see only the tuning prompts. Their settings are then decoded side by side on the
held-out prompts. The time of tuning by replay includes recording the draft, counted for each rule, and once for all the cost
table and the reading of the texts, which all drafts and rules share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import optuna
from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.draft_length import RULES, AnyRule, DraftLengthRule, Fixed
from decoding.drafts import Draft, EarlyExit
from decoding.profile import Interval
from studies.contract import Candidate
from studies.measurement import Measurement, ratio_interval
from studies.prediction.predictor import Predictor
from studies.prediction.proposals import propose_skip_sets
from studies.prediction.skip_space import SkipSpace
from studies.rule_space import rule_parameters, rule_sampler, suggest_rule
from tuner.evaluation.predictions.check import PredictorFactory
from tuner.evaluation.predictions.replay_tuning import tune_by_replay
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.task import Task

SKIP_SETS = 120
"""Number of skip sets predicted to find the best one."""
NEAR = 0.98
"""Ratio from which tuning by replay is as good as tuning by decoding: within 2 %."""


class TunedBoth(Document):
    """One rule on one draft, tuned by both methods, with held-out speed-ups."""

    draft: Draft
    replayed: AnyRule = Field(description="setting found by replay")
    decoded: AnyRule = Field(description="setting found by real decoding")
    ratio: Interval = Field(description="speed of replay's setting relative to decoding's setting")
    replayed_speedup: Interval
    decoded_speedup: Interval
    replay_seconds: float
    decoding_seconds: float
    num_trials: int
    replayed_measurement: Measurement = Field(description="all samples on the held-out prompts", repr=False)
    decoded_measurement: Measurement = Field(repr=False)


class TuningCheck(Document):
    """All rules on all drafts, and their shared time."""

    tuned: tuple[TunedBoth, ...] = Field(min_length=1)
    shared_seconds: float = Field(description="time of measuring costs and reading texts, once for all")

    @property
    def ratio(self) -> float:
        """Geometric mean of the ratios."""
        return math.exp(sum(math.log(each.ratio.value) for each in self.tuned) / len(self.tuned))

    @property
    def num_level(self) -> int:
        """Number of rules for which tuning by replay is at most 2 % slower."""
        return sum(each.ratio.value >= NEAR for each in self.tuned)

    @property
    def share_of_seconds(self) -> float:
        """Time of tuning by replay, shared time included, over tuning by decoding."""
        replayed = sum(each.replay_seconds for each in self.tuned) + self.shared_seconds
        return replayed / sum(each.decoding_seconds for each in self.tuned)


def drafts_to_tune(task: Task, predictor: Predictor, heads: Iterable[EarlyExit], count: int) -> list[Draft]:
    """Return up to `count` drafts with high predicted speed-ups.

    The best exit, skip set and exit with head come first, then the second best of each, and so on.
    """
    layers = range(1, task.target.num_layers)
    exits = predictor.best_first(EarlyExit(exit_layer=layer) for layer in layers)
    as_exits = {EarlyExit(exit_layer=layer).skipped(task.target.num_layers) for layer in layers}
    found = propose_skip_sets(SkipSpace.of(task.target), predictor, SKIP_SETS)
    skips = [each for each in found if each.draft not in as_exits]
    ranked = [exits, skips, predictor.best_first(heads)]
    longest = max(len(each) for each in ranked)
    return [each[index].draft for index in range(longest) for each in ranked if index < len(each)][:count]


def check_rule_tuning(
    task: Task,
    tuning: Bench,
    held_out: Bench,
    factory: PredictorFactory,
    drafts: Sequence[Draft],
    *,
    rules: Sequence[str],
    num_replays: int,
    num_trials: int,
    progress: Progress,
) -> TuningCheck:
    """Tune each rule on each draft by both methods; compare on held-out prompts."""
    start = time.perf_counter()
    predictor = factory.predictor()
    shared_seconds = factory.cost_seconds + time.perf_counter() - start
    tuned: list[TunedBoth] = []
    for draft in drafts:
        progress.stage(f"tuning rules for {draft.describe()}", len(rules) * num_trials)
        start = time.perf_counter()
        predictor.predict(draft, Fixed())
        recording_seconds = time.perf_counter() - start
        found = []
        for name in rules:
            replayed, seconds = _replay(predictor, draft, name, num_replays, task.config.seed)
            decoded, decoding_seconds = _decode(task, tuning, draft, name, predictor.max_tokens, num_trials, progress)
            found.append(_Found(replayed, decoded, recording_seconds + seconds, decoding_seconds))
        tuned += _compare(draft, found, num_trials, held_out, progress)
    return TuningCheck(tuned=tuple(tuned), shared_seconds=shared_seconds)


@dataclass(frozen=True)
class _Found:
    """Settings of one rule found by both methods, and the seconds each took."""

    replayed: Candidate
    decoded: Candidate
    replay_seconds: float
    decoding_seconds: float


def _replay(predictor: Predictor, draft: Draft, rule: str, count: int, seed: int) -> tuple[Candidate, float]:
    start = time.perf_counter()
    best = tune_by_replay(predictor, draft, rule, count=count, seed=seed)
    return Candidate(draft=draft, draft_length=best.rule), time.perf_counter() - start


def _decode(
    task: Task, bench: Bench, draft: Draft, rule: str, max_tokens: int, num_trials: int, progress: Progress
) -> tuple[Candidate, float]:
    indices = range(min(task.config.prompts_per_trial, len(bench.prompts)))

    def measure(setting: DraftLengthRule) -> float:
        return bench.measure(Candidate(draft=draft, draft_length=setting), indices).speedup

    start = time.perf_counter()
    best = tune_by_decoding(
        measure, rule, max_tokens=max_tokens, num_trials=num_trials, seed=task.config.seed, on_trial=progress.advance
    )
    return Candidate(draft=draft, draft_length=best), time.perf_counter() - start


def tune_by_decoding(
    measure: Callable[[DraftLengthRule], float],
    rule: str,
    *,
    max_tokens: int,
    num_trials: int,
    seed: int,
    on_trial: Callable[[], None] = lambda: None,
) -> DraftLengthRule:
    """Return the best setting of `num_trials` TPE trials.

    Defaults are tried first. A repeated setting is not measured again.
    """
    study = optuna.create_study(direction="maximize", sampler=rule_sampler(seed))
    study.enqueue_trial(rule_parameters(RULES[rule](rule=rule), max_tokens))
    measured: dict[DraftLengthRule, float] = {}
    for _ in range(num_trials):
        trial = study.ask()
        setting = suggest_rule(trial, [rule], max_tokens)
        if setting not in measured:
            measured[setting] = measure(setting)
        study.tell(trial, measured[setting])
        on_trial()
    return max(measured, key=lambda setting: measured[setting])


def _compare(
    draft: Draft, found: Sequence[_Found], num_trials: int, bench: Bench, progress: Progress
) -> list[TunedBoth]:
    candidates = {each.key: each for pair in found for each in (pair.replayed, pair.decoded)}
    indices = range(len(bench.prompts))
    progress.stage("measuring both settings on held-out prompts", len(indices) * len(candidates))
    measurements = bench.side_by_side(list(candidates.values()), indices, on_sample=lambda _: progress.advance())
    of: dict[str, Measurement] = dict(zip(candidates, measurements, strict=True))
    return [
        TunedBoth(
            draft=draft,
            replayed=each.replayed.draft_length,
            decoded=each.decoded.draft_length,
            ratio=ratio_interval(of[each.replayed.key], of[each.decoded.key]),
            replayed_speedup=of[each.replayed.key].speedup_interval(),
            decoded_speedup=of[each.decoded.key].speedup_interval(),
            replay_seconds=each.replay_seconds,
            decoding_seconds=each.decoding_seconds,
            num_trials=num_trials,
            replayed_measurement=of[each.replayed.key],
            decoded_measurement=of[each.decoded.key],
        )
        for each in found
    ]
