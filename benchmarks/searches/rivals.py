"""Published searches for sublayers to skip, by their released code: each proposes a set and is told its speed-up.

What each does otherwise than its authors is said in its docstring. A set is measured as all candidates here are: real decoding of
the tuning prompts, in turns with plain decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar

import numpy as np
import optuna

from benchmarks.searches.bayes import Point, suggest_point
from decoding.draft_length import AdaptiveExit, DraftLengthRule, TopProbability
from decoding.drafts import Draft, LayerSkip
from studies.contract import Candidate
from studies.measurement import Measurement
from studies.prediction.survey import Survey
from studies.samplers.by_optuna import tpe
from studies.space import SkipSpace
from tuner.measuring.paired import Bench

SKIP_RATIO = 0.45
"""Share of the middle sublayers that SWIFT and the random search skip: SWIFT's default."""


class Rival(ABC):
    """A search for skip sets, as points with a coordinate per sublayer. Each step has a random stream of its own."""

    draft_length: ClassVar[DraftLengthRule] = TopProbability(threshold=0.6, max_tokens=12)
    """Rule that its sets are measured with (ours, as in conf_layers)."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.seed = bench, seed
        self.num_layers = bench.target.num_layers
        self.sublayers = SkipSpace.of(bench.target)
        self.middle = SkipSpace(
            tuple(item for item in self.sublayers.items if 0 < (item.first_skipped or 0) < self.num_layers - 1)
        )
        self.num_trials = 0

    @abstractmethod
    def next_set(self) -> LayerSkip | None:
        """Return the set to measure, or None at the search's own end."""

    def learn(self, draft: LayerSkip, speedup: float | None) -> None:
        """Learn the speed-up of the proposed set; None if measuring it failed."""
        self.num_trials += 1

    def propose(self) -> Candidate | None:
        """See `benchmarks.searches.trials.Search`."""
        self._proposed = self.next_set()
        return None if self._proposed is None else Candidate(draft=self._proposed, draft_length=self.draft_length)

    def observe(self, candidate: Candidate, measured: Measurement | None) -> None:
        """See `benchmarks.searches.trials.Search`."""
        assert self._proposed is not None, "a proposed set is observed"
        self.learn(self._proposed, None if measured is None else measured.speedup)

    @property
    def num_skipped(self) -> int:
        """K_s = int(2(L-2) * ratio). Raises ValueError if that is none."""
        count = int(len(self.middle.items) * SKIP_RATIO)
        if not count:
            raise ValueError(f"a model of {self.num_layers} layers has too few between the first and the last to skip")
        return count

    def stream(self, number: int) -> np.random.Generator:
        """Return the random stream of a step."""
        return np.random.default_rng([self.seed, number])

    def random_set(self, number: int) -> LayerSkip:
        """Return K_s of the middle sublayers, all sets equally likely."""
        return self.middle.draft(self.stream(number).choice(len(self.middle.items), self.num_skipped, replace=False))


def odd_blocks(num_layers: int) -> LayerSkip:
    """Return blocks 1, 3, 5 ... without the last: the start in the released code of SWIFT and ConfLayers."""
    return LayerSkip.blocks(tuple(range(1, num_layers - 1, 2)))


def corner(space: SkipSpace, draft: LayerSkip) -> Point:
    """Return the corner of the cube for a draft."""
    chosen = space.chosen(draft)
    return np.array([float(index in chosen) for index in range(len(space.items))])


class OddLayers(Rival):
    """Every other block, without a search: the start of SWIFT and ConfLayers."""

    def next_set(self) -> LayerSkip | None:
        """Return blocks 1, 3, 5 ... once."""
        return None if self.num_trials else odd_blocks(self.num_layers)


class RandomSets(Rival):
    """Sets of exactly K_s sublayers of the middle blocks, all equally likely."""

    def next_set(self) -> LayerSkip | None:
        """Return another set."""
        return self.random_set(self.num_trials)


