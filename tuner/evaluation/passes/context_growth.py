"""How the cost of a profile's rounds grows with the context, beside that of plain decoding: both are attention over what was read.

Run as `python -m tuner.evaluation.passes.context_growth --profile profile.yaml --contexts 512 4096 --out growth.json`.

Contexts may be longer than the model was made for, where its rotary embedding goes on: such texts mean nothing, and cost what
they would. So nothing is said of how many drafts are accepted there, and rounds of a given length are compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from decoding.deploy import load_decoder
from decoding.draft_length import RoundCosts
from decoding.drafters.build import build_drafter
from decoding.drafters.contract import Drafter
from decoding.exit_heads import ExitHeads
from decoding.profile import DraftProfile
from decoding.target import Target
from decoding.timing.round_costs import measure_round_costs
from tuner.errors import ConfigError
from tuner.inputs.environment import device_name, versions
from tuner.inputs.models import load

LENGTHS = (1, 2, 4, 8)
"""Drafted tokens of the rounds that are compared."""


@dataclass(frozen=True)
class AtContext:
    """Costs of rounds behind a context, in plain passes behind the same."""

    context: int
    costs: RoundCosts

    def rounds(self, lengths: Sequence[int]) -> dict[int, float]:
        """By drafted tokens."""
        return {length: self.costs.of(length) for length in lengths}


def measure_growth(
    target: Target, drafter: Drafter, contexts: Sequence[int], *, max_tokens: int, budget_seconds: float
) -> list[AtContext]:
    """Rounds of up to `max_tokens` tokens behind each of `contexts`, each for `budget_seconds`."""
    return [
        AtContext(
            context,
            measure_round_costs(target, drafter, max_tokens, prompt_length=context, budget_seconds=budget_seconds),
        )
        for context in contexts
    ]


def growth(measured: Sequence[AtContext], lengths: Sequence[int]) -> dict[int, float]:
    """By drafted tokens: how much more a round grows from the first context to the last than a plain pass does; 1 is as much."""
    first, last = measured[0].rounds(lengths), measured[-1].rounds(lengths)
    return {length: last[length] / first[length] for length in lengths}


def reach_as_far(target: Target, positions: int) -> int | None:
    """Let the model go as far as `positions`; how far it was made for, if that is less.

    Raises `ConfigError` for a model whose positions do not go on.
    """
    made_for = target.context_length
    if made_for is None or made_for >= positions:
        return None
    parameters = getattr(target.config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "default":
        raise ConfigError(f"the model ends at {made_for} positions: give shorter --contexts")
    target.config.max_position_embeddings = positions
    return made_for


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--model", help="if it lies elsewhere than the profile says")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--max-tokens", type=int, default=max(LENGTHS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring behind each context")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    document = run(arguments)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for length, ratio in document["growth"].items():
        print(f"a round of {length} drafts grows {ratio:.3f} times as much as a plain pass")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and say all that matters of it."""
    profile = DraftProfile.load(arguments.profile)
    loaded = load(arguments.model or profile.target.model, dtype=profile.target.dtype, device=arguments.device)
    target = load_decoder(profile, folder=arguments.profile.parent).decoder_for(loaded.model).target
    heads = ExitHeads(target, arguments.profile.parent)
    drafter = build_drafter(target, profile.draft, profile.decoding, heads=heads)
    if drafter is None:
        raise ConfigError("the profile decodes plainly: there are no rounds to compare")
    made_for = reach_as_far(target, max(arguments.contexts) + 1 + arguments.max_tokens)
    lengths = [length for length in LENGTHS if length <= arguments.max_tokens]
    measured = measure_growth(
        target, drafter, arguments.contexts, max_tokens=arguments.max_tokens, budget_seconds=arguments.seconds
    )
    return {
        "model": profile.target.model,
        "draft": profile.draft.describe(),
        "runner": profile.decoding.runner,
        "dtype": profile.target.dtype,
        "device": device_name(target.device),
        "versions": versions(),
        "made_for_positions": made_for,
        "rounds_in_plain_passes": {str(each.context): each.rounds(lengths) for each in measured},
        "costs": [{**asdict(each), "costs": each.costs.model_dump(mode="json")} for each in measured],
        "growth": growth(measured, lengths),
    }


if __name__ == "__main__":
    main()
