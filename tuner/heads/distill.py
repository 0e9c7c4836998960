"""One distillation, from configuration to exit heads: texts by the target, training, figures, files.

Reads top to bottom in the order things happen. How texts are written, heads trained and exits judged stands in
`tuner.heads.training`. The command `sdtune distill` and a search that misses heads both run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryFile
from typing import Any

import torch

from decoding.documents.atomic_write import write_atomically
from decoding.drafts import compact_indices
from decoding.errors import DistillationError, ExitHeadError
from decoding.exit_heads import (
    ExitFigures,
    HeadFacts,
    HeadTraining,
    head_name,
    prompt_sha256,
    read_facts,
    save_exit_head,
)
from decoding.fingerprint import Fingerprint, fingerprint, hash_json
from decoding.target import Target
from studies.searches.exits import default_exit_layers
from tuner.config import DistillSettings, SearchConfig
from tuner.heads.checkpoint import OtherCheckpointError, differences, load_checkpoint, save_checkpoint
from tuner.heads.evaluation import Heads, evaluate
from tuner.heads.report import loss_curve_csv
from tuner.heads.texts import TextPlan, WrittenText, write_texts
from tuner.heads.training import Losses, Run, Student, train
from tuner.inputs.environment import device_name, git_revision, versions
from tuner.inputs.models import Loaded, load
from tuner.inputs.prompts import Prompt, PromptSet, load_prompts, search_prompts
from tuner.progress import Progress
from tuner.tracking import DatasetInput, Tracker

FEWEST_SPARE = 32
"""Prompts that are worth learning from without the tuning ones."""
FEWEST_TRAINING_TOKENS = 500
FEWEST_JUDGED_TOKENS = 50
CURVE = "training_curve.csv"
PROMPT_SETTINGS = (
    *("model", "revision", "dataset", "prompt_column", "group_column", "chat_template", "max_prompt_tokens"),
    *("tuning_prompts", "held_out_prompts", "max_new_tokens", "dtype", "seed"),
)
"""Keys of a search's configuration that a distillation heeds too."""

OnLosses = Callable[[int, Sequence[Losses]], None]
"""Told of steps that are done: how many there were before, and the losses of each."""


@dataclass(frozen=True)
class Distillation:
    """What is to be distilled: model and prompts, loaded, and how. Nothing is written yet."""

    loaded: Loaded
    target: Target
    prompts: PromptSet
    """Of the search; heads are judged on the held-out ones."""
    lessons: tuple[Prompt, ...]
    """The prompts that heads learn from."""
    settings: DistillSettings
    folder: Path
    """Where heads, texts and checkpoint lie."""
    seed: int
    temperature: float
    """Of decoding: the texts to judge on are written at it. Those to learn from have one of their own, in the settings."""

    @cached_property
    def exits(self) -> tuple[int, ...]:
        """The asked exits, or the usual ones. Raises `DistillationError` if the model does not have one of them."""
        exits = self.settings.exit_layers or default_exit_layers(self.target.num_layers)
        if not exits:
            raise DistillationError(f"a model of {self.target.num_layers} layer has no exit to train a head for")
        for exit_layer in exits:
            try:
                self.target.check_exit_layer(exit_layer)
            except ValueError as cause:
                raise DistillationError(str(cause)) from None
        return exits

    @cached_property
    def model(self) -> Fingerprint:
        """Which model it is."""
        return fingerprint(self.target.model)

    @cached_property
    def learning(self) -> TextPlan:
        """The texts to learn from."""
        settings = self.settings
        return TextPlan(
            prompts=tuple(prompt.token_ids for prompt in self.lessons),
            samples=settings.samples_per_prompt,
            temperature=settings.temperature,
            response_tokens=settings.response_tokens,
            batch_size=settings.writing_batch_size,
            seed=self.seed,
        )

    @cached_property
    def judging(self) -> TextPlan:
        """The texts to judge on: one behind each held-out prompt, as decoding will write it."""
        prompts = tuple(prompt.token_ids for prompt in self.prompts.held_out)
        return replace(self.learning, prompts=prompts, samples=1, temperature=self.temperature)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides the weights of a head: one of another identity is never taken for this distillation's."""
        decisive = self.settings.model_dump(include={"steps", "timeout", "batch_size", "learning_rate"})
        return {**self.learning.identity(self.model, self.target.dtype), **decisive}

    @property
    def checkpoint(self) -> Path:
        """Where the training lies while it is not finished."""
        return self.folder / "checkpoint.pt"

    def finished(self) -> dict[int, HeadFacts]:
        """What the files of those asked heads say that are there; `ExitHeadError` for one that is not of this distillation."""
        found = {}
        for exit_layer in self.exits:
            path = self.folder / head_name(exit_layer)
            if path.exists():
                facts = read_facts(path)
                known = facts.training.identity if facts.training else {}
                if differing := differences(known, self.identity):
                    raise ExitHeadError(
                        f"{path} was distilled with another {differing}: --overwrite replaces it, --out names another folder"
                    )
                found[exit_layer] = facts
        return found


