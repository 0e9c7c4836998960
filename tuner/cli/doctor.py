"""`sdtune doctor`: what a model can do, found by running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from pydantic import Field
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from decoding.documents.strict_yaml import Document
from tuner.cli.options import GroupedCommand, options_of, settings_from
from tuner.cli.terminal import JSON, check_names, is_asked, print_facts, print_json
from tuner.config import FEWEST_SAMPLES, SearchConfig
from tuner.fields import Device, Dtype, Model, Revision
from tuner.tables import facts_grid

if TYPE_CHECKING:
    from decoding.probe import Capabilities


class DoctorSettings(Document):
    model: Model
    revision: Revision = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    prompt_tokens: int = Field(1024, ge=1, description="Tokens of the longest prompt, for the estimate of the memory.")
    max_new_tokens: int = Field(64, ge=2, description="Tokens to generate from each prompt, for the same.")
    batch_size: int = Field(1, ge=1, description="Prompts decoded in lockstep, for the same.")


@click.command(cls=GroupedCommand)
@options_of(DoctorSettings, positions=("model",))
@JSON
def doctor(**flags: Any) -> None:
    """Probe a model: which sublayers can be skipped, and can its cache be rolled back? Exit status 1 if it cannot be tuned.

    The memory that a search with the default study takes is estimated first, from the configuration of the model alone. A model
    whose weights do not fit is not loaded.
    """
    settings = settings_from(DoctorSettings, flags)
    check_names(model=settings.model, revision=settings.revision)

    from decoding.kernels.choice import kernels_on
    from decoding.probe import probe
    from tuner.inputs.models import load
    from tuner.search.memory_plan import memory_table, plan_memory

    plan = plan_memory(_search_of(settings))
    if not is_asked("json"):
        Console().print(memory_table(plan))
    plan.refuse_too_large(settings.model)
    loaded = load(settings.model, revision=settings.revision, dtype=settings.dtype, device=settings.device)
    found = probe(loaded.model)
    kernels = kernels_on(loaded.model.device, loaded.model.dtype)
    if is_asked("json"):
        chosen = {str(work): each.kernel for work, each in kernels.items()}
        print_json({**asdict(found), "is_supported": found.is_supported, "memory_bytes": plan.total, "kernels": chosen})
    else:
        Console().print(capabilities_panel(found))
        works = (f"{work}: {each.kernel or f'none, {each.reason}'}" for work, each in kernels.items())
        print_facts(Console(), kernels="; ".join(works))
    if not found.is_supported:
        click.get_current_context().exit(1)


def _search_of(settings: DoctorSettings) -> SearchConfig:
    """Return a search of the model with the default study, whose memory is estimated; no prompts are read."""
    needed = FEWEST_SAMPLES * settings.batch_size
    given = settings.model_dump(exclude={"prompt_tokens"})
    counts = {
        name: max(needed, SearchConfig.model_fields[name].default) for name in ("tuning_prompts", "held_out_prompts")
    }
    return SearchConfig(**given, **counts, dataset="none", max_prompt_tokens=settings.prompt_tokens)


def capabilities_panel(found: Capabilities) -> RenderableType:
    facts = facts_grid()
    facts.add_row(
        "model", f"{found.architecture}, {found.num_parameters / 1e6:.1f} M parameters, {found.dtype} on {found.device}"
    )
    if found.num_layers is not None:
        facts.add_row("blocks", _share(found.skippable_blocks, found.num_layers))
        facts.add_row("attention", _share(found.skippable_attention, found.num_layers))
        facts.add_row("MLP", _share(found.skippable_mlp, found.num_layers))
        facts.add_row("rollback", "the cache rolls back exactly")
        facts.add_row("prefix reuse", "yes" if found.prefix_reuse else "no: every verification runs the whole model")
    verdict = Text("can be tuned: speculative decoding gives the tokens of plain decoding", style="bold green")
    facts.add_row(
        "verdict", verdict if found.is_supported else Text(f"cannot be tuned: {found.refusal}", style="bold red")
    )
    return Panel(facts, title="sdtune doctor", title_align="left")


def _share(layers: Sequence[int], num_layers: int) -> str:
    from decoding.drafts import compact_indices

    if len(layers) == num_layers:
        return f"all {num_layers} can be skipped"
    return (
        f"{len(layers)} of {num_layers} can be skipped: {compact_indices(tuple(layers))}"
        if layers
        else "cannot be skipped"
    )
