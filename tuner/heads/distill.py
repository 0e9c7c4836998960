"""Distillation from configuration to trained heads: training texts, training, evaluation, files.

Both `sdtune distill` and a search with missing heads run it. Texts are generated in `tuner.heads.texts`, heads are trained in
`tuner.heads.training`, exits are evaluated in `tuner.heads.evaluation`, and `tuner.heads.kinds` has what differs between kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from decoding.drafts import compact_indices
from decoding.errors import DistillationError, ExitHeadError
from decoding.exit_heads import (
    HeadFacts,
    read_facts,
)
from decoding.fingerprint import Fingerprint, fingerprint, hash_json
from decoding.target import Target
from tuner.config import DistillSettings, SearchConfig
from tuner.fields import DATA_FIELDS, PromptSettings
from tuner.heads.checkpoint import differences, stored_exits
from tuner.heads.group import GroupData
from tuner.heads.head_files import CURVE, HeadFiles, num_response_tokens
from tuner.heads.here import OnLosses, TrainerHere
from tuner.heads.kinds import HEAD_KINDS, HeadKind
from tuner.heads.memory import heads_that_fit
from tuner.heads.texts import GeneratedText, TextPlan, generate_texts
from tuner.heads.time_limit import TimeLimit
from tuner.heads.time_plan import DistillationTime, distillation_time
from tuner.heads.training import Losses
from tuner.heads.vocabulary import draft_vocabulary_size
from tuner.inputs.environment import device_name, git_revision, versions
from tuner.inputs.memory import ModelSize, explained_shortage, free_bytes, refuse_too_large, size_of_checkpoint
from tuner.inputs.models import Loaded, load
from tuner.inputs.prompts import Prompt, PromptSet, load_prompts, search_prompts
from tuner.inputs.rows import open_rows
from tuner.measuring.baseline import measure_pulse
from tuner.output_paths import check_folder_writable
from tuner.progress import Progress
from tuner.tracking import DatasetInput, Tracker

MIN_SPARE_PROMPTS = 32
"""With fewer spare prompts, the tuning prompts are trained on too."""
MIN_TRAINING_TOKENS = 500
MIN_EVALUATION_TOKENS = 50
MOST_EVALUATED = 32
"""Most held-out prompts that the exits are evaluated on: more would cost the training its time."""
PROMPT_SETTINGS = (
    *("model", "revision", *DATA_FIELDS),
    *("tuning_prompts", "held_out_prompts", "max_new_tokens", "dtype", "seed"),
)
"""Keys of the search configuration that a distillation uses too."""

_LESS_TO_TRAIN = "give a lower distillation.heads_at_once, batch_size or response_tokens; finished heads stay"


@dataclass(frozen=True)
class Distillation:
    """Planned distillation: loaded model and prompts, and its settings. Creating one writes nothing."""

    loaded: Loaded
    target: Target
    prompts: PromptSet
    """Prompts of the search; exits are evaluated on the held-out ones."""
    training_prompts: tuple[Prompt, ...]
    settings: DistillSettings
    folder: Path
    """Folder of the heads, the texts and the checkpoint."""
    seed: int
    temperature: float
    """Decoding temperature, used for evaluation texts. `settings.temperature` is used for training texts."""
    most_seconds: float | None = None
    """Limit of this run on the whole distillation, beside the one of the settings; no part of the heads' identity."""

    @property
    def kind(self) -> HeadKind:
        return HEAD_KINDS[self.settings.head]

    @cached_property
    def exits(self) -> tuple[int, ...]:
        """Requested exit layers, or the default ones; for a feature head the number of blocks.

        Raises `DistillationError` if the model lacks one of them.
        """
        return self.kind.layers(self.settings, self.target)

    @cached_property
    def model(self) -> Fingerprint:
        return fingerprint(self.target.model)

    @cached_property
    def training_texts(self) -> TextPlan:
        settings = self.settings
        return TextPlan(
            prompts=tuple(prompt.token_ids[-settings.prompt_tokens :] for prompt in self.training_prompts),
            samples=settings.samples_per_prompt,
            temperature=settings.temperature,
            response_tokens=settings.response_tokens,
            batch_size=settings.writing_batch_size,
            seed=self.seed,
        )

    @cached_property
    def evaluation_texts(self) -> TextPlan:
        """Plan of the evaluation texts: one for each of some held-out prompts, evenly spread, at the decoding temperature."""
        held_out = self.prompts.held_out
        count = min(len(held_out), MOST_EVALUATED)
        prompts = tuple(held_out[index * len(held_out) // count].token_ids for index in range(count))
        return replace(self.training_texts, prompts=prompts, samples=1, temperature=self.temperature)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the weights of a head.

        A stored head of another identity is never reused.
        """
        decisive = self.settings.model_dump(include={"steps", "timeout", "batch_size", "learning_rate"})
        decisive["draft_vocabulary"] = draft_vocabulary_size(self.target, self.settings)
        decisive |= self.kind.decisive(self.settings)
        return {**self.training_texts.identity(self.model, self.target.dtype), **decisive}

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def path(self, layer: int) -> Path:
        return self.folder / self.kind.file_name(layer)

    def finished(self) -> dict[int, HeadFacts]:
        """Return the facts of the requested heads that exist already, by exit layer.

        Raises `ExitHeadError` for a head of another distillation.
        """
        found = {}
        for exit_layer in self.exits:
            path = self.path(exit_layer)
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
    heads: Mapping[int, Path]
    """Paths of the head files, by exit layer."""
    folder: Path
    facts: Mapping[int, HeadFacts]
    """Facts stored in each head's file, figures included, by exit layer."""
    losses: Sequence[Losses]
    """One entry per step."""
    writing_seconds: float
    training_seconds: float


def prepare(config: SearchConfig, progress: Progress) -> Distillation:
    """Load model and prompts, and check all settings before any computation or output.

    Raises `MemoryShortageError`, before weights are read, for a model whose weights do not fit.
    """
    check_folder_writable(config.heads, what="exit heads", error=DistillationError)
    size = size_of_checkpoint(config.model, revision=config.revision, dtype=config.dtype, device=config.device)
    refuse_too_large(size, free_bytes(config.device), config.model)
    rows = open_rows(config.dataset, config)
    progress.stage(f"loading {config.model}")
    loaded = load(config.model, revision=config.revision, dtype=config.dtype, device=config.device)
    target = Target(loaded.model)
    prompts = search_prompts(config, loaded.tokenizer, target.context_length, num_spare=num_spare(config), rows=rows)
    for note in prompts.notes:
        progress.say(note)
    return of_search(config, loaded, target, prompts, progress)


def expected_time(work: Distillation, exits: Sequence[int]) -> DistillationTime:
    """Return the estimated time of distilling heads for `exits`, from a moment of plain decoding."""
    prompts = work.training_texts.prompts
    pulse = measure_pulse(work.target, prompts, max_new_tokens=work.settings.response_tokens, num_sequences=1)
    return distillation_time(
        ModelSize.of(work.target.model),
        work.settings,
        pulse,
        num_heads=len(exits),
        heads_at_once=_heads_at_once(work, len(exits)),
        num_prompts=len(prompts),
        prompt_tokens=fmean(map(len, prompts)),
        num_evaluated=min(len(work.prompts.held_out), MOST_EVALUATED),
    )


def num_spare(config: SearchConfig) -> int:
    """Return the maximum number of spare prompts to draw from the search's dataset."""
    return 0 if config.distillation.training_dataset else config.distillation.prompts


def of_search(
    config: SearchConfig, loaded: Loaded, target: Target, prompts: PromptSet, progress: Progress
) -> Distillation:
    """Return the distillation for a search; `prompts` must include its spare prompts."""
    training_prompts = _training_prompts(config, loaded, target, prompts, progress)
    return Distillation(
        loaded, target, prompts, training_prompts, config.distillation, config.heads, config.seed, config.temperature
    )


def num_training_prompts(config: SearchConfig, prompts: PromptSet) -> int:
    """Return how many training prompts a distillation for a search uses; at most, if they come from a dataset of their own."""
    settings = config.distillation
    if settings.training_dataset is not None:
        return settings.prompts
    spare = len(prompts.spare)
    return min(settings.prompts, spare if spare >= MIN_SPARE_PROMPTS else spare + len(prompts.tuning))


def _training_prompts(
    config: SearchConfig, loaded: Loaded, target: Target, prompts: PromptSet, progress: Progress
) -> tuple[Prompt, ...]:
    """Return the prompts of the training dataset, or the spare prompts of the search.

    Held-out prompts are never used. Tuning prompts are used only if there are too few spare ones: a head does better on
    prompts that it was trained on, and would win trials that it loses on other prompts.
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
            settings=_training_format(config),
        )
        for note in found.notes:
            progress.say(f"training dataset: {note}")
        known = {prompt.token_ids for prompt in (*prompts.tuning, *prompts.held_out)}
        return tuple(prompt for prompt in (*found.tuning, *found.spare) if prompt.token_ids not in known)
    if len(prompts.spare) >= MIN_SPARE_PROMPTS:
        return prompts.spare[: settings.prompts]
    progress.say(
        f"only {len(prompts.spare)} spare prompts in {prompts.name}: heads are trained on the tuning prompts too, so trials will "
        "overrate them; --training-dataset names a separate dataset"
    )
    return (*prompts.spare, *prompts.tuning)[: settings.prompts]


def _training_format(config: SearchConfig) -> PromptSettings:
    """Return the format of the training dataset: the search's template, unless a column is named; no groups, no categories."""
    column = config.distillation.training_column
    kept = {"chat_template", "max_prompt_tokens", "system_prompt"}
    if column is None:
        kept |= {"preset", "template", "shots", "answer_template", "shots_dataset"}
    return PromptSettings(prompt_column=column, **config.model_dump(include=kept))


def distil(
    work: Distillation,
    exits: Sequence[int],
    progress: Progress,
    *,
    on_losses: OnLosses = lambda num_before, losses: None,
    overwrite: bool = False,
) -> Distilled:
    """Train heads for `exits` and write them into the folder, replacing existing ones.

    As many heads as fit in the memory are trained together, group after group. A head is the
    same in any group and place, unless a time limit ends its training. The limit covers texts, training and evaluation: texts get
    at most `WRITING_SHARE` of it, each group its share of the rest, and the learning-rate schedule is compressed to fit. A stopped
    run resumes from its texts, its finished heads and its last checkpoint, a group that an earlier run finished does not
    count. Raises `DistillationError` if there is too little training text, the loss diverges, the
    folder cannot be used, or the checkpoint belongs to another distillation and `overwrite` is false. Raises `ExitHeadError` if a
    head cannot be written.
    """
    limit = TimeLimit.least_of(work.settings.timeout, work.most_seconds)
    texts = _training_texts(work, limit, progress)
    unseen = _texts(work, work.evaluation_texts, "generating evaluation texts", MIN_EVALUATION_TOKENS, progress)
    data = GroupData(work.settings, work.seed, texts, unseen)
    evaluated = limit.spent
    untrained = dict.fromkeys(exits, work.kind.before(work.target))
    progress.stage("evaluating without trained heads", len(unseen))
    before = data.evaluate(work.target, untrained, progress.advance)
    evaluated = limit.spent - evaluated
    files = HeadFiles(work, data, exits, before)
    trainer = TrainerHere(work.target, data, work.checkpoint, work.identity, progress, on_losses, overwrite)
    files.run(_groups(work, exits, progress), trainer, limit, evaluated)
    facts = {exit_layer: files.facts[exit_layer] for exit_layer in exits}
    paths = {layer: work.path(layer) for layer in facts}
    return Distilled(paths, work.folder, facts, files.losses, data.writing_seconds, files.training_seconds)


def _groups(work: Distillation, exits: Sequence[int], progress: Progress) -> list[tuple[int, ...]]:
    """Return the exits in groups that are trained together: those of a checkpoint, which stay together, then the others."""
    at_once = _heads_at_once(work, len(exits))
    if at_once < len(exits):
        progress.say(
            f"{len(exits)} heads are trained {at_once} at a time, to fit in the memory (distillation.heads_at_once)"
        )
    begun = stored_exits(work.checkpoint) if work.checkpoint.exists() else frozenset()
    parts = [[layer for layer in exits if layer in begun], [layer for layer in exits if layer not in begun]]
    return [tuple(part[first : first + at_once]) for part in parts for first in range(0, len(part), at_once)]


def _heads_at_once(work: Distillation, num_exits: int) -> int:
    """Return how many heads are trained together: as configured, else as many as fit in the free memory."""
    longest = max(map(len, work.training_texts.prompts))
    at_once = work.settings.heads_at_once
    if at_once is None:
        device = next(work.target.blocks[-1].parameters()).device
        at_once = heads_that_fit(ModelSize.of(work.target.model), longest, work.settings, free_bytes(str(device)))
    return min(at_once or num_exits, num_exits)


def distil_and_track(
    work: Distillation, exits: Sequence[int], config: SearchConfig, progress: Progress, *, overwrite: bool = False
) -> Distilled:
    """Run `distil` and track settings, losses and figures in MLflow.

    A resumed distillation reuses its MLflow run.
    """
    tracker = _open_tracker(work, exits, config)
    try:
        with explained_shortage(f"distilling {work.kind.noun}", _LESS_TO_TRAIN):
            distilled = distil(
                work,
                exits,
                progress,
                on_losses=partial(log_losses, tracker),
                overwrite=overwrite,
            )
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
    """Log the losses of some steps, as one curve per exit."""
    tracker.log_history(
        {
            step: {f"exit_{exit_layer}/loss": loss for exit_layer, loss in of_step.items()}
            for step, of_step in enumerate(losses, start=num_before + 1)
        }
    )


def log_distilled(tracker: Tracker, distilled: Distilled) -> None:
    """Log each exit's figures, each head's facts, and the table of losses."""
    figures = {"writing_seconds": distilled.writing_seconds, "training_seconds": distilled.training_seconds}
    for exit_layer, facts in distilled.facts.items():
        assert facts.training is not None, "a distilled head records its training"
        for name, of_exit in (("without_head", facts.training.before), ("with_head", facts.training.after)):
            figures |= {f"exit_{exit_layer}/{key}_{name}": value for key, value in of_exit.model_dump().items()}
        tracker.log_document(facts.model_dump(mode="json", by_alias=True), f"{distilled.heads[exit_layer].stem}.json")
    tracker.log_figures(figures, {"exits": ",".join(map(str, distilled.facts))})
    tracker.log_artifact(distilled.folder / CURVE)


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

    Each identity has its own file, so texts never mix.
    """
    identity = plan.identity(work.model, work.target.dtype)
    progress.stage(stage, len(plan.prompts) * plan.samples)
    path = work.folder / "texts" / f"{hash_json(identity)[:12]}.jsonl"
    texts = generate_texts(work.target, plan, path, identity, progress.advance, may_go_on)
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
