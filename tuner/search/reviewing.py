"""Gathers what a reviewer needs of a finished search, and logs it: description, samples, texts, pictures, the winning trial."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from decoding.losslessness import compare
from studies.contract import Candidate, TrialRecord
from studies.measurement import Measurement
from tuner.measuring.paired import Bench
from tuner.results import Provenance
from tuner.review.document import MeasuredCandidate, SearchReview, TextPair, described, trial_name
from tuner.review.markdown import search_note, texts_page
from tuner.review.page import report_page
from tuner.review.tables import held_out_csv, race_csv
from tuner.search.outcome import SearchResult
from tuner.search.report import skipped_layers_picture, speedup_picture
from tuner.search.task import Task, token_ids
from tuner.tracking import Tracker

NUM_TEXTS = 3
"""Held-out prompts on the page of texts. The winner continues those once more whose text differs from plain decoding's."""
MOST_PROMPT = 4000
"""Characters of a prompt that a reader sees, from its end."""


def written_texts(task: Task, candidate: Candidate, confirmed: Measurement, held_out: Bench) -> tuple[TextPair, ...]:
    """Return a few held-out prompts with their greedy continuations, plain and by `candidate`.

    Texts that `confirmed` found to be plain decoding's, token for token, are known; others are decoded once more.
    """
    pairs = []
    decode = task.loaded.tokenizer.decode
    known = {sample.prompt for sample in confirmed.samples if sample.identical}
    for index in held_out.indices[: -(-NUM_TEXTS // held_out.batch_size)]:
        rows = held_out.baseline.members(index)
        plain_texts = [held_out.continuations[row] for row in rows]
        for row, tokens in zip(rows, plain_texts if index in known else held_out.write(candidate, index), strict=True):
            prompt, plain = held_out.prompts[row], held_out.continuations[row]
            comparison = compare(task.target, prompt, plain, tokens)
            pairs.append(
                TextPair(
                    prompt=decode(prompt)[-MOST_PROMPT:],
                    plain=decode(plain),
                    drafted=decode(tokens),
                    identical=comparison.identical,
                    tie=comparison.tie,
                )
            )
    return tuple(pairs[:NUM_TEXTS])


def review_of(task: Task, result: SearchResult, records: Sequence[TrialRecord], run_id: str) -> SearchReview:
    """Return the data of a finished search."""
    rivals = tuple(
        MeasuredCandidate(
            label=each.label,
            description=described(each.trial),
            trial=trial_name(each.trial),
            measurement=each.measurement,
        )
        for each in result.candidates
    )
    race = tuple(
        MeasuredCandidate(trial=trial_name(each.trial), description=described(each.trial), measurement=each.measurement)
        for each in result.race
    )
    return SearchReview(
        experiment=task.config.resolved_experiment(),
        run_id=run_id,
        profile=result.profile,
        objection=result.objection,
        winner=trial_name(result.winner),
        rivals=rivals,
        race=race,
        trials=tuple(records),
        comparison=result.comparison,
        no_comparison=result.no_comparison,
        texts=result.texts,
        noise=result.noise,
        ended=dict(result.studies),
        cuts=tuple(result.cuts),
        cautions=tuple(_cautions(task, result)),
        stages={stage.value: seconds for stage, seconds in task.budget.clock.seconds().items()},
        search_seconds=result.cost.search_seconds,
        distillation_seconds=result.cost.distillation_seconds,
        settings=task.config.model_dump(mode="json", exclude={"storage", "tracking_uri"}),
        provenance=Provenance.now(task.target.device).model_copy(update={"command": command_line()}),
    )


def command_line() -> str:
    """Return the command of this process, without passwords in addresses."""
    words = ["sdtune", *sys.argv[1:]]
    return shlex.join(re.sub(r"(://[^/@\s:]*):[^/@\s]+@", r"\1:***@", word) for word in words)


def _cautions(task: Task, result: SearchResult) -> list[str]:
    """Return what a reader should know about the heads of the profile."""
    used = [task.head_folder.folder / name for name in result.winner.candidate.draft.files]
    if not used:
        return []
    exits = [layer for layer in task.heads if task.heads[layer].head in {path.name for path in used}]
    feature = task.feature_draft is not None and task.feature_draft.head in {path.name for path in used}
    found = [each for layer in exits if (each := task.head_folder.facts(layer)) is not None]
    if feature and (of_feature := task.head_folder.feature_facts()) is not None:
        found.append(of_feature)
    cautions = []
    for facts in found:
        training, wanted = facts.training, task.config.distillation.training_dataset or task.config.dataset
        if training is not None and Path(training.dataset).name != Path(wanted).name:
            cautions.append(
                f"The {facts.noun} was trained on {Path(training.dataset).name}, not on {Path(wanted).name}."
            )
    tuning = token_ids(task.prompts.tuning)
    if count := task.head_folder.num_trained_on(exits, tuning, feature_head=feature):
        cautions.append(
            f"Heads were trained on {count} of the {len(tuning)} tuning prompts, so trials overrate them; held-out figures do not."
        )
    return cautions


def track_review(tracker: Tracker, review: SearchReview, records: Sequence[TrialRecord], task: Task) -> None:
    """Log the description of a search, its samples, texts and pictures, and mark the winning trial."""
    noise = review.noise
    tracker.log_figures(
        {
            f"machine/{name}": value
            for name, value in (
                ("plain_variation", noise.plain_variation),
                ("waiting", noise.waiting),
                ("load", noise.load),
                ("cost_table_error", noise.cost_error),
            )
            if value is not None
        },
        {"noisy": str(bool(noise.disturbances)).lower()},
    )
    if (winner := review.winning_trial) is not None:
        tracker.name_winner(winner)
    tracker.log_text(held_out_csv(review), "held_out.csv")
    tracker.log_text(race_csv(review), "race.csv")
    tracker.log_text(texts_page(review.texts, review.experiment), "texts.md")
    tracker.log_document(review.settings, "config.yaml")
    tracker.log_text(review.model_dump_json(by_alias=True), "search.json")
    with TemporaryDirectory() as folder:
        skipped_layers_picture(records, task.target.num_layers, review.winner, Path(folder) / "skipped_layers.png")
        confirmed = review.confirmed.speedup_interval()
        speedup_picture(records, review.winner, confirmed, Path(folder) / "speedup.png")
        for name in ("skipped_layers.png", "speedup.png"):
            tracker.log_artifact(Path(folder) / name)
    tracker.log_text(report_page(review), "report.html")
    # Last: a description promises the rest.
    tracker.describe(search_note(review, profile_path=str(task.config.out)))
