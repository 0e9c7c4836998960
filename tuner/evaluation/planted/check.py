"""Searches on models with planted redundancy, compared with the known optimum.

Decoding is real, and so is acceptance. Seconds come from a fixed table of made-up costs: the best of a thousand noisy timings would
not be the best setting. The figures check the searches; they are not speed-ups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType

import torch
from rich.console import Group
from rich.table import Table

from decoding.documents.atomic_write import write_atomically
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.target import Target
from studies.contract import Candidate
from studies.prediction.predictor import Predictor
from studies.prediction.proposals import propose_skip_sets
from studies.prediction.skip_space import SkipSpace
from studies.prediction.survey import Survey
from studies.searches.predicted import PredictedSettings
from studies.searches.registry import STUDIES
from tuner.errors import SearchError
from tuner.evaluation.planted.model import planted
from tuner.evaluation.planted.problem import (
    DECODING,
    ENDS,
    GRID,
    MAX_TOKENS,
    NUM_GREY,
    NUM_PROMPTS,
    NUM_REDUNDANT,
    NUM_TOKENS,
    PRECISE_GREY,
    PRECISE_LAYERS,
    PRECISE_REDUNDANT,
    PRICES,
    PROMPT_LENGTH,
    WIDENING,
    PlantedProblem,
    precision_problem,
    small_problem,
)
from tuner.evaluation.planted.rivals import Match, matches_table
from tuner.evaluation.planted.searching import run_search
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.results import stamped
from tuner.tables import figures_table

SEARCHES = tuple(name for name, entry in STUDIES.items() if issubclass(entry.load().Settings, PredictedSettings))
"""The studies that search by prediction."""
ENOUGH, LITTLE = 0.98, 0.03
"""Share of the best speed-up that a search should reach, and share of the exhaustive search's evaluations that it may use."""
NUM_REFINED = 20
"""Number of best sets of the exhaustive search that are tried at every draft length."""


BLOCKS, PRECISIONS = "blocks", "precisions"


@dataclass(frozen=True)
class SmallProblems:
    """A kind of small problem, whose best setting an exhaustive search can find."""

    title: str
    searches: tuple[str, ...]
    new: Callable[[int], PlantedProblem]
    """Returns the problem of a seed."""


PROBLEMS: Mapping[str, SmallProblems] = MappingProxyType(
    {
        BLOCKS: SmallProblems("12 blocks, against the best of all sets", SEARCHES, lambda seed: small_problem(seed)),
        PRECISIONS: SmallProblems(
            "10 blocks, against the best of all sets in 16, 8 and 4 bits",
            ("joint",),
            lambda seed: precision_problem(seed),
        ),
    }
)

_PROBLEM = {
    "max_tokens": MAX_TOKENS,
    "redundant": NUM_REDUNDANT,
    "grey": NUM_GREY,
    "prompts": [NUM_PROMPTS, PROMPT_LENGTH, NUM_TOKENS],
    "costs": [ENDS, WIDENING],
    "refined": NUM_REFINED,
    "precision": [
        PRECISE_LAYERS,
        PRECISE_REDUNDANT,
        PRECISE_GREY,
        GRID,
        {str(bits): list(ends) for bits, ends in PRICES.items()},
    ],
    "torch": torch.__version__,
}
"""Everything that the optimum of a seed depends on."""


@dataclass(frozen=True)
class Found:
    """Result of one search on the small problem, against the optimum."""

    seed: int
    search: str
    speedup: float
    best: float
    evaluations: int
    num_candidates: int
    """Number of candidates that the exhaustive search decoded with."""
    problem: str = BLOCKS
    """Kind of the problem, a key of `PROBLEMS`."""

    @property
    def share(self) -> float:
        """Speed-up found, as a share of the best."""
        return self.speedup / self.best

    @property
    def effort(self) -> float:
        """Evaluations used, as a share of the exhaustive search's."""
        return self.evaluations / self.num_candidates


