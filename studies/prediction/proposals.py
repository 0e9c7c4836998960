"""Proposals of skip sets: moves over sublayers, judged by prediction alone (our formulation).

A search begins with what each single skip would do, each exit would do, what a knapsack makes of the first (KnapSpec,
arXiv 2602.20217, has the idea of sublayers as items with measured costs), and what stays closest to the target's hidden states
(`studies.prediction.cosine`, CLaSp's idea); then it grows a set item by item, and improves the
best sets found by leaving out one item more, taking one back, or swapping two.

It rates one set at a time and may be stopped after any: each step yields the sets it wants to know, and goes on when they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from decoding.drafts import EarlyExit, LayerSkip
from studies.prediction.contract import Prediction
from studies.prediction.cosine import cosine_skips
from studies.prediction.predictor import Predictor
from studies.prediction.skip_space import SkipSet, SkipSpace

LEAST_GAIN = 1e-3
"""Relative gain of a move that is worth making: less is a token more or less in the texts of the survey."""
BRANCHES = 6
"""Items that a growing set tries at each step, those that did best when last tried."""
BEAM = 2
"""Sets that grow side by side."""
IDLE_STEPS = 4
"""Steps that a growing set may get slower in before it is given up."""
CAPACITIES = 8
"""Steps of saved time for which the knapsack finds the least harmful set."""
COSINE_SHARES = 12
"""The cosine search proposes a set for each twelfth of the blocks."""
PREFIXES = 12
"""Counts at which the search along the order of harm begins."""
LEAST_ACCEPTANCE = 1e-3
"""What an acceptance of nothing counts as in the harm of an item."""
LEAST_SAVING = 1e-6
"""Share of a whole step that an item saves at least: a measured saving of nothing cannot be divided by."""


def propose_skip_sets(space: SkipSpace, predictor: Predictor, most: int) -> list[Prediction]:
    """The skip sets that a search rates, the best first: `most` of them, but not fewer than it begins with."""
    proposals = Proposals(space, predictor)
    for count, _ in enumerate(proposals.rate(), 1):
        if proposals.is_under_way and count >= most:
            break
    return proposals.best_first()


class Proposals:
    """A search for skip sets, and all sets that it has rated so far."""

    def __init__(self, space: SkipSpace, predictor: Predictor) -> None:
        self._space, self._predictor = space, predictor
        self._rated: dict[SkipSet, Prediction] = {}
        self._gains: dict[int, float] = {}
        """What leaving an item out did to the speed-up when last tried, as a factor."""
        self.is_under_way = False
        """Single items, exits, the order of harm and the knapsacks are rated: what is best so far is worth measuring."""

    def rate(self) -> Iterator[Prediction]:
        """Rate one set after another until no move helps; each of them when it has just been rated."""
        for chosen in self._wanted():
            if chosen not in self._rated:
                self._rated[chosen] = self._predictor.best(self._space.draft(chosen))
                yield self._rated[chosen]

    def best_first(self) -> list[Prediction]:
        """All that are rated, the best first; the empty set is not a draft."""
        drafts = (prediction for chosen, prediction in self._rated.items() if chosen)
        return sorted(drafts, key=lambda prediction: -prediction.speedup)

    def _wanted(self) -> Iterator[SkipSet]:
        """The sets to rate. Whoever wants one finds it in `_rated` when asked for the next."""
        yield from self._single_items()
        yield from self._exits()
        yield from self._prefixes()
        yield from knapsacks(self._harms(), self._savings(), CAPACITIES)
        self.is_under_way = True
        yield from self._cosines()
        yield from self._grown()
        yield from self._improved(count=3)

    def _single_items(self) -> Iterator[SkipSet]:
        yield frozenset()
        for place in range(len(self._space.items)):
            yield frozenset([place])
            self._gains[place] = self._speedup(frozenset([place])) / self._speedup(frozenset())

    def _exits(self) -> Iterator[SkipSet]:
        num_layers = self._predictor.survey.target.num_layers
        for exit_layer in range(1, num_layers):
            yield self._space.places(EarlyExit(exit_layer=exit_layer).skipped(num_layers))

    def _cosines(self) -> Iterator[SkipSet]:
        num_layers = self._predictor.survey.target.num_layers
        wanted = {round(num_layers * share / COSINE_SHARES) for share in range(1, COSINE_SHARES)}
        for blocks in cosine_skips(self._predictor.survey, sorted(wanted - {0})):
            yield self._space.places(LayerSkip.blocks(blocks))

    def _prefixes(self) -> Iterator[SkipSet]:
        """The first so many items in the order of harm for what they save: a few counts, then ever nearer to the best of them."""
        harms, savings = self._harms(), self._savings()
        order = sorted(range(len(harms)), key=lambda place: harms[place] / savings[place])
        step = max(len(order) // PREFIXES, 1)
        counts = list(range(step, len(order), step))
        while True:
            yield from (frozenset(order[:count]) for count in counts)
            best = max(counts, key=lambda count: self._speedup(frozenset(order[:count])))
            if step == 1:
                return
            step = -(-step // 2)
            counts = [count for count in (best - step, best, best + step) if 0 < count < len(order)]

    def _harms(self) -> list[float]:
        """-log of the acceptance with one item left out: harms of items that err independently add up."""
        singles = [self._rated[frozenset([place])] for place in range(len(self._space.items))]
        return [-math.log(min(max(single.acceptance, LEAST_ACCEPTANCE), 1.0)) for single in singles]

    def _savings(self) -> list[float]:
        """What each item takes off a draft step."""
        whole = self._predictor.costs(self._space.draft(())).draft_step
        saved = [whole - self._predictor.costs(item).draft_step for item in self._space.items]
        return [max(saving, LEAST_SAVING * whole) for saving in saved]

    def _grown(self) -> Iterator[SkipSet]:
        """Add the best item again and again, `BEAM` sets side by side, until that has not helped for a while."""
        beam: list[SkipSet] = [frozenset()]
        best, idle = self._speedup(frozenset()), 0
        while beam and idle < IDLE_STEPS:
            grown: set[SkipSet] = set()
            for chosen in beam:
                for place in self._most_promising(chosen)[:BRANCHES]:
                    more = chosen | {place}
                    yield more
                    self._gains[place] = self._speedup(more) / self._speedup(chosen)
                    grown.add(more)
            beam = sorted(grown, key=lambda chosen: -self._speedup(chosen))[:BEAM]
            reached = self._speedup(beam[0]) if beam else 0.0
            idle = 0 if reached > best * (1 + LEAST_GAIN) else idle + 1
            best = max(best, reached)

    def _improved(self, count: int) -> Iterator[SkipSet]:
        """Climb from each of the `count` best sets as long as a move helps."""
        starts = sorted(self._rated, key=lambda chosen: -self._speedup(chosen))[:count]
        for start in starts:
            chosen: SkipSet | None = start
            while chosen is not None:
                least, better = self._speedup(chosen) * (1 + LEAST_GAIN), None
                for moved in self._moves(chosen):
                    yield moved
                    if self._speedup(moved) > least:
                        better = moved
                        break
                chosen = better

    def _moves(self, chosen: SkipSet) -> Iterator[SkipSet]:
        """One item more, the most promising first; one less, the most doubtful first; then the best of both at once."""
        add = self._most_promising(chosen)
        take = sorted(chosen, key=lambda place: self._gains[place])
        for pair in range(max(len(add), len(take))):
            yield from (chosen | {place} for place in add[pair : pair + 1])
            yield from (chosen - {place} for place in take[pair : pair + 1])
        yield from ((chosen | {more}) - {less} for more in add[:BRANCHES] for less in take[:BRANCHES])

    def _most_promising(self, chosen: SkipSet) -> list[int]:
        """The items that a set does not hold, those first that did best when last tried."""
        return sorted(set(range(len(self._space.items))) - chosen, key=lambda place: -self._gains[place])

    def _speedup(self, chosen: SkipSet) -> float:
        return self._rated[chosen].speedup


def knapsacks(harms: Sequence[float], savings: Sequence[float], num_capacities: int) -> list[SkipSet]:
    """The sets of least total harm that save at least 1, 2 ... `num_capacities` steps of all there is to save (0/1 knapsack by
    dynamic programming over whole steps; each set once, those that would leave out everything not among them).

    `harms` and `savings` hold a value an item, savings above 0. A step is small enough that rounding does not decide.
    """
    total = sum(savings)
    steps = 8 * max(len(savings), num_capacities)
    sizes = [max(1, round(saving / total * steps)) for saving in savings]
    most = sum(sizes)
    least: list[float] = [0.0, *[math.inf] * most]
    sets: list[SkipSet] = [frozenset()] * (most + 1)
    for place, (harm, size) in enumerate(zip(harms, sizes, strict=True)):
        for saved in range(most, size - 1, -1):
            if (harmed := least[saved - size] + harm) < least[saved]:
                least[saved], sets[saved] = harmed, sets[saved - size] | {place}
    chosen = []
    for capacity in range(1, num_capacities + 1):
        enough = range(-(-most * capacity // (num_capacities + 1)), most + 1)
        chosen.append(sets[min(enough, key=lambda saved: least[saved])])
    return _distinct(found for found in chosen if 0 < len(found) < len(harms))


def _distinct(sets: Iterable[SkipSet]) -> list[SkipSet]:
    return list(dict.fromkeys(sets))