@dataclass(frozen=True)
class Distilled:
    """What came of a distillation."""

    folder: Path
    facts: Mapping[int, HeadFacts]
    """What the file of each head says of it, figures included, by exit layer."""
    losses: Sequence[Losses]
    """Of every step."""
    writing_seconds: float
    training_seconds: float

    @property
    def heads(self) -> dict[int, Path]:
        """The files, by exit layer."""
        return {exit_layer: self.folder / head_name(exit_layer) for exit_layer in self.facts}


def prepare(config: SearchConfig, progress: Progress) -> Distillation:
    """Load model and prompts and check all that can be checked before anything is run or written."""
    check_folder(config.heads)
    progress.stage(f"loading {config.model}")
    loaded = load(config.model, revision=config.revision, dtype=config.dtype, device=config.device)
    target = Target(loaded.model)
    prompts = search_prompts(config, loaded.tokenizer, target.context_length, num_spare=num_spare(config))
    return of_search(config, loaded, target, prompts, progress)


def num_spare(config: SearchConfig) -> int:
    """How many spare rows of its dataset a distillation may ask for."""
    return 0 if config.distillation.training_dataset else config.distillation.prompts


def of_search(
    config: SearchConfig, loaded: Loaded, target: Target, prompts: PromptSet, progress: Progress
) -> Distillation:
    """The distillation for a search whose model and `prompts`, spare ones among them, are loaded."""
    lessons = _lessons(config, loaded, target, prompts, progress)
    return Distillation(
        loaded, target, prompts, lessons, config.distillation, config.heads, config.seed, config.temperature
    )


def _lessons(
    config: SearchConfig, loaded: Loaded, target: Target, prompts: PromptSet, progress: Progress
) -> tuple[Prompt, ...]:
    """Prompts to learn from: of a dataset of their own, or the spare ones; held-out ones never, tuning ones for want of others.

    A head is right more often behind prompts it has learnt from, and would win trials that it loses elsewhere.
    """
    settings = config.distillation
    if settings.training_dataset is not None:
        found = load_prompts(
            settings.training_dataset,
            loaded.tokenizer,
            num_tuning=1,
            num_held_out=0,
            num_spare=settings.prompts - 1,
            max_new_tokens=settings.response_tokens,
            context_length=target.context_length,
            seed=config.seed,
            prompt_column=settings.training_column,
            chat_template=config.chat_template,
            max_prompt_tokens=config.max_prompt_tokens,
        )
        known = {prompt.token_ids for prompt in (*prompts.tuning, *prompts.held_out)}
        return tuple(prompt for prompt in (*found.tuning, *found.spare) if prompt.token_ids not in known)
    if len(prompts.spare) >= FEWEST_SPARE:
        return prompts.spare[: settings.prompts]
    progress.say(
        f"{len(prompts.spare)} prompts are in neither part of {prompts.name}, too few to learn from: heads learn from the tuning "
        "prompts too, on which trials will flatter them; --training-dataset names a dataset for them"
    )
    return (*prompts.spare, *prompts.tuning)[: settings.prompts]