@dataclass(frozen=True)
class Recovered:
    """Planted redundancy of a larger problem that the best proposal recovers."""

    num_layers: int
    seed: int
    planted: int
    recovered: int
    others: int
    """Number of skipped sublayers that were not planted."""
    drafts_rated: int


@dataclass(frozen=True)
class Optimum:
    """Best speed-up of the small problem of a seed, by exhaustive search."""

    seed: int
    best: float
    num_candidates: int
    problem: str = BLOCKS


FindOptimum = Callable[[PlantedProblem, Progress], Optimum]


def find_best_of_all(
    seeds: Iterable[int],
    progress: Progress,
    searches: Sequence[str] | None = None,
    *,
    kind: str = BLOCKS,
    optima: Sequence[Optimum] = (),
    on_optimum: Callable[[Optimum], None] = lambda optimum: None,
    find_optimum: FindOptimum | None = None,
) -> list[Found]:
    """Run each search on the small problems of a `kind`, against the best of every set of inner blocks in every precision.

    The exhaustive search takes minutes per seed: seeds in `optima` are not searched again, new optima go to `on_optimum`.
    """
    found = []
    find_optimum = find_optimum or exhaustive
    known = {optimum.seed: optimum for optimum in optima if optimum.problem == kind}
    for seed in seeds:
        problem = PROBLEMS[kind].new(seed)
        if (optimum := known.get(seed)) is None:
            optimum = replace(find_optimum(problem, progress), problem=kind)
            on_optimum(optimum)
        for name in PROBLEMS[kind].searches if searches is None else searches:
            speedup, evaluations = _search(name, problem, progress)
            found.append(Found(seed, name, speedup, optimum.best, evaluations, optimum.num_candidates, kind))
            progress.say(
                f"{kind}, seed {seed}: {name} found {found[-1].share:.1%} of the best in {evaluations} evaluations"
            )
    return found


def recover(sizes: Iterable[int], seeds: Sequence[int], progress: Progress) -> list[Recovered]:
    """Return how many planted sublayers the best proposal skips, for models of these sizes; nothing is decoded with drafts."""
    recovered = []
    for num_layers in sizes:
        for seed in seeds:
            known = planted(num_layers, seed=seed)
            progress.stage(f"{num_layers} layers, seed {seed}")
            problem = PlantedProblem.of(Target(known.model), seed)
            survey = Survey(problem.target, problem.bench.prompts, problem.bench.continuations)
            predictor = Predictor(survey, problem.table, max_tokens=MAX_TOKENS, decoding=DECODING)
            space = SkipSpace.of(problem.target)
            best = propose_skip_sets(space, predictor, max(160, 3 * len(space.items)))[0]
            redundant, chosen = space.chosen(known.redundant), space.chosen(best.draft.skipped(num_layers))
            found, others = len(redundant & chosen), len(chosen - redundant)
            recovered.append(Recovered(num_layers, seed, len(redundant), found, others, predictor.num_drafts))
    return recovered


def results_table(found: Sequence[Found], recovered: Sequence[Recovered], matches: Sequence[Match] = ()) -> Group:
    """Return a table of the searches on each kind of small problem, one of the larger problems, and one of the rivals."""
    kinds = dict.fromkeys(each.problem for each in found)
    small = [_small_table(kind, [each for each in found if each.problem == kind]) for kind in kinds]
    large = figures_table(
        "Planted sublayers left out by the best proposal (prediction alone)",
        "layers",
        "seed",
        "found",
        "of",
        "others",
        "drafts rated",
    )
    for size in recovered:
        row = (size.num_layers, size.seed, size.recovered, size.planted, size.others, size.drafts_rated)
        large.add_row(*map(str, row))
    return Group(*small, *([large] if recovered else []), *([matches_table(matches)] if matches else []))


