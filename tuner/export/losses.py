"""`LOSSES.md`: what of a profile survives in an engine, what is lost, and what the draft costs there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from decoding.profile import DraftProfile
    from tuner.export.engines.contract import Engine
    from tuner.export.plan import Plan

LOSSES = "LOSSES.md"
MEBIBYTE = 2**20


Fate = tuple[str, str, str, str]
"""One part of a profile, what it is there, `kept`, `changed` or `lost`, and what it is in the engine."""


class Agreement(NamedTuple):
    """How often a draft's next token is the model's, on texts that the model has written."""

    as_tuned: float
    """With the target's keys and values, as sdtune decodes."""
    as_copied: float
    """With keys and values of the copy's own stack."""
    positions: int


@dataclass(frozen=True)
class DraftCost:
    """Memory that a draft model adds, and the proof that it is the profile's draft."""

    weight_bytes: int
    cache_bytes_per_token: float
    positions: int
    """Positions whose logits were compared, all with difference 0."""
    agreement: Agreement | None = None
    """None for a draft whose keys and values are the target's anyway."""


def losses_text(plan: Plan, engine: Engine, cost: DraftCost | None, dropped: Collection[str]) -> str:
    lines = [
        f"# {plan.profile.name} in {engine.title}",
        "",
        f"Settings for {engine.title} {engine.version}.",
        "",
        "| part | in the profile | | in the engine |",
        "|---|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells in _fates(plan, engine, dropped)),
        "",
        *_costs(plan, cost),
        *_speedup(plan, engine),
        *(["## In this engine", "", *(f"* {note}" for note in engine.notes(plan)), ""] if engine.notes(plan) else []),
        "## Lossless",
        "",
        f"Compare texts with {engine.title}'s own plain decoding, greedily. Plain texts of different engines may differ from one "
        "another where two tokens are nearly equal, so another engine's text is no reference.",
        "",
    ]
    return "\n".join(lines)


def _fates(plan: Plan, engine: Engine, dropped: Collection[str]) -> Iterator[Fate]:
    profile, draft = plan.profile, plan.profile.draft
    own = draft.having(lookup=None).describe()
    losses = tuple(_dropped_fates(profile, dropped))
    if plan.shape is not None:
        changed = bool(losses) or plan.bits is not None
        yield ("draft", own, "changed" if changed else "kept", plan.shape.describe())
    else:
        assert plan.lookup is not None, "a draft without a model is a lookup"
        assert draft.copying is not None, "likewise"
        same = (plan.lookup.automaton is None) == (draft.copying.ngram_lengths is not None)
        yield ("draft", own, "kept" if same else "changed", plan.lookup.describe())
    yield _rule_fate(plan)
    yield from losses
    if plan.bits is not None:
        yield ("draft's weights", f"int{plan.bits}", "changed", "quantised by the engine, rounded otherwise")
    first = draft.parts.lookup
    if first is not None:
        kept = plan.lookup is not None
        copied = f"first, {plan.lookup.describe()}, {first.max_tokens} tokens" if plan.lookup else "not tried"
        yield ("lookup before the draft", first.describe(), "changed" if kept else "lost", copied)
    if profile.decoding.prefix_reuse and draft.num_shared_blocks:
        blocks = f"resumes after {draft.num_shared_blocks} blocks"
        yield ("verification", blocks, "lost", "runs all blocks")
    if plan.shape is not None:
        yield (
            "weights, keys and values",
            "the target's, shared",
            "lost",
            "the draft's own, and its own pass over the prompt",
        )
    yield ("runner", profile.decoding.runner, "lost", "the engine's own")
    if profile.decoding.exact_width is not None:
        yield ("bit-exact mode", f"{profile.decoding.exact_width} positions", "lost", "none")
    yield from _schedule_fate(plan, engine)


def _rule_fate(plan: Plan) -> Fate:
    rule, length = plan.profile.draft_length, plan.length
    tokens = f"{length.num_tokens} tokens ({length.reason})"
    if plan.threshold is not None:
        return "draft length", rule.describe(), "kept", f"up to {tokens}, until one is below {plan.threshold:g}"
    if plan.measured_schedule is not None:
        return "draft length", rule.describe(), "changed" if rule.is_fixed else "lost", "by the schedule below"
    return "draft length", rule.describe(), "kept" if rule.is_fixed else "lost", f"always {tokens}"


