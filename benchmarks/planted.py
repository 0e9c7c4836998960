"""Do the searches find redundancy that was planted in random models, whose best setting is known?

Decoding is real, and so is acceptance. Seconds come from a fixed table of made-up costs, as the best of a thousand noisy timings
would not be the best setting: the figures check the searches, they are not speed-ups. Four parts, each of which 0 leaves out:

  blocks      12 blocks: `joint` (or --searches) against the best of all sets of inner blocks
  precisions  10 blocks: `joint` against the best of all sets in 16, 8 and 4 bits, whose prices and agreement are planted
  large       the share of planted sublayers that the best proposal skips, by prediction alone
  rivals      candidates that `joint` decodes until it has what TPE and random search in the same space have after their budget

An exhaustive search takes minutes. Optima that the JSON file already holds are not searched again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import optuna
import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.planted_model import in_blocks, plant, planted, prompts
from benchmarks.results import show, write
from benchmarks.task import arguments
from decoding.draft_length import Fixed, RoundCosts
from decoding.drafts import BitWidth, Draft, LayerSkip
from decoding.kernels.quantised import TiledLinear
from decoding.profile import Decoding
from decoding.rounds import Round
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate, Problem, TrialRecord, TrialState, best_trials
from studies.costs.table import CostTable
from studies.costs.terms import DraftStep, Pass
from studies.prediction.predictor import Predictor
from studies.prediction.proposals import Proposals
from studies.prediction.survey import Survey
from studies.samplers import load_sampler
from studies.space import SkipSpace
from tuner.measuring.baseline import Baseline, decode_baseline
from tuner.measuring.contender import PriceList
from tuner.measuring.cost_table import Timer, measure_cost_table
from tuner.measuring.paired import Bench
from tuner.search.objective import Trials
from tuner.search.storage import StudyStore, sqlite_url

MAX_TOKENS = 4
NUM_PROMPTS, PROMPT_LENGTH, NUM_TOKENS = 3, 16, 24
DECODING = Decoding(prefix_reuse=False)
ENDS, WIDENING = 2.0, 0.05
"""Cost of a pass beside its sublayers, in sublayers; cost of each further verified token, in passes."""
BLOCKS, PRECISIONS = (12, 4, 2), (10, 3, 2)
"""Blocks, redundant and grey ones. With precisions they are fewer, as every set of blocks is decoded in every precision."""
PRICES: Mapping[BitWidth, tuple[float, float]] = MappingProxyType({8: (0.5, 0.95), 4: (0.35, 0.6)})
"""Range of the cost of a draft step in each precision, over the same step with the model's own weights."""
GRID = 4
"""Bits of the grid on which the weights of every other problem lie: there drafts in 4 bits agree as those in 8 bits do."""
RIVALS = ("tpe", "random")
ENOUGH, LITTLE, EARLY = 0.98, 0.03, 0.1
"""Share of the best speed-up that a search should reach, of the exhaustive search's evaluations that it may use for that, and of a
rival's evaluations within which it should have what the rival found."""
NUM_REFINED = 20
"""Number of best sets of the exhaustive search that are tried at every draft length."""


@dataclass(frozen=True)
class PlantedProblem:
    """A planted model with a bench that charges the prices of `table` for every round."""

    seed: int
    target: Target
    table: CostTable
    bench: Bench

    def in_lockstep(self) -> Bench:
        """Return a bench of the same prompts as one batch: the same prices in less time, as sequences share passes."""
        return _bench(self.target, self.table, replace(self.bench.baseline, batch_size=NUM_PROMPTS), self.seed)


def new_problem(model: PreTrainedModel, seed: int, prices: Mapping[BitWidth, float]) -> PlantedProblem:
    """Decode the prompts of this seed plainly and open the bench."""
    target = Target(model)
    table = measure_cost_table(
        target,
        max_tokens=MAX_TOKENS,
        contexts=(PROMPT_LENGTH, PROMPT_LENGTH + NUM_TOKENS),
        bits=tuple(prices),
        timer=_timer(target, prices),
    )
    baseline = decode_baseline(target, prompts(NUM_PROMPTS, PROMPT_LENGTH, seed), Ending(NUM_TOKENS))
    return PlantedProblem(seed, target, table, _bench(target, table, baseline, seed))


def _bench(target: Target, table: CostTable, baseline: Baseline, seed: int) -> Bench:
    @cache
    def costs_of(draft: Draft) -> RoundCosts:
        part = draft.skipped(target.num_layers) if draft.runs_model else LayerSkip()
        return table.round_costs(part, MAX_TOKENS, context=PROMPT_LENGTH + NUM_TOKENS / 2, prefix_reuse=False)

    def price(draft: Draft, record: Round) -> float:
        """Return the plain passes that a round costs; the whole target verifies copied tokens."""
        if not draft.drafts:
            return 1.0
        costs = costs_of(draft)
        verification = (costs_of(LayerSkip()) if record.looked_up else costs).verify_cost(record.num_drafted)
        return verification if record.looked_up else verification + record.num_drafted * costs.draft_step

    return Bench(target, baseline, decoding=DECODING, seed=seed, clock=PriceList(price))


