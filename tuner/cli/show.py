"""`sdtune show`: a profile, or the trained heads in a folder, on one screen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from decoding.drafts import LayerSkip
from decoding.profile import DraftProfile, EndToEndFigures, Measured, ProfileOrigin
from tuner.cli.terminal import JSON, is_asked, print_facts, print_json
from tuner.fields import local_profile
from tuner.tables import facts_grid, figures_table, spaced

if TYPE_CHECKING:
    from decoding.exit_heads import HeadFacts

STRIP_WIDTH = 40
"""Layers per line of the strip of skipped layers."""


@click.command()
@click.argument("path", metavar="PROFILE|DIR", type=click.Path(path_type=Path))
@JSON
def show(path: Path) -> None:
    """Show a profile on one screen: draft, draft-length rule and measured speed-up. Or the trained heads in a folder."""
    path = local_profile(path)
    if path.is_dir():
        _show_heads(path)
    elif is_asked("json"):
        print_json(DraftProfile.load(path).model_dump(mode="json", by_alias=True))
    else:
        from tuner.export.engines.vllm import native_command

        profile = DraftProfile.load(path)
        Console().print(profile_panel(profile))
        print_facts(Console(), vllm=native_command(profile, path))


def _show_heads(folder: Path) -> None:
    from decoding.head_folder import list_heads

    exits = list_heads(folder)
    if is_asked("json"):
        print_json([facts.model_dump(mode="json") for facts in exits.values()])
    else:
        Console().print(exits_table(exits))


def exits_table(facts: Mapping[int, HeadFacts]) -> Table:
    """Return a table of exits: acceptance and agreement without and with a head."""
    title = "Exits on held-out prompts, without and with a head"
    table = figures_table(title, "exit", *("acceptance", "with head", "agreement", "with head"))
    for exit_layer, of_head in facts.items():
        if of_head.training is not None:
            before, after = of_head.training.before, of_head.training.after
            figures = (before.acceptance, after.acceptance, before.agreement, after.agreement)
            table.add_row(str(exit_layer), *(f"{figure:.3f}" for figure in figures))
    return table


def profile_panel(profile: DraftProfile) -> RenderableType:
    from tuner.review.shipping import shipping

    facts = facts_grid()
    _add_draft(facts, profile)
    facts.add_row("verdict", Text(shipping(profile), style="bold"))
    if profile.measured is not None:
        _add_figures(facts, profile.measured)
    else:
        reason = "not confirmed on held-out prompts" if profile.draft.drafts else "nothing beat plain decoding"
        facts.add_row("measured", reason)
    if profile.provenance is not None:
        _add_origin(facts, profile.provenance)
    return Panel(facts, title=Text(profile.name), title_align="left")


def _add_draft(facts: Table, profile: DraftProfile) -> None:
    target, decoding = profile.target, profile.decoding
    facts.add_row("target", f"{target.model}, {target.architecture}, {target.num_layers} layers, {target.dtype}")
    facts.add_row("draft", spaced(profile.draft.describe()))
    if profile.draft.runs_model:
        facts.add_row("", _strip(profile.draft.skipped(target.num_layers), target.num_layers))
    for name in profile.draft.files:
        facts.add_row("head", name)
    if profile.draft.drafts:
        facts.add_row("stops", profile.draft_length.describe())
    mode = "" if decoding.exact_width is None else f", bit-exact on {decoding.exact_width} positions"
    facts.add_row("decoding", f"temperature {decoding.temperature:g}, runner {decoding.runner}{mode}")


def _add_figures(facts: Table, measured: Measured) -> None:
    low, high = measured.speedup.ci95
    rates, exact, data, cost = measured.tokens_per_second, measured.exact, measured.dataset, measured.search
    speedup = f"{measured.speedup.value:.2f}x, 95 % interval {low:.2f} to {high:.2f}"
    facts.add_row("speed-up", Text(f"{speedup}, of decoding", style="bold"))
    if measured.noise:
        facts.add_row("noise", "; ".join(measured.noise))
    per_round = f"{measured.mean_acceptance_length or measured.tokens_per_round:.2f} tokens a round"
    facts.add_row("rates", f"{rates.draft:.1f} tokens/s, plain {rates.plain:.1f}; {per_round}")
    if measured.end_to_end is not None:
        _add_end_to_end(facts, measured.end_to_end)
    for name, figures in measured.categories.items():
        whole = "" if figures.end_to_end_speedup is None else f"; end to end {figures.end_to_end_speedup}"
        facts.add_row(name, f"{figures.speedup}{whole}, {figures.prompts} prompts")
    for name, against in measured.stock.items():
        facts.add_row(f"over {name}", f"{against.profile_over_it} times its decoding speed, {against.prompts} prompts")
    if measured.batch_size > 1:
        batch = f"{measured.batch_size} prompts in lockstep, also for plain decoding; rates are per batch"
        facts.add_row("batch", batch)
    facts.add_row("accepted", f"{measured.draft_acceptance_rate:.0%} of the drafted tokens")
    identical = f"{exact.identical} of {exact.prompts} held-out prompts identical"
    facts.add_row("exact", f"{identical}, {exact.ties} numerical ties")
    held_out = f"{exact.prompts} of {data.held_out_prompts} held out measured"
    sizes = f"{data.tuning_prompts} tuning, {held_out}, {data.max_new_tokens} tokens"
    if measured.confirmations > 1:
        facts.add_row("confirmed", f"as winner number {measured.confirmations} on the same held-out prompts")
    facts.add_row("data", f"{data.name}: {sizes}")
    heads = f"; {cost.distillation_seconds:.0f} s to distil exit heads" if cost.distillation_seconds else ""
    facts.add_row("search", f"{cost.trials} trials, {cost.seconds:.0f} s{heads}")
    facts.add_row("device", measured.device)
    facts.add_row("versions", ", ".join(f"{name} {version}" for name, version in measured.versions.items()))


def _add_end_to_end(facts: Table, figures: EndToEndFigures) -> None:
    low, high = figures.speedup.ci95
    rates, first = figures.tokens_per_second, figures.time_to_first_token_seconds
    speedup = f"{figures.speedup.value:.2f}x, 95 % interval {low:.2f} to {high:.2f}"
    facts.add_row("end to end", f"{speedup}; {rates.draft:.1f} tokens/s, plain {rates.plain:.1f}")
    facts.add_row("first token", f"after {first.draft * 1000:.1f} ms, plain {first.plain * 1000:.1f}")


def _add_origin(facts: Table, origin: ProfileOrigin) -> None:
    facts.add_row("created", f"{origin.created} by {origin.study}")
    if origin.origin is not None:
        facts.add_row("proposed by", spaced(origin.origin))
    if origin.engine is not None:
        facts.add_row("measured in", f"{origin.engine.name} {origin.engine.version}")
    sources = {"git revision": origin.git_revision, "MLflow run": origin.mlflow_run_id}
    if known := [f"{name} {value}" for name, value in sources.items() if value]:
        facts.add_row("from", ", ".join(known))


def _strip(draft: LayerSkip, num_layers: int) -> RenderableType:
    """Return one character per layer: `#` kept, `.` skipped, attention above MLP, below a scale of layer indices."""
    lines = []
    for start in range(0, num_layers, STRIP_WIDTH):
        layers = range(start, min(start + STRIP_WIDTH, num_layers))
        lines.append(Text(f"{'layer':>9} " + "".join(f"{layer:<5}" for layer in layers[::5]).rstrip(), style="dim"))
        for name, skipped in (("attention", draft.skip_attention), ("MLP", draft.skip_mlp)):
            marks = "".join("." if layer in skipped else "#" for layer in layers)
            line = Text(f"{name:>9} {marks}")
            line.highlight_regex(r"\.+", "yellow")
            lines.append(line)
    return Group(*lines, Text(f"{'':>10}# runs in the draft, . is skipped", style="dim"))