def check_folder(folder: Path) -> None:
    """Raise `DistillationError` if heads could not be written into `folder`, which need not exist yet."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise DistillationError(f"cannot write exit heads into {folder}: {existing} is a file; name a folder")
    try:
        with TemporaryFile(dir=existing):
            pass
    except OSError as cause:
        raise DistillationError(f"cannot write exit heads into {folder}: {cause.strerror}") from None


def distil(
    work: Distillation,
    exits: Sequence[int],
    progress: Progress,
    *,
    on_losses: OnLosses = lambda num_before, losses: None,
    overwrite: bool = False,
) -> Distilled:
    """Train heads for `exits` and put them into the folder, over those that are there.

    Texts and the last checkpoint of a run that was stopped are gone on with. Raises `DistillationError` if there is too little to
    learn from, the loss diverges, the folder cannot be used, or its checkpoint is of another distillation and not to be
    overwritten; `ExitHeadError` if a head cannot be written.
    """
    texts = _texts(work, work.learning, "writing texts to learn from", FEWEST_TRAINING_TOKENS, progress)
    unseen = _texts(work, work.judging, "writing texts to judge on", FEWEST_JUDGED_TOKENS, progress)
    before = _judge(work, dict.fromkeys(exits), unseen, "judging the exits without heads", progress)
    run = _train(work, exits, texts, progress, on_losses, overwrite)
    heads = {exit_layer: student.stored_head() for exit_layer, student in run.students.items()}
    after = _judge(work, heads, unseen, "judging the exits with their heads", progress)
    writing_seconds = sum(text.seconds for text in (*texts, *unseen))
    facts = {}
    for exit_layer, head in heads.items():
        cost = writing_seconds + run.seconds
        facts[exit_layer] = _facts(work, exit_layer, texts, run.step, cost, before[exit_layer], after[exit_layer])
        save_exit_head(work.folder / head_name(exit_layer), head.to(torch.bfloat16), facts[exit_layer])
    curve = loss_curve_csv(run.losses).encode()
    write_atomically(work.folder / CURVE, curve, what="the training curve", error=DistillationError)
    work.checkpoint.unlink(missing_ok=True)
    return Distilled(work.folder, facts, run.losses, writing_seconds, run.seconds)


def distil_and_track(
    work: Distillation, exits: Sequence[int], config: SearchConfig, progress: Progress, *, overwrite: bool = False
) -> Distilled:
    """`distil`, with an MLflow run that has the settings, the losses and the figures, and that a stopped run goes on with."""
    tracker = _open_tracker(work, exits, config)
    try:
        distilled = distil(work, exits, progress, on_losses=partial(log_losses, tracker), overwrite=overwrite)
        log_distilled(tracker, distilled)
    except KeyboardInterrupt:
        tracker.close("KILLED")
        raise
    except BaseException:
        tracker.close("FAILED")
        raise
    tracker.close("FINISHED")
    return distilled


def log_losses(tracker: Tracker, num_before: int, losses: Sequence[Losses]) -> None:
    """The losses of some steps, a curve an exit."""
    tracker.log_history(
        {
            step: {f"exit_{exit_layer}/loss": loss for exit_layer, loss in of_step.items()}
            for step, of_step in enumerate(losses, start=num_before + 1)
        }
    )


def log_distilled(tracker: Tracker, distilled: Distilled) -> None:
    """The figures of each exit, what the heads' files say, and the losses as a table."""
    figures = {"writing_seconds": distilled.writing_seconds, "training_seconds": distilled.training_seconds}
    for exit_layer, facts in distilled.facts.items():
        assert facts.training is not None, "the head of a distillation says how it was trained"
        for name, of_exit in (("without_head", facts.training.before), ("with_head", facts.training.after)):
            figures |= {f"exit_{exit_layer}/{key}_{name}": value for key, value in of_exit.model_dump().items()}
        tracker.log_document(facts.model_dump(mode="json", by_alias=True), f"exit_head_{exit_layer}.json")
    tracker.log_figures(figures, {"exits": ",".join(map(str, distilled.facts))})
    tracker.log_artifact(distilled.folder / CURVE)