def _dropped_fates(profile: DraftProfile, dropped: Collection[str]) -> Iterator[Fate]:
    draft = profile.draft
    if draft.parts.bits is not None and "bits" in dropped:
        yield ("draft's weights", f"int{draft.parts.bits}", "lost", "as in the model, as asked (--drop bits)")
    if draft.parts.ids_below is not None:
        yield (
            "choice of the draft",
            f"from ids below {draft.parts.ids_below:,} and the text's",
            "lost",
            "from all ids",
        )


def _schedule_fate(plan: Plan, engine: Engine) -> Iterator[Fate]:
    if plan.measured_schedule is not None:
        yield ("draft length by load", "one for all", "changed", plan.measured_schedule.describe())
    elif plan.schedule is not None:
        (_, last, tokens), *_ = plan.schedule
        written = f"{tokens} tokens up to {last} sequences" if engine.has_schedule else "the same for all batch sizes"
        yield ("batches", f"tuned on {last} sequences", "kept" if engine.has_schedule else "lost", written)


def _costs(plan: Plan, cost: DraftCost | None) -> list[str]:
    if plan.shape is None:
        return []
    if cost is None:
        made = f"The draft is a copy of the model, quantised by the engine to {plan.bits} bits."
        adds = "It adds the size of its file, and keys, values and a pass over the prompt of its own."
        return ["## Cost of the draft", "", f"{made} {adds}", ""]
    before = " before the engine quantises it" if plan.bits is not None else ""
    return [
        "## Cost of the draft",
        "",
        f"The draft model adds {cost.weight_bytes / MEBIBYTE:.1f} MiB of weights, with embeddings and LM head of its own, and "
        f"{cost.cache_bytes_per_token / 1024:.2f} KiB of keys and values per token, both in the precision of the export{before}.",
        "",
        f"It reads each prompt itself, with {len(plan.shape.sources)} layers beside the target's {plan.shape.num_target_layers}, "
        "before the first token.",
        "",
        *_own_keys(cost.agreement),
        f"Reloaded from disk by transformers, its logits are the profile's draft's, bit for bit, at {cost.positions} positions "
        "(max difference 0).",
        "",
    ]


def _own_keys(agreement: Agreement | None) -> list[str]:
    if agreement is None:
        return []
    return [
        "**Keys and values are computed by its own layers**, where the tuned draft reads the target's. On "
        f"{agreement.positions} tokens the next one is the model's at {agreement.as_copied:.0%}, and at "
        f"{agreement.as_tuned:.0%} as it was tuned: fewer drafts are accepted here. `sdtune search --deploy-to` rates such "
        "drafts as they run here, and vLLM with the plugin `sdtune-vllm` runs them as they were tuned.",
        "",
    ]


def _speedup(plan: Plan, engine: Engine) -> list[str]:
    measured, origin = plan.profile.measured, plan.profile.provenance
    measured_in = origin.engine if origin is not None else None
    if measured is not None and measured_in is not None and measured_in.name == engine.title:
        found = (
            f"Measured in {engine.title} {measured_in.version}: {measured.speedup} over its own plain decoding, on "
            f"{measured.exact.prompts} held-out prompts."
        )
        return ["## Speed-up", "", found, ""]
    if (schedule := plan.measured_schedule) is not None:
        found = (
            f"Measured in {schedule.engine} {schedule.engine_version} on {schedule.date}, all requests' tokens over wall clock, "
            "relative to its own plain decoding of the same prompts at the same number of sequences:"
        )
        return ["## Speed-up", "", found, "", *(f"* {line}" for line in schedule.measured()), ""]
    where = "sdtune's decoder" if measured_in is None else f"{measured_in.name} {measured_in.version}"
    here = f"Measured by {where}: {measured.speedup} over plain decoding. It does not transfer: " if measured else ""
    return ["## Speed-up", "", f"{here}measure it in {engine.title}.", ""]
