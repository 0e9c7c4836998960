"""`sdtune evaluate kinds` from its settings to its results on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from decoding.drafts import BitWidth
from decoding.fingerprint import hash_json
from decoding.runners.quantised_linear import is_fast_on
from decoding.target import Target
from studies.costs.table import CostTable
from studies.prediction.predictor import Predictor
from studies.prediction.survey import Survey
from tuner.errors import StorageError
from tuner.evaluation.contract import Report
from tuner.evaluation.kinds.choosing import RowChooser, to_measure
from tuner.evaluation.kinds.document import KindRow, KindsFound, SharedWork
from tuner.evaluation.kinds.families import Offer, check_uses, kinds_without_proposals
from tuner.evaluation.kinds.footprint import footprints
from tuner.evaluation.kinds.prompts import check_tasks, task_prompts
from tuner.evaluation.kinds.report import kinds_csv, kinds_json, kinds_tables, table_width
from tuner.evaluation.kinds.settings import KindsEvaluation
from tuner.evaluation.task import facts_of, feature_draft, head_drafts, prepare_check
from tuner.inputs.environment import device_name
from tuner.measuring.baseline import Baseline
from tuner.measuring.cost_cache import cost_table
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.results import write_json, write_result, write_text
from tuner.search.task import Task, open_bench, token_ids

NAME = "kinds"
STATE = "kinds_state.json"
"""File of the rows and samples so far, from which the same command goes on."""


def run_and_write(settings: KindsEvaluation, progress: Progress) -> Report:
    """Choose a setting of each kind, measure all, and write the results after each round of prompts.

    Raises `SdtuneError` for errors of the user.
    """
    check_uses(settings.only)
    check_tasks(settings.task)
    task = _prepared(settings, progress)
    key = _key(settings, task)  # heads that were trained on held-out prompts are refused before any decoding
    held_out = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
    found = _stored(settings.out, key)
    if found is None:
        found = _chosen(settings, task, held_out.baseline, key, progress)
        _write(settings.out, task, found)
    else:
        progress.say(f"going on after {found.num_done} of {len(held_out.indices)} held-out prompts")
    found = _measured(settings.out, task, held_out, found, progress)
    return Report(kinds_tables(found), width=table_width(found))


def _prepared(settings: KindsEvaluation, progress: Progress) -> Task:
    """Load the model, and give the task the prompts of all tasks in place of a search's."""
    few = {"tuning_prompts": 2, "held_out_prompts": 2, "prompts_per_trial": 2}
    task = prepare_check(settings.config.model_copy(update=few), settings.out, progress)
    prompts = task_prompts(
        task.config,
        settings.task,
        task.loaded,
        task.target.context_length,
        num_tuning=settings.tuning,
        num_held_out=settings.prompts,
    )
    for note in prompts.notes:
        progress.say(note)
    return replace(task, prompts=prompts)


def _key(settings: KindsEvaluation, task: Task) -> str:
    """Return the hash of everything that decides the rows and their samples."""
    own = settings.model_dump(mode="json", exclude={"out", "config", "threads"})
    heads = {layer: draft.head_sha256 for layer, draft in head_drafts(task).items()}
    feature = feature_draft(task)
    return hash_json(
        [
            own,
            task.identity,
            task.prompts.fingerprint,
            heads,
            feature and feature.head_sha256,
            task.decoding.model_dump(),
        ]
    )