def _timer(target: Target, prices: Mapping[BitWidth, float]) -> Timer:
    """Return made-up seconds of a pass: 1 for a plain one, less for skipped sublayers, more for further tokens."""
    whole = ENDS + 2 * target.num_layers

    def seconds(each: Pass) -> float:
        if isinstance(each, DraftStep):
            share = 1.0 - (len(each.skip.skip_attention) + len(each.skip.skip_mlp)) / whole
            return share if each.skip.bits is None else share * prices[each.skip.bits]
        return 1.0 + WIDENING * (each.width - 1)

    return seconds


def blocks_problem(seed: int, sizes: tuple[int, int, int] = BLOCKS) -> PlantedProblem:
    """Return a problem whose redundant and grey blocks lie between the first and the last one."""
    return new_problem(_planted_blocks(sizes, seed), seed, {})


def precisions_problem(seed: int, sizes: tuple[int, int, int] = PRECISIONS) -> PlantedProblem:
    """Return a problem whose drafts may be in 8 or 4 bits, at prices drawn by the seed.

    How often quantised drafts agree is planted too: weights of odd seeds lie on a grid of 4 bits, so that both precisions agree
    alike; those of even seeds do not, and 4 bits agree seldom.
    """
    model = _planted_blocks(sizes, seed)
    if seed % 2:
        _put_on_grid(model)
    stream = random.Random(f"prices/{seed}")
    return new_problem(model, seed, {bits: round(stream.uniform(*ends), 3) for bits, ends in PRICES.items()})


def _planted_blocks(sizes: tuple[int, int, int], seed: int) -> PreTrainedModel:
    num_layers, num_redundant, num_grey = sizes
    inner = list(range(1, num_layers - 1))
    random.Random(f"blocks/{seed}").shuffle(inner)
    redundant, grey = inner[:num_redundant], inner[num_redundant : num_redundant + num_grey]
    return plant(num_layers, in_blocks(redundant), in_blocks(grey), seed=seed)


@torch.no_grad()
def _put_on_grid(model: PreTrainedModel) -> None:
    """Round the weights of all linear layers to those of a quantised draft of `GRID` bits."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(TiledLinear(layer.weight, GRID, None)(torch.eye(layer.in_features)).t())


def run_search(name: str, problem: PlantedProblem, **settings: Any) -> tuple[float, list[TrialRecord]]:
    """Run a search to its end on whole blocks and all precisions with a price; return the best speed-up and its evaluations.

    Evaluations are the candidates that it decoded: repeated ones once, and without plain decoding, which needs no search.
    """
    given = {"max_tokens": MAX_TOKENS, "whole_blocks": True, **settings}
    if problem.table.bits:
        given["bits"] = problem.table.bits
    bench = problem.bench
    made = load_sampler(name)
    asked = made.Settings.model_validate(given)
    sampler = made(
        Problem(
            problem.target,
            bench.prompts,
            bench.continuations,
            earlier={},
            seed=problem.seed,
            decoding=DECODING,
            costs=lambda max_tokens: problem.table,
        ),
        asked,
    )
    with TemporaryDirectory() as folder:
        stored = StudyStore(sqlite_url(Path(folder) / "trials.db"), "planted").open(sampler, {})
        most, patience = asked.max_trials, asked.idle_limit
        records, _ = Trials(sampler, stored, bench, bench.indices, most=most, patience=patience).run()
    best = best_trials(records, 1, expected=sampler.expected())
    decoded = [each for each in records if each.repeat_of is None and each.candidate.draft.drafts]
    return (best[0].speedup or 0.0) if best else 0.0, decoded


def exhaustive(problem: PlantedProblem) -> tuple[float, int]:
    """Decode with all sets of inner blocks in all precisions, and return the best speed-up and the number of candidates.

    All sets are tried at the longest draft; the `NUM_REFINED` best of them at every length.
    """
    inner = range(1, problem.target.num_layers - 1)
    chosen = (blocks for size in range(1, len(inner) + 1) for blocks in combinations(inner, size))
    sets = [LayerSkip.blocks(blocks) for blocks in chosen]
    sets += [skip.having(bits=bits) for bits in problem.table.bits for skip in (LayerSkip(), *sets)]
    bench = problem.in_lockstep()

    def speedup(skip: LayerSkip, length: int) -> float:
        return bench.measure(Candidate(draft=skip, draft_length=Fixed(max_tokens=length)), bench.indices).speedup

    found = {skip: speedup(skip, MAX_TOKENS) for skip in sets}
    refined = sorted(sets, key=lambda skip: -found[skip])[:NUM_REFINED]
    others = [speedup(skip, length) for skip in refined for length in range(1, MAX_TOKENS)]
    return max([*found.values(), *others]), len(found) + len(others)


def against_the_best(
    kind: str, seed: int, problem: PlantedProblem, searches: Iterable[str], best: float, num_candidates: int
) -> list[dict[str, Any]]:
    """Return a row per search: its share of the best speed-up, and of the exhaustive search's evaluations."""
    rows = []
    for name in searches:
        speedup, decoded = run_search(name, problem, rules=("fixed",))
        share, effort = speedup / best, len(decoded) / num_candidates
        row = {"problem": kind, "seed": seed, "search": name, "speed-up": speedup, "best": best, "share": share}
        row |= {"evaluations": len(decoded), "of all": effort}
        rows.append({**row, "enough": share >= ENOUGH and effort <= LITTLE})
    return rows