def _small_table(kind: str, found: Sequence[Found]) -> Table:
    table = figures_table(
        f"{PROBLEMS[kind].title} (real decoding, priced by a table)",
        "search",
        "seeds",
        f"at {ENOUGH:.0%} of the best",
        "least found",
        "most evaluations",
    )
    for name in dict.fromkeys(each.search for each in found):
        runs = [each for each in found if each.search == name]
        enough = sum(each.share >= ENOUGH and each.effort <= LITTLE for each in runs)
        effort = max(each.effort for each in runs)
        least = min(each.share for each in runs)
        table.add_row(name, str(len(runs)), f"{enough} of {len(runs)}", f"{least:.1%}", f"{effort:.1%} of all")
    return table


def known_optima(path: Path) -> list[Optimum]:
    """Return the optima stored in a file of results for the same problems; none if there is no file.

    Raises SearchError if the file cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        optima = [Optimum(**each) for each in document["optima"]]
        return optima if document["problem"] == _PROBLEM else []
    except FileNotFoundError:
        return []
    except OSError as cause:
        raise SearchError(f"cannot read {path}: {cause.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise SearchError(
            f"{path} does not hold the results of `sdtune evaluate planted`: give another --out"
        ) from None


def write_results(
    found: Sequence[Found],
    recovered: Sequence[Recovered],
    path: Path,
    optima: Sequence[Optimum] = (),
    matches: Sequence[Match] = (),
) -> None:
    """Write all figures, whole or not at all."""
    document = {
        "note": "real decoding of random models, priced by a fixed table of costs: a check of the searches, not a speed-up",
        "problem": _PROBLEM,
        "optima": [asdict(each) for each in optima],
        "small": [{**asdict(each), "share": each.share, "effort": each.effort} for each in found],
        "large": [asdict(each) for each in recovered],
        "rivals": [each.facts() for each in matches],
    }
    write_atomically(
        path,
        json.dumps(stamped(document, torch.device("cpu")), indent=1).encode(),
        what="the results",
        error=SearchError,
    )


def exhaustive(
    problem: PlantedProblem,
    progress: Progress,
    skip_sets: Sequence[LayerSkip] | None = None,
    *,
    num_refined: int = NUM_REFINED,
) -> Optimum:
    """Decode with every skip set (all sets of inner blocks in all precisions, unless given) and return the best speed-up.

    All sets are tried at the longest draft; the `num_refined` best of them at every length.
    """
    sets = all_drafts(problem) if skip_sets is None else skip_sets
    progress.stage(f"seed {problem.seed}: all {len(sets)} sets of blocks", len(sets))
    speedups: dict[LayerSkip, float] = {}
    bench = problem.in_lockstep()
    for skip in sets:
        speedups[skip] = _measure(bench, skip, MAX_TOKENS)
        progress.advance()
    refined = sorted(sets, key=lambda skip: -speedups[skip])[:num_refined]
    others = [_measure(bench, skip, length) for skip in refined for length in range(1, MAX_TOKENS)]
    return Optimum(problem.seed, max([*speedups.values(), *others]), len(speedups) + len(others))


def all_drafts(problem: PlantedProblem) -> list[LayerSkip]:
    """Return every set of blocks in every precision of the problem, and the whole model in each but its own."""
    sets = all_skip_sets(problem.target.num_layers)
    return [*sets, *(skip.having(bits=bits) for bits in problem.bits for skip in (LayerSkip(), *sets))]


def all_skip_sets(num_layers: int) -> list[LayerSkip]:
    """Return every set of blocks between the first and the last one."""
    inner = range(1, num_layers - 1)
    return [LayerSkip.blocks(blocks) for size in range(1, len(inner) + 1) for blocks in combinations(inner, size)]


def _measure(bench: Bench, skip: LayerSkip, length: int) -> float:
    candidate = Candidate(draft=skip, draft_length=Fixed(max_tokens=length))
    return bench.measure(candidate, bench.indices).speedup


def _search(name: str, planted: PlantedProblem, progress: Progress) -> tuple[float, int]:
    """Run a search and return the speed-up that it finds and the number of candidates that it measures."""
    best, records = run_search(name, planted, progress, rules=("fixed",))
    drafted = [r for r in records if r.candidate.draft.drafts and r.repeat_of is None]
    return (best.speedup or 0.0) if best else 0.0, len(drafted)
