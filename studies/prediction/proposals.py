"""Proposals of skip sets: moves over sublayers, rated by prediction alone (our formulation).

A search rates first what is known after a few passes: exits, the sets of ConfLayers (arXiv 2604.14612), and the sets that stay
closest to the target's hidden states (CLaSp's idea, arXiv 2505.24196). Then it rates each single skip, the knapsacks
over single skips (KnapSpec, arXiv 2602.20217, has the idea of sublayers as items with measured costs). It then grows a set item by
item, rates sets of the least harmful skips of which no two are neighbours, and improves the best sets by adding an item, removing
one, or swapping two.

It rates one set at a time and may be stopped after any: each step yields the sets to rate, and continues once they are rated.
Every set carries its origin: the method that proposed it first, and the others that also did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.drafts import BitWidth, Draft, EarlyExit, LayerSkip
from decoding.errors import UnsupportedModelError
from decoding.target import BlockView, Target
from studies.confidence.confidences import CONFIDENCE_NAMES, CONFIDENCES, ConfidenceName
from studies.confidence.selection import DTYPES, Form, growth_cap, select_from_scores, standardise
from studies.prediction.predictor import Predictor
from studies.prediction.predictors import Prediction
from studies.prediction.survey import JoinedSurvey, Survey
from studies.space import SkipSet, SkipSpace

Wanted = tuple[SkipSet, str]
"""A set to rate, and the method that proposes it."""

EXIT, SINGLE, ORDER_OF_HARM, KNAPSACK = "exit", "single sublayer", "order of harm", "knapsack"
CONF_LAYERS, COSINE, GROWING, SPACED_SETS, MOVES = "conf_layers", "cosine", "growing", "spaced", "moves"
"""Methods that propose skip sets: an origin is one of these, with the setting that led to the set in brackets."""
LAMBDAS = (0.0, -0.1, 0.1, -0.2, 0.2, -0.3, 0.3, -0.4, 0.4)
"""Values of lambda that ConfLayers' sets are read with: the range that the paper sweeps, from its default on."""
FORMS: tuple[Form, ...] = ("published", "unrounded")
WINDOW = 32
"""Last generated tokens that a confidence is read from (W)."""
MOST_SEQUENCES = 3
"""Sequences that confidences are read from, evenly spread over the survey's: sets differ between prompts."""
LEAST_GAIN = 1e-3
"""Smallest relative gain of a move: less amounts to single tokens of the survey."""
BRANCHES = 6
"""Number of items that a growing set tries at each step: the best ones when last tried."""
BEAM = 2
"""Number of sets that grow in parallel."""
IDLE_STEPS = 4
"""Number of steps without a gain after which growing stops."""
CAPACITIES = 8
"""Number of amounts of saved time for which the knapsack finds the least harmful set."""
SPACED = 6
"""Number of sizes of the sets without neighbours."""
COSINE_SHARES = 12
"""The cosine search proposes one set for each twelfth of the blocks."""
PREFIXES = 12
"""Number of set sizes at which the search along the order of harm starts."""
LEAST_ACCEPTANCE = 1e-3
"""Lower bound of the acceptance in the harm of an item."""
LEAST_SAVING = 1e-6
"""Lower bound of an item's saving, as a share of a draft step: harms are divided by savings."""


