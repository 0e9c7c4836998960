"""Rating of skip sets between trials: within a time limit, and only for as long as they may beat the pool.

Sets are rated with the model's own weights. In another precision other sets are the best, as a draft step costs less: there all
sets are estimated at the costs of that precision, and the best few are surveyed again with its weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from decoding.drafts import BitWidth, Draft
from decoding.target import Target
from studies.prediction.pools import is_same, unlike
from studies.prediction.predictor import Predictor
from studies.prediction.predictors import Prediction
from studies.prediction.proposals import Proposals, method_of
from studies.space import SkipSpace

FEWEST_SURVEYED, SURVEYED_PER_ITEM = 160, 3
NEAR_THE_BEST = 0.85
"""Share of the pool's best predicted speed-up that a skip set must reach to join the pool."""
HOPELESS = 0.75
"""Share below which the best skip set ends the rating. Moves gain a few per cent, not a third."""
SHARE_BEHIND = 0.25
"""Share of its time that rating gets while no set so far is above `HOPELESS`: what is predicted to be faster is measured first."""
NUM_SURVEYED_AGAIN = 6
"""Number of unlike sets that are surveyed again in each precision, by their estimates: each takes a recording."""


class Rating:
    """Skip sets rated one by one by prediction: about `num_surveyed`, or three per sublayer and at least 160."""

    def __init__(
        self,
        target: Target,
        predictor: Predictor,
        *,
        whole_blocks: bool = False,
        num_surveyed: int | None = None,
        is_over: bool = False,
        precisions: Callable[[], Sequence[BitWidth]] = tuple,
    ) -> None:
        """`precisions` returns those in which skip sets are rated too, once it is known whether they are of use."""
        space = SkipSpace.of(target, whole_blocks=whole_blocks)
        self._most = num_surveyed or max(FEWEST_SURVEYED, SURVEYED_PER_ITEM * len(space.items))
        self._num_layers = target.num_layers
        self._predictor = predictor
        self._precisions = precisions
        self.proposals = Proposals(space, predictor)
        self._rated = self.proposals.rate()
        self._seconds = 0.0
        self.num_rated = 0
        self.is_over = is_over
        """True if nothing is left to rate, enough sets are rated, or they cannot beat the pool."""

    @property
    def is_under_way(self) -> bool:
        """True if the best sets so far are worth measuring."""
        return self.proposals.is_under_way or self.is_over

    def best_by_method(self) -> dict[str, float]:
        """Return the best predicted speed-up of each method that proposed a set first, the best first."""
        best: dict[str, float] = {}
        for prediction in self.proposals.best_first():
            best.setdefault(method_of(str(self.proposals.origin(prediction.draft))), prediction.speedup)
        return best

    def rate(self, seconds: float, pool: Sequence[Draft]) -> bool:
        """Rate sets until all calls together have taken `seconds`. Return True if any set was rated.

        With an empty pool, rating goes on until it is under way, whatever the time: there must be something to measure. While no
        set comes near the pool, the calls together get `SHARE_BEHIND` of the time.
        """
        before = self.num_rated
        if self._is_hopeless(pool):
            seconds *= SHARE_BEHIND
        must_begin = not pool and not self.is_under_way
        while not self.is_over and ((must_begin and not self.is_under_way) or self._seconds < seconds):
            start = time.perf_counter()
            self._rate_next()
            self.is_over |= self.proposals.knows_items and self._is_hopeless(pool)
            self._seconds += time.perf_counter() - start
        return self.num_rated > before

    def worth_measuring(self, pool: Sequence[Draft], count: int) -> list[Draft]:
        """Return the best `count` unlike sets of each precision, without those in `pool` or far slower than its best draft."""
        least = NEAR_THE_BEST * self._best_of(pool)
        found: list[Draft] = []
        for rated in (self.proposals.best_first(), *map(self._surveyed_again, self._precisions())):
            speedups = {prediction.draft: prediction.speedup for prediction in rated}
            found += [
                draft
                for draft in unlike(rated, count, self._num_layers)
                if speedups[draft] >= least and not any(is_same(draft, other, self._num_layers) for other in pool)
            ]
        return found

    def _surveyed_again(self, bits: BitWidth) -> list[Prediction]:
        """Return the predictions, with quantised weights, of the sets that are estimated to be the best in this precision."""
        best = unlike(self.proposals.estimates(bits), NUM_SURVEYED_AGAIN, self._num_layers)
        return self._predictor.best_first(best)

    def _rate_next(self) -> None:
        prediction: Prediction | None = next(self._rated, None)
        self.is_over = prediction is None
        self.num_rated += not self.is_over
        self.is_over |= self.proposals.knows_items and self.num_rated >= self._most

    def _is_hopeless(self, pool: Sequence[Draft]) -> bool:
        """Return whether no set comes near the pool, not even by its estimate in another precision."""
        ordered = (self.proposals.best_first(), *map(self.proposals.estimates, self._precisions()))
        least = HOPELESS * self._best_of(pool)
        return all(not rated or rated[0].speedup < least for rated in ordered)

    def _best_of(self, pool: Sequence[Draft]) -> float:
        """Return the best predicted speed-up in the pool, on the sequences that skip sets are rated on."""
        return max((self._predictor.best(draft).speedup for draft in pool), default=0.0)
