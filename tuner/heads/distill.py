"""Distillation of a plan to trained heads: training texts, training, evaluation, files, tracking.

Both `sdtune distill` and a search with missing heads run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from decoding.drafts import compact_indices
from decoding.errors import DistillationError
from decoding.exit_heads import ExitFigures, HeadFacts, HeadTraining, new_exit_head, prompt_sha256, save_head
from decoding.fingerprint import hash_json
from tuner.config import SearchConfig
from tuner.fields import DATA_FIELDS
from tuner.heads.checkpoint import OtherCheckpointError, load_checkpoint, save_checkpoint, stored_exits
from tuner.heads.limits import TimeLimit
from tuner.heads.plan import Distillation, heads_at_once
from tuner.heads.texts import GeneratedText, TextPlan, generate_texts, num_response_tokens
from tuner.heads.training import Losses, Run, Student, evaluate, train
from tuner.inputs.memory import explained_shortage
from tuner.progress import Progress
from tuner.results import device_name, git_revision, versions
from tuner.tracking import DatasetInput, Tracker

MIN_TRAINING_TOKENS = 500
MIN_EVALUATION_TOKENS = 50
PROMPT_SETTINGS = (
    *("model", "revision", *DATA_FIELDS),
    *("tuning_prompts", "held_out_prompts", "max_new_tokens", "dtype", "seed"),
)
"""Keys of the search configuration that a distillation uses too."""

OnLosses = Callable[[int, Sequence[Losses]], None]
"""Callback for finished steps: the number of steps reported before, and the losses of each new step."""


@dataclass(frozen=True)
class Distilled:
    facts: Mapping[int, HeadFacts]
    """Facts stored in each head's file, figures included, by exit layer."""
    writing_seconds: float
    training_seconds: float


def distil(
    work: Distillation,
    exits: Sequence[int],
    progress: Progress,
    *,
    on_losses: OnLosses = lambda num_before, losses: None,
    overwrite: bool = False,
) -> Distilled:
    """Train heads for `exits` and write them into the folder, replacing existing ones.

    As many heads as fit in the memory are trained together, group after group. A head is the same in any group and place, unless a
    time limit ends its training. The limit covers texts, training and evaluation: texts get at most `WRITING_SHARE` of it, each
    group its share of the rest, and the learning-rate schedule is compressed to fit. A stopped run resumes from its texts, its
    finished heads and its last checkpoint; a group that an earlier run finished does not count. Raises `DistillationError` if there
    is too little training text, the loss diverges, the folder cannot be used, or the checkpoint belongs to another distillation and
    `overwrite` is false. Raises `ExitHeadError` if a head cannot be written.
    """
    target, settings = work.target, work.settings
    limits = [limit for limit in (settings.timeout, work.most_seconds) if limit is not None]
    limit = TimeLimit(min(limits, default=None))
    texts = _training_texts(work, limit, progress)
    unseen = _texts(work, work.evaluation_texts, "generating evaluation texts", MIN_EVALUATION_TOKENS, progress)
    writing_seconds = sum(text.seconds for text in (*texts, *unseen))
    figures = partial(evaluate, target, texts=unseen, batch_size=settings.batch_size, on_texts=progress.advance)
    evaluated = limit.spent
    progress.stage("evaluating without trained heads", len(unseen))
    before = figures(heads=dict.fromkeys(exits))
    evaluated = limit.spent - evaluated
    facts, training_seconds, num_begun = dict[int, HeadFacts](), 0.0, 0
    for group in _groups(work, exits, progress):
        seconds = limit.for_group(len(group), len(exits) - num_begun, evaluated)
        num_begun += len(group)
        students = {layer: Student(new_exit_head(target)) for layer in group}
        run = Run(students, most_seconds=seconds)
        _train(work, run, texts, progress, on_losses, overwrite=overwrite)
        heads = {layer: student.stored_head() for layer, student in students.items()}
        students.clear()  # the optimizers are not needed any more, and the evaluation takes memory too
        progress.stage("evaluating the trained heads", len(unseen))
        after = figures(heads=heads)
        cost = writing_seconds * len(heads) / len(exits) + run.seconds
        for layer, head in heads.items():
            facts[layer] = _facts(work, layer, texts, run.step, cost, before[layer], after[layer])
            save_head(work.path(layer), head.to(torch.bfloat16), facts[layer])
        training_seconds += run.seconds
        work.checkpoint.unlink(missing_ok=True)
    return Distilled({layer: facts[layer] for layer in exits}, writing_seconds, training_seconds)


