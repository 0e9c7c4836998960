"""`sdtune evaluate predictions` from its settings to its results on disk."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType

from decoding.draft_length import RULES
from tuner.evaluation.predictions.check import PredictionCheck, PredictorFactory, check_predictions, predictor_factory
from tuner.evaluation.predictions.report import pairs_csv, pairs_picture, predictions_table, tuning_table
from tuner.evaluation.predictions.rule_tuning import TuningCheck, check_rule_tuning, drafts_to_tune
from tuner.evaluation.predictions.settings import PredictionsEvaluation
from tuner.evaluation.task import facts_of, head_drafts, prepare_check
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.results import write_json, write_result, write_text
from tuner.search.task import Task, open_bench

NAME = "predictions"


def run_and_write(settings: PredictionsEvaluation, progress: Progress) -> RenderableType:
    """Evaluate predictions, then tuning by replay unless `drafts` is 0, and return the tables.

    The first half is on disk before the second begins. Raises `SdtuneError` for errors of the user.
    """
    task = prepare_check(settings.config, settings.out, progress)
    tuning = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
    factory = predictor_factory(
        task,
        tuning,
        num_prompts=settings.prompts,
        max_tokens=settings.max_tokens,
        bits=settings.bits,
        progress=progress,
    )
    check = check_predictions(
        task, tuning, factory, count=settings.configurations, with_leaves=settings.leaves, progress=progress
    )
    shown = _write(task, settings.out, check, None)
    if settings.drafts:
        tuned = _tune(task, tuning, factory, settings, progress)
        shown = _write(task, settings.out, check, tuned)
    return shown


def _tune(
    task: Task, tuning: Bench, factory: PredictorFactory, settings: PredictionsEvaluation, progress: Progress
) -> TuningCheck:
    held_out = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
    progress.stage("proposing drafts to tune rules for")
    drafts = drafts_to_tune(task, factory.predictor(), head_drafts(task).values(), settings.drafts)
    return check_rule_tuning(
        task,
        tuning,
        held_out,
        factory,
        drafts,
        rules=tuple(RULES),
        num_replays=settings.replays,
        num_trials=settings.trials,
        progress=progress,
    )


def _write(task: Task, out: Path, check: PredictionCheck, tuned: TuningCheck | None) -> RenderableType:
    groups = check.by_group()
    document = {
        **facts_of(task),
        "predictions": {
            **{name: check.raw(pairs).model_dump(mode="json") for name, pairs in groups.items()},
            **{f"category {name}": found.model_dump(mode="json") for name, found in check.by_category().items()},
            "corrected by all others (leave one out)": check.corrected(check.pairs).model_dump(mode="json"),
            "tokens per round": check.tokens_per_round(check.pairs).model_dump(mode="json"),
            "cost of a round": check.round_cost(check.pairs).model_dump(mode="json"),
        },
        **check.model_dump(mode="json"),
    }
    shown: RenderableType = predictions_table(check)
    if tuned is not None:
        summary = {"ratio": tuned.ratio, "num_level": tuned.num_level, "share_of_seconds": tuned.share_of_seconds}
        document["tuning"] = {**summary, **tuned.model_dump(mode="json")}
        shown = Group(shown, tuning_table(tuned))
    write_result(out, f"{NAME}.csv", pairs_csv(check))
    write_result(out, f"{NAME}.png", pairs_picture(check))
    write_text(out, NAME, shown)
    write_json(out, NAME, document)
    return shown
