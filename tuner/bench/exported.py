"""A profile's export for transformers as a contender: what `sdtune export --to hf` gives, inside `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from tuner.contest.stock_generation import DRAFTING_SETTINGS, StockGeneration
from tuner.export.engines.hf import Transformers
from tuner.export.run import export
from tuner.export.settings import ExportSettings
from tuner.inputs.models import quiet
from tuner.prompt_settings import PromptSettings

if TYPE_CHECKING:
    from tuner.bench.config import BenchConfig
    from tuner.bench.task import BenchTask
    from tuner.contest.contest import Contender
    from tuner.progress import Progress

TRANSFORMERS = "hf"


class AssistedGeneration(StockGeneration):
    """`model.generate(..., assistant_model=...)`: another model drafts, by its own generation settings."""

    def __init__(self, model: PreTrainedModel, assistant: PreTrainedModel, eos_token_ids: frozenset[int]) -> None:
        num_layers = assistant.config.get_text_config().num_hidden_layers
        description = f"generate(assistant_model=...), the profile's export, {num_layers} layers"
        super().__init__(model, eos_token_ids, description, {"assistant_model": assistant})
        self._assistant = assistant

    @property
    def settings(self) -> Mapping[str, Any]:
        """The drafting settings of the assistant, which are those that `generate` follows."""
        own = self._assistant.generation_config
        return {"assistant": {name: getattr(own, name, None) for name in DRAFTING_SETTINGS}}


def export_settings(config: BenchConfig, to: str, out: Path) -> ExportSettings:
    """Return the settings that export a bench's profile to the engine `to`, with the prompts of the bench."""
    return ExportSettings(
        profile=config.profile,
        to=to,
        out=out,
        overwrite=True,
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        prompts=config.dataset,
        tuning_prompts=config.tuning_prompts,
        held_out_prompts=config.held_out_prompts,
        seed=config.seed,
        **{name: getattr(config, name) for name in PromptSettings.model_fields},
    )


def exported_generation(task: BenchTask, progress: Progress) -> Contender:
    """Return `generate` with the profile's export for transformers: a draft model, or a prompt lookup.

    Raises `ExportError` for a profile that has no counterpart there.
    """
    model, eos = task.loaded.model, task.eos_token_ids
    with TemporaryDirectory(prefix="sdtune-export-") as work:
        out = Path(work) / "export"
        plan = export(export_settings(task.config, TRANSFORMERS, out), progress, loaded=task.loaded).plan
        assert plan is not None, "an engine's export has a plan"
        if not plan.needs_draft_folder:
            options = Transformers().lookup_settings(plan)
            described = ", ".join(f"{name}={value}" for name, value in options.items())
            return StockGeneration(model, eos, f"generate({described}), the profile's export", options)
        with quiet():  # the weights are read before the folder goes
            assistant = AutoModelForCausalLM.from_pretrained(plan.draft, dtype=model.dtype, trust_remote_code=False)
    return AssistedGeneration(model, assistant.to(model.device).eval(), eos)