def _texts(
    work: Distillation, writing: TextPlan, stage: str, fewest_tokens: int, progress: Progress
) -> list[WrittenText]:
    """Write the texts, or read those that are there; each identity has a file of its own, so none is lost or mixed."""
    identity = writing.identity(work.model, work.target.dtype)
    progress.stage(stage, len(writing.prompts) * writing.samples)
    path = work.folder / "texts" / f"{hash_json(identity)[:12]}.jsonl"
    texts = write_texts(work.target, writing, path, identity, progress.advance)
    if (num_tokens := _num_tokens(texts)) < fewest_tokens:
        raise DistillationError(
            f"too little text: {num_tokens} tokens behind {len(writing.prompts)} prompts, and at least {fewest_tokens} are "
            "needed; give more prompts, or more response tokens"
        )
    return texts


def _judge(
    work: Distillation, heads: Heads, texts: Sequence[WrittenText], stage: str, progress: Progress
) -> dict[int, ExitFigures]:
    progress.stage(stage, len(texts))
    return evaluate(work.target, heads, texts, work.settings.batch_size, progress.advance)


def _train(
    work: Distillation,
    exits: Sequence[int],
    texts: Sequence[WrittenText],
    progress: Progress,
    on_losses: OnLosses,
    overwrite: bool,
) -> Run:
    """Train the heads to the end, from the checkpoint on if there is one."""
    run = Run({exit_layer: Student(work.target) for exit_layer in exits})
    progress.stage(f"training {len(exits)} heads", work.settings.steps)
    if work.checkpoint.exists():
        _resume(run, work, progress, overwrite)
    num_told = run.step

    def keep() -> None:
        nonlocal num_told
        progress.advance()
        progress.show(f"loss {fmean(run.losses[-1].values()):.3f}")
        if run.step % work.settings.checkpoint_every == 0 or run.progress(work.settings) >= 1:
            on_losses(num_told, run.losses[num_told:])
            save_checkpoint(run, work.identity, work.checkpoint)
            mean = fmean(loss for losses in run.losses[num_told:] for loss in losses.values())
            progress.say(f"step {run.step}: loss {mean:.3f} nats a token, mean of {len(exits)} exits")
            num_told = run.step

    train(run, work.target, texts, work.settings, work.seed, keep)
    return run


def _resume(run: Run, work: Distillation, progress: Progress, overwrite: bool) -> None:
    """Go on from the checkpoint; one of another distillation is refused, or passed over to be overwritten."""
    try:
        load_checkpoint(run, work.identity, work.checkpoint)
    except OtherCheckpointError:
        if not overwrite:
            raise
        return
    progress.say(f"going on behind step {run.step} of a distillation that was stopped")
    progress.advance(run.step)


def _facts(
    work: Distillation,
    exit_layer: int,
    texts: Sequence[WrittenText],
    steps: int,
    seconds: float,
    before: ExitFigures,
    after: ExitFigures,
) -> HeadFacts:
    """What the file of a head says of it."""
    training = HeadTraining(
        model=work.loaded.name,
        dataset=work.settings.training_dataset or work.prompts.name,
        prompts_sha256=tuple(prompt_sha256(prompt) for prompt in work.learning.prompts),
        num_texts=len(texts),
        num_tokens=_num_tokens(texts),
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


def _num_tokens(texts: Sequence[WrittenText]) -> int:
    return sum(len(text.response) for text in texts)


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
