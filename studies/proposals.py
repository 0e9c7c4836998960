"""Proposals of skip sets: moves over sublayers, judged by prediction alone (our formulation).

A search begins with what each single skip would do, each exit would do, what a knapsack makes of the first (KnapSpec,
arXiv 2602.20217, has the idea of sublayers as items with measured costs), and what stays closest to the target's hidden states
(`studies.cosine`, CLaSp's idea); then it grows a set item by item, and improves the
best sets found by leaving out one item more, taking one back, or swapping two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from decoding.profile import EarlyExit, LayerSkip
from studies.cosine import cosine_skips
from studies.prediction import Prediction, Predictor
from studies.skip_space import SkipSet, SkipSpace

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


@dataclass(frozen=True)
class Effort:
    """How many drafts may be looked at, about, and until when; single sublayers and exits are always looked at."""

    most: int
    until: float = math.inf
    """In seconds of `clock`."""
    clock: Callable[[], float] = time.perf_counter

    def is_spent(self, predictor: Predictor) -> bool:
        """Whether no further draft may be looked at."""
        return predictor.num_drafts >= self.most or self.clock() >= self.until


def propose_skip_sets(space: SkipSpace, predictor: Predictor, effort: Effort) -> list[Prediction]:
    """All skip sets that a search looked at, the best first; the empty one is not a draft."""
    search = _Search(space, predictor, effort)
    search.look_at_single_items()
    search.look_at_exits()
    search.look_at_prefixes()
    search.look_at_knapsacks()
    search.look_at_cosines()
    search.grow()
    search.improve(count=3)
    return search.best_first()


class _Search:
    """All sets looked at so far."""

    def __init__(self, space: SkipSpace, predictor: Predictor, effort: Effort) -> None:
        self._space, self._predictor, self._effort = space, predictor, effort
        self._seen: dict[SkipSet, Prediction] = {}
        self._gains: dict[int, float] = {}
        """What leaving an item out did to the speed-up when last tried, as a factor."""

    def best_first(self) -> list[Prediction]:
        drafts = (prediction for chosen, prediction in self._seen.items() if chosen)
        return sorted(drafts, key=lambda prediction: -prediction.speedup)

    def look(self, chosen: SkipSet) -> Prediction:
        if chosen not in self._seen:
            self._seen[chosen] = self._predictor.best(self._space.draft(chosen))
        return self._seen[chosen]

    def look_at_single_items(self) -> None:
        nothing = self.look(frozenset())
        for place in range(len(self._space.items)):
            self._gains[place] = self.look(frozenset([place])).speedup / nothing.speedup

    def look_at_exits(self) -> None:
        num_layers = self._predictor.survey.target.num_layers
        for exit_layer in range(1, num_layers):
            self.look(self._space.places(EarlyExit(exit_layer=exit_layer).as_layer_skip(num_layers)))

    def look_at_knapsacks(self) -> None:
        self._look_at_all(knapsacks(self._harms(), self._savings(), CAPACITIES))

    def look_at_cosines(self) -> None:
        num_layers = self._predictor.survey.target.num_layers
        wanted = {round(num_layers * share / COSINE_SHARES) for share in range(1, COSINE_SHARES)}
        skips = cosine_skips(self._predictor.survey, sorted(wanted - {0}))
        self._look_at_all(self._space.places(LayerSkip.blocks(blocks)) for blocks in skips)

    def _look_at_all(self, sets: Iterable[SkipSet]) -> None:
        for chosen in sets:
            if self._effort.is_spent(self._predictor):
                return
            self.look(chosen)

    def look_at_prefixes(self) -> None:
        """The first so many items in the order of harm for what they save: a few counts, then ever nearer to the best of them."""
        harms, savings = self._harms(), self._savings()
        order = sorted(range(len(harms)), key=lambda place: harms[place] / savings[place])
        step = max(len(order) // PREFIXES, 1)
        counts = list(range(step, len(order), step))
        while not self._effort.is_spent(self._predictor):
            best = max(counts, key=lambda count: self.look(frozenset(order[:count])).speedup)
            if step == 1:
                return
            step = -(-step // 2)
            counts = [count for count in (best - step, best, best + step) if 0 < count < len(order)]

    def _harms(self) -> list[float]:
        """-log of the acceptance with one item left out: harms of items that err independently add up."""
        singles = [self.look(frozenset([place])) for place in range(len(self._space.items))]
        return [-math.log(min(max(single.acceptance, LEAST_ACCEPTANCE), 1.0)) for single in singles]

    def _savings(self) -> list[float]:
        """What each item takes off a draft step."""
        whole = self._predictor.costs(self._space.draft(())).draft_step
        saved = [whole - self._predictor.costs(item).draft_step for item in self._space.items]
        return [max(saving, LEAST_SAVING * whole) for saving in saved]

    def grow(self) -> None:
        """Add the best item again and again, `BEAM` sets side by side, until that has not helped for a while."""
        beam: list[SkipSet] = [frozenset()]
        best, idle = self.look(frozenset()).speedup, 0
        while beam and idle < IDLE_STEPS and not self._effort.is_spent(self._predictor):
            grown = {more for chosen in beam for more in self._tries(chosen)}
            beam = sorted(grown, key=lambda chosen: -self.look(chosen).speedup)[:BEAM]
            reached = self.look(beam[0]).speedup if beam else 0.0
            idle = 0 if reached > best * (1 + LEAST_GAIN) else idle + 1
            best = max(best, reached)

    def _tries(self, chosen: SkipSet) -> list[SkipSet]:
        """The set with one of the most promising items more, each looked at."""
        before = self.look(chosen).speedup
        free = sorted(set(range(len(self._space.items))) - chosen, key=lambda place: -self._gains[place])
        tries = []
        for place in free[:BRANCHES]:
            tries.append(chosen | {place})
            self._gains[place] = self.look(tries[-1]).speedup / before
        return tries

    def improve(self, count: int) -> None:
        """Climb from each of the `count` best sets as long as a move helps."""
        starts = sorted(self._seen, key=lambda chosen: -self._seen[chosen].speedup)[:count]
        for start in starts:
            chosen: SkipSet | None = start
            while chosen is not None:
                chosen = self._better(chosen)

    def _better(self, chosen: SkipSet) -> SkipSet | None:
        """The first move from a set that makes it faster, or None."""
        least = self.look(chosen).speedup * (1 + LEAST_GAIN)
        for moved in self._moves(chosen):
            if self._effort.is_spent(self._predictor):
                return None
            if self.look(moved).speedup > least:
                return moved
        return None

    def _moves(self, chosen: SkipSet) -> Iterator[SkipSet]:
        """One item more, the most promising first; one less, the most doubtful first; then the best of both at once."""
        add = sorted(set(range(len(self._space.items))) - chosen, key=lambda place: -self._gains[place])
        take = sorted(chosen, key=lambda place: self._gains[place])
        for pair in range(max(len(add), len(take))):
            yield from (chosen | {place} for place in add[pair : pair + 1])
            yield from (chosen - {place} for place in take[pair : pair + 1])
        yield from ((chosen | {more}) - {less} for more in add[:BRANCHES] for less in take[:BRANCHES])


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
