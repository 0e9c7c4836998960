"""The exit heads of a model, distilled once for all its searches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.config import SearchConfig
from tuner.evaluation.suite.configurations import configuration, wants_heads
from tuner.evaluation.suite.contract import CellSize, Place, hashed, settings_that_decide, training_settings
from tuner.evaluation.suite.result import HeadsFound
from tuner.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.inputs.prompts import Prompt, PromptSet

HEADS = "heads"


@dataclass(frozen=True)
class HeadsCell:
    """Distillation of the heads that any method wants. Heads that the folder has already are used as they are.

    No head is trained on a held-out prompt of any task. The training prompts are those of `distillation.training_dataset`, or
    else the rows of the tasks' data sets that are neither tuning nor held-out prompts.
    """

    place: Place
    model: str

    @property
    def id(self) -> str:
        """See `Cell.id`."""
        return f"{self.model}/{HEADS}"

    @property
    def precision(self) -> str:
        """Precision in which the heads are trained, the suite's first. Searches in all precisions share them."""
        return self.place.suite.precisions[0]

    @property
    def is_wanted(self) -> bool:
        """True if a method drafts with exit heads that may be distilled."""
        return any(map(wants_heads, self._searches()))

    def key(self) -> str:
        """See `Cell.key`."""
        decisive = [settings_that_decide(config) for config in (*self.task_configs(), *self._searches())]
        return hashed([decisive, training_settings(self.config())])

    def size(self) -> CellSize:
        """See `Cell.size`: texts are sampled in batches, each about as fast as a single one."""
        settings = self.config().distillation
        num_batches = -(-settings.prompts * settings.samples_per_prompt // settings.writing_batch_size)
        limit = settings.timeout
        return CellSize(num_batches * settings.response_tokens, seconds=limit or 0.0, is_limited=limit is not None)

    def config(self) -> SearchConfig:
        """See `Cell.config`."""
        return self.task_configs()[0]

    def run(self, progress: Progress) -> dict[str, Any]:
        """Distil the missing heads and return which exits have one."""
        from decoding.head_folder import HeadFolder
        from decoding.target import Target
        from tuner.heads.distill import distil_and_track, of_search
        from tuner.inputs.models import load

        config = self.config()
        progress.stage(f"loading {config.model}")
        loaded = load(config.model, revision=config.revision, dtype=config.dtype, device=config.device)
        target = Target(loaded.model)
        folder = HeadFolder(target, config.heads)
        wanted = self._wanted_exits(target.num_layers)
        prompts = self._prompts(loaded.tokenizer, target.context_length)
        if missing := folder.missing(wanted):
            distil_and_track(of_search(config, loaded, target, prompts, progress), missing, config, progress)
        folder.drafts(wanted, held_out=[prompt.token_ids for prompt in prompts.held_out])
        return HeadsFound(exits=wanted, seconds=folder.distillation_seconds(wanted)).model_dump(mode="json")

    def task_configs(self) -> list[SearchConfig]:
        """Return the configuration of each task, and of the data set for all tasks, without a method."""
        tasks = dict.fromkeys((*self.place.suite.tasks, *self.place.suite.searched_tasks))
        found = (configuration(self.place, self.model, self.precision, task) for task in tasks)
        return [config.model_copy(update={"experiment": f"{self.model}-heads"}) for config in found]

    def _searches(self) -> list[SearchConfig]:
        """Return the configuration of each method on the first task that it is searched on."""
        suite = self.place.suite
        task = suite.searched_tasks[0]
        return [configuration(self.place, self.model, self.precision, task, method) for method in suite.methods]

    def _wanted_exits(self, num_layers: int) -> tuple[int, ...]:
        settings = [config.study_settings(name) for config in self._searches() for name in config.study]
        return tuple(sorted({exit_layer for each in settings for exit_layer in each.wanted_heads(num_layers)}))

    def _prompts(self, tokenizer: Any, context_length: int | None) -> PromptSet:
        """Return the prompts of all tasks as one set; a prompt held out by one task is in no other part."""
        from tuner.heads.distill import num_spare
        from tuner.inputs.prompts import search_prompts

        tasks = self.task_configs()
        parts = [search_prompts(each, tokenizer, context_length, num_spare=num_spare(each)) for each in tasks]
        held_out = _each_once([prompt for part in parts for prompt in part.held_out])
        tuning = _each_once([prompt for part in parts for prompt in part.tuning], but_not=held_out)
        spare = _each_once([prompt for part in parts for prompt in part.spare], but_not=(*held_out, *tuning))
        return replace(parts[0], name="the tasks", tuning=tuning, held_out=held_out, spare=spare)


def _each_once(prompts: Sequence[Prompt], but_not: Sequence[Prompt] = ()) -> tuple[Prompt, ...]:
    """Return prompts with different tokens, in order, none of which is in `but_not`."""
    known = {prompt.token_ids for prompt in but_not}
    return tuple({prompt.token_ids: prompt for prompt in prompts if prompt.token_ids not in known}.values())
