"""What a distillation trains, with what, on which prompts: planned and checked before anything is computed or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from decoding.errors import DistillationError, ExitHeadError
from decoding.exit_heads import HeadFacts, head_name, read_facts
from decoding.fingerprint import Fingerprint, fingerprint
from decoding.target import Target
from studies.space import default_exit_layers
from tuner.config import DistillSettings, SearchConfig
from tuner.fields import PromptSettings
from tuner.heads.checkpoint import differences
from tuner.heads.limits import DistillationTime, distillation_time, heads_that_fit
from tuner.heads.texts import TextPlan
from tuner.inputs.memory import ModelSize, free_bytes, refuse_too_large, size_of_checkpoint
from tuner.inputs.models import Loaded, load
from tuner.inputs.prompts import Prompt, PromptSet, load_prompts, search_prompts
from tuner.inputs.rows import open_rows
from tuner.measuring.baseline import measure_pulse
from tuner.output_paths import check_folder_writable
from tuner.progress import Progress

MIN_SPARE_PROMPTS = 32
"""With fewer spare prompts, the tuning prompts are trained on too."""
MOST_EVALUATED = 32
"""Most held-out prompts that the exits are evaluated on: more would cost the training its time."""


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

    @cached_property
    def exits(self) -> tuple[int, ...]:
        """Requested exit layers, or the default ones. Raises `DistillationError` if the model lacks one of them."""
        exits = self.settings.exit_layers or default_exit_layers(self.target.num_layers)
        if not exits:
            raise DistillationError(f"a model with {self.target.num_layers} layer has no exit to train a head for")
        for exit_layer in exits:
            try:
                self.target.check_exit_layer(exit_layer)
            except ValueError as cause:
                raise DistillationError(str(cause)) from None
        return exits

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
        return {**self.training_texts.identity(self.model, self.target.dtype), **decisive}

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def path(self, exit_layer: int) -> Path:
        return self.folder / head_name(exit_layer)

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


def prepare(config: SearchConfig, progress: Progress) -> Distillation:
    """Load model and prompts, and check all settings before any computation or output.

    Raises `MemoryShortageError`, before weights are read, for a model whose weights do not fit.
    """
    check_folder_writable(config.heads, what="exit heads", error=DistillationError)
    size = size_of_checkpoint(config.model, revision=config.revision, dtype=config.dtype, device=config.device)
    refuse_too_large(size, free_bytes(config.device), config.model)
    for exit_layer in config.distillation.exit_layers or ():
        if not 0 < exit_layer < size.num_layers:
            raise DistillationError(f"draft exits at layer {exit_layer}, but it must be 1 to {size.num_layers - 1}")
    rows = open_rows(config.dataset, config)
    progress.stage(f"loading {config.model}")
    loaded = load(config.model, revision=config.revision, dtype=config.dtype, device=config.device)
    target = Target(loaded.model)
    prompts = search_prompts(config, loaded.tokenizer, target.context_length, num_spare=num_spare(config), rows=rows)
    for note in prompts.notes:
        progress.say(note)
    return of_search(config, loaded, target, prompts, progress)


def expected_time(work: Distillation, exits: Sequence[int]) -> DistillationTime:
    prompts = work.training_texts.prompts
    pulse = measure_pulse(work.target, prompts, max_new_tokens=work.settings.response_tokens, num_sequences=1)
    return distillation_time(
        ModelSize.of(work.target.model),
        work.settings,
        pulse,
        num_heads=len(exits),
        heads_at_once=heads_at_once(work, len(exits)),
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
        kept |= {"preset", "template"}
    return PromptSettings(prompt_column=column, **config.model_dump(include=kept))


def heads_at_once(work: Distillation, num_exits: int) -> int:
    """Return how many heads are trained together: as configured, else as many as fit in the free memory."""
    longest = max(map(len, work.training_texts.prompts))
    at_once = work.settings.heads_at_once
    if at_once is None:
        device = next(work.target.blocks[-1].parameters()).device
        at_once = heads_that_fit(ModelSize.of(work.target.model), longest, work.settings, free_bytes(str(device)))
    return min(at_once or num_exits, num_exits)