def recovered(num_layers: int, seed: int) -> dict[str, Any]:
    """Return how many planted sublayers the best proposal skips; nothing is decoded with drafts."""
    known = planted(num_layers, seed=seed)
    problem = new_problem(known.model, seed, {})
    survey = Survey(problem.target, problem.bench.prompts, problem.bench.continuations)
    predictor = Predictor(survey, problem.table, max_tokens=MAX_TOKENS, decoding=DECODING)
    space = SkipSpace.of(problem.target)
    proposals, most = Proposals(space, predictor), max(160, 3 * len(space.items))
    for count, _ in enumerate(proposals.rate(), 1):
        if proposals.knows_items and count >= most:
            break
    best = proposals.best_first()[0]
    redundant, chosen = space.chosen(known.redundant), space.chosen(best.draft.skipped(num_layers))
    row = {"layers": num_layers, "seed": seed, "found": len(redundant & chosen), "of": len(redundant)}
    return {**row, "others": len(chosen - redundant), "drafts rated": predictor.num_drafts}


def speedups(decoded: Sequence[TrialRecord]) -> list[float]:
    """Return the speed-up of each decoded candidate; 0 for one that was pruned or failed."""
    return [(each.speedup or 0.0) if each.state is TrialState.COMPLETE else 0.0 for each in decoded]


def evaluations_until(found: Sequence[float], speedup: float) -> int | None:
    """Return the number of evaluations after which `speedup` was reached, 0 for plain decoding's, None if never."""
    if speedup <= 1.0:
        return 0
    return next((count for count, each in enumerate(found, start=1) if each >= speedup), None)


def against_rivals(seed: int, num_trials: int, problem: PlantedProblem) -> list[dict[str, Any]]:
    """Return a row per rival: after how many evaluations `joint` had what the rival found in `num_trials` trials."""
    ours = speedups(run_search("joint", problem)[1])
    rows = []
    for name in RIVALS:
        theirs = speedups(run_search(name, problem, max_trials=num_trials)[1])
        best = max(1.0, *theirs)
        reached = evaluations_until(ours, best)
        share = None if reached is None else reached / len(theirs)
        row = {"seed": seed, "rival": name, "evaluations": len(theirs), "its best": best}
        row |= {"after": evaluations_until(theirs, best), "joint's best": max(1.0, *ours), "of": len(ours)}
        enough = share is not None and share <= EARLY
        rows.append({**row, "joint has it after": reached, "share": share, "enough": enough})
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=int, default=10, help="problems of this kind")
    parser.add_argument("--precisions", type=int, default=4)
    parser.add_argument("--large", type=int, default=2, help="problems of each size")
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 80], help="sizes of the large problems")
    parser.add_argument("--rivals", type=int, default=4)
    parser.add_argument("--rival-trials", type=int, default=100)
    parser.add_argument("--searches", nargs="+", default=["joint"], help="on problems of blocks")
    parser.add_argument(
        "--sizes", type=int, nargs=3, default=None, help="blocks, redundant and grey ones of small problems"
    )
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    document: dict[str, Any] = {"optima": {}, "small": [], "large": [], "rivals": []}
    if args.json and args.json.exists():
        document["optima"] = json.loads(args.json.read_text(encoding="utf-8"))["optima"]
    kinds: list[tuple[str, int, Callable[..., PlantedProblem], Any, Iterable[str]]] = [
        ("blocks", args.blocks, blocks_problem, BLOCKS, args.searches),
        ("precisions", args.precisions, precisions_problem, PRECISIONS, ("joint",)),
    ]
    for kind, count, new, usual, searches in kinds:
        sizes = tuple(args.sizes or usual)
        for seed in range(count):
            problem = new(seed, sizes)
            key = f"{kind} {seed} {sizes} torch {torch.__version__}"
            if key not in document["optima"]:
                document["optima"][key] = exhaustive(problem)
            document["small"] += against_the_best(kind, seed, problem, searches, *document["optima"][key])
            write(args.json, document, document["small"])
    show(f"Against the best of all sets: at least {ENOUGH:.0%} by {LITTLE:.0%} of the evaluations", document["small"])
    document["large"] = [recovered(size, seed) for size in args.layers for seed in range(args.large)]
    show("Planted sublayers left out by the best proposal (prediction alone)", document["large"])
    for seed in range(args.rivals):
        document["rivals"] += against_rivals(
            seed, args.rival_trials, precisions_problem(seed, tuple(args.sizes or PRECISIONS))
        )
        write(args.json, document, document["small"])
    show(f"Evaluations until the best: at most {EARLY:.0%} of the rival's", document["rivals"])
    write(args.json, document, document["small"])


if __name__ == "__main__":
    main()
