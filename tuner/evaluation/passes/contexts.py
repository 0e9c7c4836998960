"""Growth of rounds with the context, relative to plain passes after the same context: both attend to what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from transformers import PreTrainedModel

from decoding.deploy import load_decoder
from decoding.draft_length import RoundCosts
from decoding.drafters.build import build_drafter
from decoding.drafters.contract import Drafter
from decoding.head_folder import HeadFolder
from decoding.profile import DraftProfile
from decoding.target import Target
from decoding.timing.round_costs import measure_round_costs
from tuner.errors import ConfigError
from tuner.tables import figures_table

if TYPE_CHECKING:
    from tuner.evaluation.passes.settings import PassesEvaluation

LENGTHS = (1, 2, 4, 8)
"""Drafted tokens of the rounds that are compared."""


@dataclass(frozen=True)
class AtContext:
    """Costs of rounds after `context` tokens, in plain passes after the same context."""

    context: int
    costs: RoundCosts

    def rounds(self, lengths: Sequence[int]) -> dict[int, float]:
        """Return the cost of a round by its number of drafted tokens."""
        return {length: self.costs.of(length) for length in lengths}


def measure(model: PreTrainedModel, profile: DraftProfile, settings: PassesEvaluation) -> dict[str, Any]:
    """Measure rounds after each context. Raises `ConfigError` for a profile that decodes plainly."""
    assert settings.profile is not None, "the profile was loaded from it"
    folder = settings.profile.parent
    target = load_decoder(profile, folder=folder).decoder_for(model).target
    drafter = build_drafter(target, profile.draft, profile.decoding, heads=HeadFolder(target, folder))
    if drafter is None:
        raise ConfigError("the profile decodes plainly: there are no rounds to compare")
    native_positions = extend_positions(target, max(settings.contexts) + 1 + settings.max_tokens)
    lengths = [length for length in LENGTHS if length <= settings.max_tokens]
    measured = measure_growth(
        target, drafter, settings.contexts, max_tokens=settings.max_tokens, budget_seconds=settings.seconds
    )
    return {
        "draft": profile.draft.describe(),
        "runner": profile.decoding.runner,
        "native_positions": native_positions,
        "rounds_in_plain_passes": {str(each.context): each.rounds(lengths) for each in measured},
        "costs": [{**asdict(each), "costs": each.costs.model_dump(mode="json")} for each in measured],
        "growth": growth(measured, lengths),
    }


def measure_growth(
    target: Target, drafter: Drafter, contexts: Sequence[int], *, max_tokens: int, budget_seconds: float
) -> list[AtContext]:
    """Measure rounds of up to `max_tokens` tokens after each context, for `budget_seconds` each."""
    return [
        AtContext(
            context,
            measure_round_costs(target, drafter, max_tokens, prompt_length=context, budget_seconds=budget_seconds),
        )
        for context in contexts
    ]


def growth(measured: Sequence[AtContext], lengths: Sequence[int]) -> dict[int, float]:
    """Return by drafted tokens how a round grows from the first context to the last, relative to a plain pass; 1 is equal."""
    first, last = measured[0].rounds(lengths), measured[-1].rounds(lengths)
    return {length: last[length] / first[length] for length in lengths}


def extend_positions(target: Target, positions: int) -> int | None:
    """Let the model run up to `positions`; return its native number of positions if that is smaller, else None.

    Raises `ConfigError` for a model whose position embedding cannot be extended.
    """
    native = target.context_length
    if native is None or native >= positions:
        return None
    parameters = getattr(target.config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "default":
        raise ConfigError(f"the model ends at {native} positions: give shorter --contexts")
    target.config.max_position_embeddings = positions
    return native


def show(measured: Mapping[str, Any]) -> RenderableType:
    """Return the table of rounds by context and length."""
    rounds = measured["rounds_in_plain_passes"]
    table = figures_table(
        f"Rounds in plain passes after the same context: {measured['draft']}", "drafted tokens", *rounds, "growth"
    )
    for length, ratio in measured["growth"].items():
        table.add_row(str(length), *(f"{costs[length]:.2f}" for costs in rounds.values()), f"{ratio:.3f}")
    return table