def _groups(work: Distillation, exits: Sequence[int], progress: Progress) -> list[tuple[int, ...]]:
    """Return the exits in groups that are trained together: those of a checkpoint, which stay together, then the others."""
    at_once = heads_at_once(work, len(exits))
    if at_once < len(exits):
        progress.say(
            f"{len(exits)} heads are trained {at_once} at a time, to fit in the memory (distillation.heads_at_once)"
        )
    begun = stored_exits(work.checkpoint) if work.checkpoint.exists() else frozenset()
    parts = [[layer for layer in exits if layer in begun], [layer for layer in exits if layer not in begun]]
    return [tuple(part[first : first + at_once]) for part in parts for first in range(0, len(part), at_once)]


def _train(
    work: Distillation,
    run: Run,
    texts: Sequence[GeneratedText],
    progress: Progress,
    on_losses: OnLosses,
    *,
    overwrite: bool,
) -> None:
    """Train the heads of a run, from the checkpoint on if there is one; show the progress and keep a checkpoint.

    A checkpoint of another distillation is refused unless `overwrite` is set. Raises `DistillationError` if a loss is not finite.
    """
    settings, heads = work.settings, "head" if len(run.students) == 1 else "heads"
    progress.stage(f"training {len(run.students)} {heads}", settings.steps)
    if work.checkpoint.exists():
        try:
            load_checkpoint(run, work.identity, work.checkpoint)
            progress.say(f"resuming a stopped distillation after step {run.step}")
            progress.advance(run.step)
        except OtherCheckpointError:
            if not overwrite:
                raise
    num_reported = run.step

    def keep() -> None:
        nonlocal num_reported
        progress.advance()
        progress.show(f"loss {fmean(run.losses[-1].values()):.3f}")
        if run.step % settings.checkpoint_every == 0 or run.progress(settings) >= 1:
            on_losses(num_reported, run.losses[num_reported:])
            save_checkpoint(run, work.identity, work.checkpoint)
            mean = fmean(loss for losses in run.losses[num_reported:] for loss in losses.values())
            progress.say(f"step {run.step}: loss {mean:.3f} nats per token, mean of {len(run.students)} {heads}")
            num_reported = run.step

    train(run, work.target, texts, settings, work.seed, keep)


def _facts(
    work: Distillation,
    exit_layer: int,
    texts: Sequence[GeneratedText],
    steps: int,
    seconds: float,
    before: ExitFigures,
    after: ExitFigures,
) -> HeadFacts:
    training = HeadTraining(
        model=work.loaded.name,
        dataset=work.settings.training_dataset or work.prompts.name,
        prompts_sha256=tuple(prompt_sha256(prompt.token_ids) for prompt in work.training_prompts),
        num_texts=len(texts),
        num_tokens=num_response_tokens(texts),
        temperature=work.settings.temperature,
        steps=steps,
        seconds=seconds,
        before=before,
        after=after,
        device=device_name(work.target.device),
        versions=versions(),
        identity=work.identity,
    )
    return HeadFacts(
        exit_layer=exit_layer,
        num_layers=work.target.num_layers,
        architecture=type(work.loaded.model).__name__,
        config_sha256=work.model.config_sha256,
        weights_sha256=work.model.weights_sha256,
        training=training,
    )