def _stored(out: Path, key: str) -> KindsFound | None:
    """Return the rows of an earlier run of the same key; None if there are none. Raises `StorageError` for a damaged file."""
    try:
        found = KindsFound.model_validate_json((out / STATE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as cause:
        raise StorageError(f"cannot read {out / STATE}: {type(cause).__name__}; remove it to begin anew") from None
    return found if found.key == key else None


def _chosen(settings: KindsEvaluation, task: Task, held_out: Baseline, key: str, progress: Progress) -> KindsFound:
    """Return the rows that are worth measuring, with what each takes, and the others."""
    tuning = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress).baseline
    bits = _bits(settings, task.target)
    progress.stage("measuring pass costs")
    start = time.perf_counter()
    costs = _costs(settings, task, (tuning, held_out), bits, progress)
    measured = time.perf_counter()
    progress.say(costs.describe())
    progress.stage("reading the tuning texts")
    chooser = _chooser(settings, task, tuning, costs, bits)
    shared = SharedWork(
        costs=costs.describe(), cost_seconds=measured - start, survey_seconds=time.perf_counter() - measured
    )
    rows = chooser.rows(progress)
    del chooser  # and its recordings: what a draft holds is measured with no other draft in memory
    wanted = to_measure(rows, settings.combinations)
    return KindsFound(
        key=key,
        shared=shared,
        rows=tuple(_with_footprints(task, wanted, progress)),
        predicted_only=tuple(row for row in rows if row not in wanted),
        notes=tuple(_notes(task)),
    )


def _bits(settings: KindsEvaluation, target: Target) -> tuple[BitWidth, ...]:
    if not target.can_be_quantised:
        return ()
    return settings.bits if settings.bits is not None else ((8, 4) if is_fast_on(target.device) else ())


def _costs(
    settings: KindsEvaluation,
    task: Task,
    texts: Sequence[Baseline],
    bits: tuple[BitWidth, ...],
    progress: Progress,
) -> CostTable:
    lengths = [len(prompt) for each in texts for prompt in each.prompts]
    return cost_table(
        task.target,
        max_tokens=settings.max_tokens,
        contexts=sorted({min(lengths), max(lengths) + task.config.max_new_tokens}),
        bits=bits,
        seed=task.config.seed,
        progress=progress,
    )


def _chooser(
    settings: KindsEvaluation, task: Task, tuning: Baseline, costs: CostTable, bits: tuple[BitWidth, ...]
) -> RowChooser:
    def predictor(num_tokens: int | None) -> Predictor:
        continuations = [text[:num_tokens] for text in tuning.continuations]
        survey = Survey(
            task.target,
            tuning.prompts,
            continuations,
            decoding=task.decoding,
            seed=task.config.seed,
            heads=task.head_folder,
        )
        return Predictor(survey, costs, max_tokens=settings.max_tokens, decoding=task.decoding)

    tasks: dict[str, list[int]] = {}
    for index in tuning.indices:
        tasks.setdefault(str(tuning.category(index)), []).append(index)
    offer = Offer(task.target, head_drafts(task), feature_draft(task), settings.skip_sets)
    of_each = 1 + max(1, settings.rating_tokens // len(tuning.prompts))  # the first token is the prefill's
    return RowChooser(task, offer, bits, settings.only, predictor(of_each), predictor(None), tasks)


def _with_footprints(task: Task, rows: Sequence[KindRow], progress: Progress) -> Iterator[KindRow]:
    progress.stage("making each draft by itself", len(rows))
    for row, taken in zip(rows, footprints(task, [row.candidate for row in rows]), strict=True):
        progress.advance()
        yield row.model_copy(update={"footprint": taken})


def _notes(task: Task) -> list[str]:
    """Return what the reader has to know about the rows."""
    notes = [f"kind {kind}: has no settings to choose from here" for kind in kinds_without_proposals()]
    layers, feature = head_drafts(task), feature_draft(task) is not None
    tuning = token_ids(task.prompts.tuning)
    if num_seen := task.head_folder.num_trained_on(layers, tuning, feature_head=feature):
        notes.append(
            f"heads were trained on {num_seen} of the {len(tuning)} tuning prompts: their predictions are too high"
        )
    return notes


def _measured(out: Path, task: Task, held_out: Bench, found: KindsFound, progress: Progress) -> KindsFound:
    """Let all rows continue the prompts that are left, one of each task at a time, and write the results so far."""
    bench = held_out.keeping(len(found.rows))
    left = list(held_out.indices)[found.num_done :]
    size = max(2, len({held_out.baseline.category(index) for index in held_out.indices}))
    progress.stage(f"{len(found.rows)} kinds continue the held-out prompts", len(left) * len(found.rows))
    if not left:
        _write(out, task, found)
    for start in range(0, len(left), size):
        candidates = [row.candidate for row in found.rows]
        chunk = left[start : start + size]
        measured = bench.side_by_side(candidates, chunk, on_sample=lambda _: progress.advance())
        pairs = zip(found.rows, measured, strict=True)
        rows = tuple(row.continued(each) for row, each in pairs)
        found = found.model_copy(update={"rows": rows})
        _write(out, task, found)
    return found


def _write(out: Path, task: Task, found: KindsFound) -> None:
    write_result(out, STATE, found.model_dump_json())
    facts: dict[str, Any] = {**facts_of(task), "device": device_name(task.target.device)}
    if found.num_done > 1:
        write_text(out, NAME, kinds_tables(found), width=table_width(found))
        write_result(out, f"{NAME}.csv", kinds_csv(found))
        write_json(out, NAME, {**facts, **kinds_json(found)})
