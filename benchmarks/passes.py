"""What do single passes and rounds cost?

  widths     a pass of the whole model by its number of positions, with each runner in turns
  readiness  the first sequence of a new candidate against its second, with the static runner
  contexts   rounds of the draft of --profile after short and long contexts, in plain passes after the same context

Contexts may be longer than the model was made for, if its rotary embedding can be extended: the output is then meaningless, but
costs what it would. So acceptance is not reported; rounds of a given length are compared.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.results import show, write
from benchmarks.task import arguments
from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.deploy import load_decoder
from decoding.draft_length import Fixed
from decoding.drafters.build import build_drafter
from decoding.drafts import LayerSkip
from decoding.head_folder import HeadFolder
from decoding.memory import without_garbage_collection
from decoding.profile import DraftProfile
from decoding.runners import RUNNERS
from decoding.target import Target
from decoding.text import Ending
from decoding.timing.passes import Stopwatch
from decoding.timing.round_costs import measure_round_costs
from studies.ratios import paired_interval
from tuner.errors import ConfigError
from tuner.inputs.models import load
from tuner.results import public_name

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
"""Positions of a pass."""
CONTEXT = 256
"""Tokens in the cache before each pass."""
PROMPT_TOKENS, NEW_TOKENS, DRAFTED = 64, 32, 4
LENGTHS = (1, 2, 4, 8)
"""Drafted tokens of the rounds that are compared."""


@torch.inference_mode()
def time_widths(targets: Mapping[str, Target], *, num_sweeps: int, seed: int) -> list[dict[str, Any]]:
    """Time passes of each width after `CONTEXT` random tokens, runner by runner in turns; return a row per runner and width.

    A first sweep, which makes passes ready, is not counted. Each pass runs twice and the second run counts: it finds caches as
    decoding would.
    """
    any_target = next(iter(targets.values()))
    length = CONTEXT + max(WIDTHS)
    stream = torch.Generator().manual_seed(seed)
    ids = torch.randint(any_target.config.vocab_size, (1, length), generator=stream).to(any_target.device)
    caches = {name: target.new_cache(length) for name, target in targets.items()}
    for name, target in targets.items():
        target.forward(ids[:, :CONTEXT], caches[name], 0, last_only=True)
    watch = Stopwatch(any_target.device)
    taken: dict[str, dict[int, list[float]]] = {name: {width: [] for width in WIDTHS} for name in targets}

    def seconds(name: str, width: int) -> float:
        given = ids[:, CONTEXT : CONTEXT + width]
        return [watch.time(lambda: targets[name].forward(given, caches[name], CONTEXT)) for _ in range(2)][-1]

    with without_garbage_collection():
        for sweep in range(num_sweeps + 1):
            for width in WIDTHS:
                for name in targets:
                    found = seconds(name, width)
                    if sweep:
                        taken[name][width].append(found)

    def ratio(found: Sequence[float], reference: Sequence[float]) -> str:
        return f"{paired_interval(np.array(found), np.array(reference)):.2f}"

    return [
        {
            "runner": name,
            "positions": width,
            "ms": 1000 * statistics.median(found),
            "over one position": ratio(found, by_width[1]),
            "over eager": ratio(found, taken["eager"][width]),
        }
        for name, by_width in taken.items()
        for width, found in by_width.items()
    ]


def time_readiness(target: Target, *, num_candidates: int, seed: int) -> list[dict[str, Any]]:
    """Time the first and the second sequence of random skip sets: the first candidate compiles for all."""
    stream, watch = random.Random(seed), Stopwatch(target.device)
    request = Request([stream.randrange(target.config.vocab_size) for _ in range(PROMPT_TOKENS)], Ending(NEW_TOKENS))
    rows = []
    for _ in range(num_candidates):
        attention, mlp = (sorted(stream.sample(range(target.num_layers), target.num_layers // 3)) for _ in range(2))
        skip = LayerSkip(skip_attention=tuple(attention), skip_mlp=tuple(mlp))
        decoders: list[Decoder] = []

        def write_first(skip: LayerSkip = skip, decoders: list[Decoder] = decoders) -> None:
            decoders.append(Decoder(target, skip, Fixed(max_tokens=DRAFTED)))
            decoders[0].generate(request)

        first = watch.time(write_first)
        second = watch.time(lambda decoders=decoders: decoders[0].generate(request))  # type: ignore[misc]
        rows.append({"draft": skip.describe(), "first s": first, "second s": second, "switch s": first - second})
    return rows


def time_contexts(
    model: PreTrainedModel, path: Path, contexts: Sequence[int], *, max_tokens: int, seconds: float
) -> list[dict[str, Any]]:
    """Time rounds of the profile's draft after each context; `growth` is from the first to the last, over a plain pass."""
    profile = DraftProfile.load(path)
    target = load_decoder(profile, folder=path.parent).decoder_for(model).target
    drafter = build_drafter(target, profile.draft, profile.decoding, heads=HeadFolder(target, path.parent))
    if drafter is None:
        raise ConfigError("the profile decodes plainly: there are no rounds to compare")
    extend_positions(target, max(contexts) + 1 + max_tokens)
    costs = {
        context: measure_round_costs(target, drafter, max_tokens, prompt_length=context, budget_seconds=seconds)
        for context in contexts
    }
    rows = []
    for length in (length for length in LENGTHS if length <= max_tokens):
        rounds = {f"after {context}": each.of(length) for context, each in costs.items()}
        first, *_, last = rounds.values()
        rows.append({"drafted tokens": length, **rounds, "growth": last / first})
    return rows


def extend_positions(target: Target, positions: int) -> None:
    """Let the model run up to `positions`. Raises `ConfigError` for a position embedding that cannot be extended."""
    native = target.context_length
    if native is None or native >= positions:
        return
    parameters = getattr(target.config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "default":
        raise ConfigError(f"the model ends at {native} positions: give shorter --contexts")
    target.config.max_position_embeddings = positions


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--profile", type=Path)
    parser.add_argument(
        "--part", nargs="+", choices=("widths", "readiness", "contexts"), default=["widths", "readiness"]
    )
    parser.add_argument("--sweeps", type=int, default=24, help="timings of each width")
    parser.add_argument("--candidates", type=int, default=6, help="random skip sets to make ready")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--max-tokens", type=int, default=8, help="longest draft")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring after each context")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if (args.profile is None) == ("contexts" in args.part):
        parser.error("--part contexts and --profile belong together")
    model = load(args.model, dtype=args.dtype, device=args.device).model
    document: dict[str, Any] = {"model": public_name(args.model), "dtype": str(model.dtype)}
    for part in args.part:
        match part:
            case "widths":
                targets = {name: Target(model, name) for name in RUNNERS}
                rows = time_widths(targets, num_sweeps=args.sweeps, seed=args.seed)
            case "readiness":
                rows = time_readiness(Target(model, "static"), num_candidates=args.candidates, seed=args.seed)
            case _:
                sizes = {"max_tokens": args.max_tokens, "seconds": args.seconds}
                rows = time_contexts(model, args.profile, args.contexts, **sizes)
        document[part] = rows
        show(part, rows)
        write(args.json, document, device=model.device)


if __name__ == "__main__":
    main()