class Proposals:
    """A search for skip sets, with every set rated so far."""

    def __init__(self, space: SkipSpace, predictor: Predictor) -> None:
        self._space, self._predictor = space, predictor
        self._rated: dict[SkipSet, Prediction] = {}
        self._origins: dict[SkipSet, list[str]] = {}
        self._exit_of: dict[SkipSet, EarlyExit] = {}
        """Exits without a head: one pass over the sequences records them all."""
        self._gains: dict[int, float] = {}
        """Factor on the speed-up from skipping each item, when last tried."""
        self.is_under_way = False
        """True once the sets of ConfLayers are rated, or else the knapsacks: the best so far is worth measuring."""
        self.knows_items = False
        """True once all sets that come from single skips are rated: further sets improve on the best of these."""
        self.remarks: list[str] = []
        """Remarks on methods that could not propose anything on this model."""

    def rate(self) -> Iterator[Prediction]:
        """Rate one set after another until no move helps; yield each prediction."""
        for chosen, origin in self._wanted():
            is_new = chosen not in self._rated
            self._origins.setdefault(chosen, []).append(origin)
            if is_new:
                self._rated[chosen] = self._predict(chosen)
                yield self._rated[chosen]

    def best_first(self) -> list[Prediction]:
        """Return the rated sets, best first; the empty set is not a draft."""
        drafts = (prediction for chosen, prediction in self._rated.items() if chosen)
        return sorted(drafts, key=lambda prediction: -prediction.speedup)

    def estimates(self, bits: BitWidth) -> list[Prediction]:
        """Return an estimate of each rated set in another precision, best first: no pass is run with quantised weights."""
        estimated = (
            self._predictor.best_borrowing(
                prediction.draft.having(bits=bits), self._exit_of.get(chosen) or prediction.draft
            )
            for chosen, prediction in self._rated.items()
            if chosen
        )
        return sorted(estimated, key=lambda estimate: -estimate.speedup)

    def origin(self, draft: Draft) -> str | None:
        """Return the methods that proposed a skip set, the first one with its setting; None for an unknown set."""
        origins = self._origins.get(self._space.chosen(draft.skipped(self._predictor.survey.target.num_layers)))
        if not origins:
            return None
        first, *others = origins
        methods = [method for method in dict.fromkeys(map(method_of, others)) if method != method_of(first)]
        return f"{first}; also {', '.join(methods)}" if methods else first

    def _predict(self, chosen: SkipSet) -> Prediction:
        if (exit_draft := self._exit_of.get(chosen)) is None:
            return self._predictor.best(self._space.draft(chosen))
        return replace(self._predictor.best(exit_draft), draft=self._space.draft(chosen))

    def _wanted(self) -> Iterator[Wanted]:
        """Yield the sets to rate, each with its origin; each is in `_rated` before the next one is asked for."""
        yield from _from(EXIT, self._exits())
        yield from self._confident()
        yield from _from(COSINE, self._cosines())
        yield from _from(SINGLE, self._single_items())
        yield from _from(ORDER_OF_HARM, self._prefixes())
        yield from _from(KNAPSACK, knapsacks(self._harms(), self._savings(), CAPACITIES))
        self.is_under_way = self.knows_items = True
        yield from _from(GROWING, self._grown())
        yield from _from(SPACED_SETS, self._spaced())
        yield from self._improved(count=3)

    def _confident(self) -> Iterator[Wanted]:
        sets, remarks = confident_skips(self._predictor.survey)
        self.remarks += remarks
        for blocks, origin in sets.items():
            yield self._space.chosen(LayerSkip.blocks(blocks)), origin
        self.is_under_way |= bool(sets)

    def _single_items(self) -> Iterator[SkipSet]:
        yield frozenset()
        for item in range(len(self._space.items)):
            yield frozenset([item])
            self._gains[item] = self._speedup(frozenset([item])) / self._speedup(frozenset())

    def _exits(self) -> Iterator[SkipSet]:
        num_layers = self._predictor.survey.target.num_layers
        for exit_layer in range(1, num_layers):
            draft = EarlyExit(exit_layer=exit_layer)
            chosen = self._space.chosen(draft.skipped(num_layers))
            self._exit_of[chosen] = draft
            yield chosen

    def _cosines(self) -> Iterator[SkipSet]:
        num_layers = self._predictor.survey.target.num_layers
        wanted = {round(num_layers * share / COSINE_SHARES) for share in range(1, COSINE_SHARES)}
        for blocks in cosine_skips(self._predictor.survey, sorted(wanted - {0})):
            yield self._space.chosen(LayerSkip.blocks(blocks))

    def _prefixes(self) -> Iterator[SkipSet]:
        """Yield the first n items by harm per saving: a few values of n, then ever closer to the best."""
        harms, savings = self._harms(), self._savings()
        order = sorted(range(len(harms)), key=lambda item: harms[item] / savings[item])
        step = max(len(order) // PREFIXES, 1)
        counts = list(range(step, len(order), step))
        while True:
            yield from (frozenset(order[:count]) for count in counts)
            best = max(counts, key=lambda count: self._speedup(frozenset(order[:count])))
            if step == 1:
                return
            step = -(-step // 2)
            counts = [count for count in (best - step, best, best + step) if 0 < count < len(order)]

    def _spaced(self) -> Iterator[SkipSet]:
        """Yield sets without neighbours, from few items to as many as there are.

        A knapsack takes single harms to add up. Skips in a row do far more harm than that: each distorts the input of the
        next. On SmolLM2-135M, 16 sublayers without neighbours have an acceptance of 0.59, and the 16 least harmful ones 0.41.
        """
        harms, savings = self._harms(), self._savings()
        order = without_neighbours(
            sorted(range(len(harms)), key=lambda item: harms[item] / savings[item]), self._space.neighbours
        )
        sizes = sorted({round(len(order) * share / SPACED) for share in range(1, SPACED + 1)} - {0})
        yield from (frozenset(order[:size]) for size in sizes)

    def _harms(self) -> list[float]:
        """Return -log of the acceptance with each item skipped: harms of independent errors add up."""
        singles = [self._rated[frozenset([item])] for item in range(len(self._space.items))]
        return [-math.log(min(max(single.acceptance, LEAST_ACCEPTANCE), 1.0)) for single in singles]

    def _savings(self) -> list[float]:
        """Return the saving of each item in a draft step, in plain passes."""
        whole = self._predictor.costs(self._space.draft(())).draft_step
        saved = [whole - self._predictor.costs(item).draft_step for item in self._space.items]
        return [max(saving, LEAST_SAVING * whole) for saving in saved]

    def _grown(self) -> Iterator[SkipSet]:
        """Add the best item repeatedly to `BEAM` sets, until `IDLE_STEPS` steps bring no gain."""
        beam: list[SkipSet] = [frozenset()]
        best, idle = self._speedup(frozenset()), 0
        while beam and idle < IDLE_STEPS:
            grown: set[SkipSet] = set()
            for chosen in beam:
                for item in self._most_promising(chosen)[:BRANCHES]:
                    more = chosen | {item}
                    yield more
                    self._gains[item] = self._speedup(more) / self._speedup(chosen)
                    grown.add(more)
            beam = sorted(grown, key=lambda chosen: -self._speedup(chosen))[:BEAM]
            reached = self._speedup(beam[0]) if beam else 0.0
            idle = 0 if reached > best * (1 + LEAST_GAIN) else idle + 1
            best = max(best, reached)

    def _improved(self, count: int) -> Iterator[Wanted]:
        """Climb from each of the `count` best sets while a move helps."""
        starts = sorted(self._rated, key=lambda chosen: -self._speedup(chosen))[:count]
        for start in starts:
            chosen: SkipSet | None = start
            first = self._origins[start][0]
            origin = first if method_of(first) == MOVES else f"{MOVES} (from {first})"
            while chosen is not None:
                least, better = self._speedup(chosen) * (1 + LEAST_GAIN), None
                for moved in self._moves(chosen):
                    yield moved, origin
                    if self._speedup(moved) > least:
                        better = moved
                        break
                chosen = better

    def _moves(self, chosen: SkipSet) -> Iterator[SkipSet]:
        """Yield sets with one item more (most promising first), one less (least useful first), then both at once."""
        add = self._most_promising(chosen)
        take = sorted(chosen, key=lambda item: self._gains[item])
        for pair in range(max(len(add), len(take))):
            yield from (chosen | {item} for item in add[pair : pair + 1])
            yield from (chosen - {item} for item in take[pair : pair + 1])
        yield from ((chosen | {more}) - {less} for more in add[:BRANCHES] for less in take[:BRANCHES])

    def _most_promising(self, chosen: SkipSet) -> list[int]:
        """Return the items outside a set, the best ones when last tried first."""
        return sorted(set(range(len(self._space.items))) - chosen, key=lambda item: -self._gains[item])

    def _speedup(self, chosen: SkipSet) -> float:
        return self._rated[chosen].speedup


def knapsacks(harms: Sequence[float], savings: Sequence[float], num_capacities: int) -> list[SkipSet]:
    """Return the least harmful sets that save at least 1, 2 ... of `num_capacities` + 1 equal shares of all savings.

    A 0/1 knapsack by dynamic programming over whole steps; duplicates and the set of all items are dropped. `harms` and `savings`
    hold one value per item, savings above 0. The steps are so small that rounding does not matter.
    """
    total = sum(savings)
    steps = 8 * max(len(savings), num_capacities)
    sizes = [max(1, round(saving / total * steps)) for saving in savings]
    most = sum(sizes)
    least: list[float] = [0.0, *[math.inf] * most]
    sets: list[SkipSet] = [frozenset()] * (most + 1)
    for item, (harm, size) in enumerate(zip(harms, sizes, strict=True)):
        for saved in range(most, size - 1, -1):
            if (harmed := least[saved - size] + harm) < least[saved]:
                least[saved], sets[saved] = harmed, sets[saved - size] | {item}
    chosen = []
    for capacity in range(1, num_capacities + 1):
        enough = range(-(-most * capacity // (num_capacities + 1)), most + 1)
        chosen.append(sets[min(enough, key=lambda saved: least[saved])])
    return list(dict.fromkeys(found for found in chosen if 0 < len(found) < len(harms)))


def without_neighbours(order: Sequence[int], neighbours: Callable[[int, int], bool]) -> list[int]:
    """Return the items of `order` without neighbours: an item beside an earlier one that was kept is left out."""
    kept: list[int] = []
    for item in order:
        if not any(neighbours(item, other) for other in kept):
            kept.append(item)
    return kept


def _from(origin: str, sets: Iterable[SkipSet]) -> Iterator[Wanted]:
    """Yield sets of one origin; each is asked for when the one before it is rated."""
    for chosen in sets:
        yield chosen, origin


def method_of(origin: str) -> str:
    """Return the method of an origin, without its setting and the other methods that proposed the same set."""
    return origin.split(" (")[0].split("; ")[0]


def confident_skips(survey: Survey | JoinedSurvey) -> tuple[dict[tuple[int, ...], str], list[str]]:
    """Return the blocks that ConfLayers skips with their origins, and a remark for each confidence that the model does not give.

    ConfLayers moves lambda during its search and decodes with each set. Here each confidence is read once per sequence, off its
    last `WINDOW` tokens, after the keys and values of all tokens before them, and lambda takes every value of a range, 0 first.
    Models with fewer than three blocks have no set.
    """
    target = survey.target
    scores: list[tuple[str, Form, np.ndarray]] = []
    remarks = []
    if target.num_layers < 3:
        return {}, []
    chosen = dict.fromkeys(round(at) for at in np.linspace(0, len(survey.indices) - 1, MOST_SEQUENCES))
    windows = [survey.last_window(index, WINDOW) for index in chosen]
    for name in CONFIDENCE_NAMES:
        try:
            scores += [each for token_ids, after in windows for each in _scores(name, target, token_ids, after)]
        except UnsupportedModelError as cause:
            remarks.append(f"no sets of ConfLayers by {name}: {cause}")
    cap = growth_cap(target.config.model_type, target.num_layers)
    sets: dict[tuple[int, ...], str] = {}
    for lam in LAMBDAS:
        for label, form, values in scores:
            blocks = select_from_scores(values, lam=lam, num_layers=target.num_layers, window_growth_cap=cap, form=form)
            if blocks:
                sets.setdefault(tuple(blocks), f"{CONF_LAYERS} ({label}, lambda {lam:g})")
    return sets, remarks


def _scores(
    name: ConfidenceName, target: Target, token_ids: Tensor, after: KVCache
) -> Iterator[tuple[str, Form, np.ndarray]]:
    """Yield label, form and scores of one confidence on one window: a pass serves both forms."""
    parts = CONFIDENCES[name](target, token_ids, after)
    for form in FORMS:
        confidences = parts.astype(DTYPES[form]).sum(axis=1)
        label = name if form == "published" else f"{name} {form}"
        yield label, form, standardise(confidences[1 : target.num_layers - 1], form)


@torch.inference_mode()
def cosine_skips(survey: Survey | JoinedSurvey, counts: Collection[int]) -> list[tuple[int, ...]]:
    """Return, for each of `counts`, the blocks to skip so that the hidden states stay close to the target's, ascending.

    CLaSp chooses by dynamic programming after each verification, on the last token's states. Here it is done once, on all rounds of
    the survey. The first block always runs: its output is the first state. Counts that exceed the model's blocks are dropped.

    `states[j]` holds the best states after the blocks so far, j of them skipped. The next block either runs on `states[j]` or is
    skipped after `states[j - 1]`, whichever is closer to the target's own states there (mean cosine).
    """
    cache, token_ids = survey.rounds
    target = survey.target
    most = max((count for count in counts if count < target.num_layers), default=0)
    states = {0: BlockView(target, 0).rounds(token_ids, cache, None)}
    skipped: dict[int, tuple[int, ...]] = {0: ()}
    for index in range(1, target.num_layers):
        view = BlockView(target, index)
        run = {count: view.rounds(token_ids, cache, before) for count, before in states.items()}
        true = run[0]
        following: dict[int, Tensor] = {0: true}
        chosen: dict[int, tuple[int, ...]] = {0: ()}
        for count in range(1, min(index, most) + 1):
            choices = []
            if count in run:
                choices.append((_cosine(run[count], true), run[count], skipped[count]))
            choices.append((_cosine(states[count - 1], true), states[count - 1], (*skipped[count - 1], index)))
            _, following[count], chosen[count] = max(choices, key=lambda choice: choice[0])
        states, skipped = following, chosen
    return [skipped[count] for count in counts if count in skipped and count]


def _cosine(states: Tensor, true: Tensor) -> float:
    """Return the mean cosine of states [.., hidden] with the target's."""
    return float(torch.cosine_similarity(states.float(), true.float(), dim=-1).mean())