def distil_and_track(
    work: Distillation, exits: Sequence[int], config: SearchConfig, progress: Progress, *, overwrite: bool = False
) -> Distilled:
    """Run `distil` and track settings, losses and figures in MLflow.

    A resumed distillation reuses its MLflow run.
    """
    less = "give a lower distillation.heads_at_once, batch_size or response_tokens; finished heads stay"
    tracker = _open_tracker(work, exits, config)
    try:
        with explained_shortage("distilling exit heads", less):
            distilled = distil(work, exits, progress, on_losses=partial(_log_losses, tracker), overwrite=overwrite)
        _log_distilled(tracker, work, distilled)
    except KeyboardInterrupt:
        tracker.close("KILLED")
        raise
    except BaseException:
        tracker.close("FAILED")
        raise
    tracker.close("FINISHED")
    return distilled


def _log_losses(tracker: Tracker, num_before: int, losses: Sequence[Losses]) -> None:
    tracker.log_history(
        {
            step: {f"exit_{exit_layer}/loss": loss for exit_layer, loss in of_step.items()}
            for step, of_step in enumerate(losses, start=num_before + 1)
        }
    )


def _log_distilled(tracker: Tracker, work: Distillation, distilled: Distilled) -> None:
    figures = {"writing_seconds": distilled.writing_seconds, "training_seconds": distilled.training_seconds}
    for exit_layer, facts in distilled.facts.items():
        assert facts.training is not None, "a distilled head records its training"
        for name, of_exit in (("without_head", facts.training.before), ("with_head", facts.training.after)):
            figures |= {f"exit_{exit_layer}/{key}_{name}": value for key, value in of_exit.model_dump().items()}
        tracker.log_document(facts.model_dump(mode="json", by_alias=True), f"{work.path(exit_layer).stem}.json")
    tracker.log_figures(figures, {"exits": ",".join(map(str, distilled.facts))})


def _training_texts(work: Distillation, limit: TimeLimit, progress: Progress) -> list[GeneratedText]:
    """Return the training texts, as many as the limit leaves time for."""
    plan, before = work.training_texts, limit.spent
    may_go_on = limit.allows_text(MIN_TRAINING_TOKENS)
    texts = _texts(work, plan, "generating training texts", MIN_TRAINING_TOKENS, progress, may_go_on)
    limit.count_stored(texts, limit.spent - before)
    if len(texts) < (planned := len(plan.prompts) * plan.samples):
        progress.say(f"trained on {len(texts)} of {planned} texts, to keep within the time of the distillation")
    return texts


def _texts(
    work: Distillation,
    plan: TextPlan,
    stage: str,
    min_tokens: int,
    progress: Progress,
    may_go_on: Callable[[Sequence[GeneratedText]], bool] = lambda texts: True,
) -> list[GeneratedText]:
    """Return the texts of a plan, stored or newly generated.

    Each identity has its own folder, so texts never mix.
    """
    identity = plan.identity(work.model, work.target.dtype)
    progress.stage(stage, len(plan.prompts) * plan.samples)
    folder = work.folder / "texts" / hash_json(identity)[:12]
    texts = generate_texts(work.target, plan, folder, progress.advance, may_go_on)
    if (num_tokens := num_response_tokens(texts)) < min_tokens:
        raise DistillationError(
            f"too little text: {len(plan.prompts)} prompts gave {num_tokens} tokens, and at least {min_tokens} are "
            "needed; give more prompts or more response tokens"
        )
    return texts


def _open_tracker(work: Distillation, exits: Sequence[int], config: SearchConfig) -> Tracker:
    settings = work.settings.model_dump(mode="json", exclude={"exit_layers", "temperature"})
    return Tracker.open(
        config.tracking_uri,
        config.resolved_experiment(),
        run_id=None,
        params={
            **config.model_dump(mode="json", include=set(PROMPT_SETTINGS)),
            **settings,
            "exit_layers": compact_indices(tuple(exits)),
            "writing_temperature": work.settings.temperature,
            "decoding_temperature": work.temperature,
            "device_name": device_name(work.target.device),
            "precision": str(work.target.dtype),
            "git_revision": git_revision(Path(__file__).parent),
            **{f"version.{package}": version for package, version in versions().items()},
        },
        dataset=DatasetInput(name=config.dataset, fingerprint=work.prompts.fingerprint, source=config.dataset),
        kind="distill",
        identity=hash_json({**work.identity, "exits": list(exits), "folder": str(work.folder.resolve())}),
    )