class Tpe(Rival):
    """Optuna's multivariate TPE over a switch per sublayer of the middle blocks, from the odd blocks on (our start)."""

    def __init__(self, bench: Bench, seed: int) -> None:
        super().__init__(bench, seed)
        self._study = optuna.create_study(direction="maximize", sampler=tpe(seed))
        odd = corner(self.middle, odd_blocks(self.num_layers)) > 0.5
        self._study.enqueue_trial(dict(zip(self.middle.names, odd.tolist(), strict=True)))

    def next_set(self) -> LayerSkip | None:
        """Return the set that Optuna suggests, switch by switch."""
        self._trial = self._study.ask()
        chosen = [self._trial.suggest_categorical(name, [False, True]) for name in self.middle.names]
        return self.middle.draft(np.flatnonzero(chosen))

    def learn(self, draft: LayerSkip, speedup: float | None) -> None:
        """Tell Optuna."""
        super().learn(draft, speedup)
        if speedup is None:
            self._study.tell(self._trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(self._trial, speedup)


class DraftVerify(Rival):
    """Draft & Verify (arXiv 2309.08168): Bayesian optimisation of the measured speed over a switch for each sublayer.

    As in the released code: 2L switches, including the first and the last block; a sublayer is skipped if the point's coordinate
    is above one half; the process is told the point and its measured speed; kappa is 2.576, the default of the package; no random
    points at the start; drafts of at most 8 tokens end by the adaptive exit, whose threshold starts at 0.8.

    Our choices: the value is the speed-up over plain decoding of the same prompts, as the speed itself drifts with the machine;
    the search starts from the odd blocks, where the authors give two sets of their own for a model of 40 layers; the budget is the
    comparison's (theirs: 1000 iterations of 8 prompts of 32 tokens).
    """

    draft_length = AdaptiveExit(max_tokens=8, initial_threshold=0.8)
    KAPPA = 2.576

    def __init__(self, bench: Bench, seed: int) -> None:
        super().__init__(bench, seed)
        self._points: list[Point] = []
        self._values: list[float | None] = []

    def next_set(self) -> LayerSkip | None:
        """Return the odd blocks, then the point with the highest upper bound."""
        known = [value for value in self._values if value is not None]
        if not self._points:
            point = corner(self.sublayers, odd_blocks(self.num_layers))
        else:
            values = [min(known) if value is None else value for value in self._values] if known else []
            point = suggest_point(
                self._points[: len(values)],
                values,
                size=len(self.sublayers.items),
                kappa=self.KAPPA,
                rng=self.stream(len(self._points)),
            )
        self._points.append(point)
        return self.sublayers.draft(np.flatnonzero(point > 0.5))

    def learn(self, draft: LayerSkip, speedup: float | None) -> None:
        """Add the speed-up of the last point."""
        super().learn(draft, speedup)
        self._values.append(speedup)


class Swift(Rival):
    """SWIFT (arXiv 2410.06916): random skip sets and a few Bayesian ones, rated by matchness.

    As in the released code: exactly K_s attention and MLP sublayers of the middle blocks are skipped. Candidates are random; every
    25th takes the K_s largest coordinates of the point with the highest upper bound (kappa 2.5). A candidate is not decoded with.
    Its matchness is the share of 32 tokens, after the first token of a continuation, that it predicts in one parallel pass, with
    the target's keys and values of the prompt and its own within the continuation. The search ends above a matchness of 0.95, after
    300 candidates without a better one, or after 1000.

    The trial is our formulation. SWIFT decodes with its best set while it searches; here a trial scores candidates until one is
    better than all before, or until 25 are scored, and then measures the best set not measured yet. All of SWIFT's own choices are
    therefore measured, and otherwise a runner-up, which SWIFT would not try: matchness ignores time. Scoring is part of the
    trial's seconds. The first trial measures the odd blocks, with which SWIFT starts to decode.

    One difference: every candidate is scored on the same four sequences, from the first tuning prompts, as their mean. SWIFT
    scores each on the sequence being written, so its best candidate may owe its score to an easier sequence.
    """

    KAPPA, WINDOW, NUM_TEXTS = 2.5, 32, 4
    BAYES_INTERVAL = ROUND_LENGTH = 25
    MAX_MATCHNESS, TOLERANCE, MAX_CANDIDATES = 0.95, 300, 1000

    def __init__(self, bench: Bench, seed: int) -> None:
        super().__init__(bench, seed)
        self.points: list[Point] = []
        self.scores: list[float] = []
        self._measured: set[Draft] = set()

    def next_set(self) -> LayerSkip | None:
        """Return the odd blocks, then the best unmeasured set after scoring another round of candidates."""
        if not self.num_trials:
            return odd_blocks(self.num_layers)
        if self.has_ended():
            return None
        before = max(self.scores, default=0.0)
        for _ in range(self.ROUND_LENGTH):
            self.points.append(self._next_point())
            self.scores.append(self.matchness(self._draft(self.points[-1])))
            if self.scores[-1] > before or self.has_ended():
                break
        best_first = [self._draft(self.points[index]) for index in np.argsort(-np.array(self.scores), kind="stable")]
        return next((draft for draft in best_first if draft not in self._measured), best_first[0])

    def learn(self, draft: LayerSkip, speedup: float | None) -> None:
        """Remember that the set was measured; its speed-up is not what SWIFT learns from."""
        super().learn(draft, speedup)
        self._measured.add(draft)

    def matchness(self, draft: LayerSkip) -> float:
        """Return the share of tokens that the draft predicts; all sequences have the same weight."""
        agreements = [recording.agreement for recording in self._survey.record(draft)]
        return sum(agreements) / len(agreements)

    @cached_property
    def _survey(self) -> Survey:
        """Survey of one round of W tokens per sequence, made on first use, so that its seconds count with a trial."""
        outputs = [output[: self.WINDOW + 1] for output in self.bench.continuations[: self.NUM_TEXTS]]
        return Survey(self.bench.target, self.bench.prompts[: self.NUM_TEXTS], outputs, depth=self.WINDOW)

    def _next_point(self) -> Point:
        index, size = len(self.points), len(self.middle.items)
        if (index + 1) % self.BAYES_INTERVAL:
            return corner(self.middle, self.random_set(index))
        return suggest_point(self.points, self.scores, size=size, kappa=self.KAPPA, rng=self.stream(index))

    def _draft(self, point: Point) -> LayerSkip:
        """Return the draft that skips the K_s largest coordinates, the first of equal ones."""
        return self.middle.draft(np.argsort(-point, kind="stable")[: self.num_skipped])

    def has_ended(self) -> bool:
        """Return whether one of SWIFT's own stops applies."""
        if not self.scores:
            return False
        best = max(self.scores)
        is_idle = len(self.scores) - self.scores.index(best) > self.TOLERANCE
        return best > self.MAX_MATCHNESS or is_idle or len(self.scores) >= self.MAX_CANDIDATES


RIVALS: dict[str, type[Rival]] = {
    "swift": Swift,
    "draft_verify": DraftVerify,
    "skip_sets_tpe": Tpe,
    "skip_sets_random": RandomSets,
    "odd_layers": OddLayers,
}
