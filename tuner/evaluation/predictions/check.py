"""Comparison of predictions with real decoding, for random configurations.

The survey reads the same texts that are decoded, so differences are errors of the prediction and not of the choice of texts.
Adaptive rules start cold on every text, as in the replay. A trial of a search has fewer prompts, so its noise is larger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.draft_length import RULES
from decoding.drafts import BitWidth
from decoding.profile import Decoding, Interval
from studies.contract import Candidate
from studies.costs.table import CostTable
from studies.measurement import Measurement
from studies.prediction.contract import Prediction
from studies.prediction.predictor import Predictor
from studies.prediction.survey import Survey
from tuner.evaluation.predictions.accuracy import Accuracy, accuracy, corrected_by_others
from tuner.evaluation.random_candidates import kind_of
from tuner.evaluation.tables import ALL
from tuner.evaluation.task import feature_draft, head_drafts, random_candidates
from tuner.measuring.cost_table import measure_cost_table
from tuner.measuring.paired import Bench
from tuner.progress import Progress
from tuner.search.task import Task

CHUNK = 6
"""Configurations that are measured side by side and share one plain decoding per prompt."""


class OfCategory(Document):
    """Prediction and measurement of one configuration on the prompts of one category."""

    predicted: float
    measured: float


class Compared(Document):
    """Prediction and measurement of one configuration. Costs are in plain passes."""

    candidate: Candidate
    kind: str
    predicted: float
    corrected: float = Field(
        description="prediction corrected by the residual of all other configurations (leave one out)"
    )
    measured: Interval
    predicted_tokens_per_round: float
    measured_tokens_per_round: float
    predicted_round_cost: float
    measured_round_cost: float
    measurement: Measurement = Field(description="all samples of the real decoding", repr=False)
    categories: dict[str, OfCategory] = Field(
        default_factory=dict, description="speed-ups on the prompts of each category, if the data set has any"
    )


class PredictionCheck(Document):
    """All compared configurations, the cost table of the predictions, and the time spent."""

    pairs: tuple[Compared, ...] = Field(min_length=2)
    costs: CostTable
    cost_seconds: float = Field(description="time of measuring the cost table")
    prediction_seconds: float = Field(description="time of reading texts, recording drafts and replaying rules")
    decoding_seconds: float = Field(description="time of real decoding")

    def by_group(self) -> dict[str, tuple[Compared, ...]]:
        """Return all pairs, the pairs of each kind of draft and of each rule."""
        groups: dict[str, tuple[Compared, ...]] = {ALL: self.pairs}
        for name_of in (_kind, _rule):
            for name in sorted({name_of(pair) for pair in self.pairs}):
                groups[name] = tuple(pair for pair in self.pairs if name_of(pair) == name)
        return groups

    def raw(self, pairs: Sequence[Compared]) -> Accuracy:
        """Return the accuracy of the predicted speed-ups."""
        return accuracy([pair.predicted for pair in pairs], [pair.measured.value for pair in pairs])

    def by_category(self) -> dict[str, Accuracy]:
        """Return the accuracy of the predicted speed-ups on the prompts of each category, by its name."""
        names = sorted({name for pair in self.pairs for name in pair.categories})
        of_names = {name: [pair.categories[name] for pair in self.pairs if name in pair.categories] for name in names}
        return {
            name: accuracy([each.predicted for each in found], [each.measured for each in found])
            for name, found in of_names.items()
        }

    def corrected(self, pairs: Sequence[Compared]) -> Accuracy:
        """Return the accuracy of the corrected speed-ups."""
        return accuracy([pair.corrected for pair in pairs], [pair.measured.value for pair in pairs])

    def tokens_per_round(self, pairs: Sequence[Compared]) -> Accuracy:
        """Return the accuracy of the predicted tokens per round."""
        return accuracy(
            [pair.predicted_tokens_per_round for pair in pairs], [pair.measured_tokens_per_round for pair in pairs]
        )

    def round_cost(self, pairs: Sequence[Compared]) -> Accuracy:
        """Return the accuracy of the predicted round costs."""
        return accuracy([pair.predicted_round_cost for pair in pairs], [pair.measured_round_cost for pair in pairs])


def _kind(pair: Compared) -> str:
    return pair.kind


def _rule(pair: Compared) -> str:
    return pair.candidate.draft_length.rule


@dataclass(frozen=True)
class PredictorFactory:
    """Factory of predictors for the continuations of a bench's first prompts."""

    new_survey: Callable[[], Survey]
    costs: CostTable
    cost_seconds: float
    """Time of measuring `costs`."""
    indices: range
    """The prompts surveyed, by their index in the bench."""
    categories: Mapping[str, Sequence[int]]
    """The prompts of each category, by their index in the bench."""
    max_tokens: int
    decoding: Decoding
    bits: tuple[BitWidth, ...]
    """Precisions of quantised drafts that the costs cover."""

    def predictor(self) -> Predictor:
        """Return a new predictor that has read the texts and knows no drafts."""
        return Predictor(self.new_survey(), self.costs, max_tokens=self.max_tokens, decoding=self.decoding)


def predictor_factory(
    task: Task, bench: Bench, *, num_prompts: int, max_tokens: int, bits: tuple[BitWidth, ...], progress: Progress
) -> PredictorFactory:
    """Return a predictor factory for the first `num_prompts` prompts of `bench`.

    Costs are measured again instead of reused from an earlier search, because the check is of the current machine.
    """
    progress.stage("measuring pass costs")
    prompts, continuations = bench.prompts[:num_prompts], bench.continuations[:num_prompts]
    lengths = [len(prompt) for prompt in prompts]
    contexts = sorted({min(lengths), max(lengths) + bench.max_new_tokens})
    config = task.config
    start = time.perf_counter()
    costs = measure_cost_table(task.target, max_tokens=max_tokens, contexts=contexts, bits=bits, seed=config.seed)
    seconds = time.perf_counter() - start
    progress.say(costs.describe())

    def new_survey() -> Survey:
        return Survey(
            task.target,
            prompts,
            continuations,
            decoding=task.decoding,
            seed=config.seed,
            heads=task.head_folder,
        )

    indices = range(len(prompts))
    return PredictorFactory(
        new_survey, costs, seconds, indices, _by_category(task, bench, indices), max_tokens, task.decoding, bits
    )


def _by_category(task: Task, bench: Bench, indices: Iterable[int]) -> dict[str, list[int]]:
    """Return the indices of the bench's tuning prompts by their category; prompts without one are left out."""
    found: dict[str, list[int]] = {}
    for index in indices:
        if (category := task.prompts.tuning[bench.baseline.rows[index]].category) is not None:
            found.setdefault(category, []).append(index)
    return found


def check_predictions(
    task: Task, bench: Bench, factory: PredictorFactory, *, count: int, with_leaves: bool = False, progress: Progress
) -> PredictionCheck:
    """Predict `count` random configurations, at least 2, then decode with them; some have side leaves if asked for."""
    if count < 2:
        raise ValueError(f"at least 2 configurations are needed, got {count}")
    heads, feature = head_drafts(task), feature_draft(task)
    drawer = random_candidates(
        task.target, heads, tuple(RULES), factory.max_tokens, factory.bits, feature, with_leaves=with_leaves
    )
    candidates = drawer.draw(count, task.config.seed)
    progress.stage("predicting random configurations", len(candidates))
    start = time.perf_counter()
    predictor = factory.predictor()
    predictions = [_predict(predictor, candidate, progress) for candidate in candidates]
    predicted = time.perf_counter()
    progress.stage("decoding with random configurations", len(candidates) * len(factory.indices))
    measurements = _measure(bench, candidates, factory.indices, progress)
    decoded = time.perf_counter()
    speedups = [measurement.speedup for measurement in measurements]
    corrected = corrected_by_others(predictions, speedups)
    rows = zip(candidates, predictions, corrected, measurements, strict=True)

    def of_categories(prediction: Prediction, measurement: Measurement) -> dict[str, OfCategory]:
        return {
            name: _of_category(prediction, measurement, indices, predictor.parts)
            for name, indices in factory.categories.items()
        }

    return PredictionCheck(
        pairs=tuple(_compared(*row, of_categories(row[1], row[3])) for row in rows),
        costs=factory.costs,
        cost_seconds=factory.cost_seconds,
        prediction_seconds=predicted - start,
        decoding_seconds=decoded - predicted,
    )


def _predict(predictor: Predictor, candidate: Candidate, progress: Progress) -> Prediction:
    prediction = predictor.predict(candidate.draft, candidate.draft_length)
    progress.advance()
    return prediction


def _measure(
    bench: Bench, candidates: Sequence[Candidate], indices: Sequence[int], progress: Progress
) -> list[Measurement]:
    return [
        measurement
        for chunk in _chunks(candidates, CHUNK)
        for measurement in bench.side_by_side(chunk, indices, on_sample=lambda _: progress.advance())
    ]


def _chunks(candidates: Sequence[Candidate], size: int) -> Iterator[list[Candidate]]:
    remaining = iter(candidates)
    while chunk := list(islice(remaining, size)):
        yield chunk


def _of_category(
    prediction: Prediction, measurement: Measurement, indices: Collection[int], parts: Mapping[int, Sequence[int]]
) -> OfCategory:
    """Return both speed-ups on the prompts at `indices`; `parts` are those of `Predictor.parts`."""
    samples = tuple(sample for sample in measurement.samples if sample.prompt in indices)
    predicted = prediction.replayed.speedup_on([part for index in indices for part in parts[index]])
    return OfCategory(predicted=predicted, measured=Measurement(samples=samples).speedup)


def _compared(
    candidate: Candidate,
    prediction: Prediction,
    corrected: float,
    measurement: Measurement,
    categories: dict[str, OfCategory],
) -> Compared:
    replayed = prediction.replayed
    return Compared(
        candidate=candidate,
        kind=kind_of(candidate.draft),
        predicted=prediction.speedup,
        corrected=corrected,
        measured=measurement.speedup_interval(),
        predicted_tokens_per_round=replayed.tokens / replayed.rounds,
        measured_tokens_per_round=measurement.tokens_per_round,
        predicted_round_cost=replayed.cost / replayed.rounds,
        measured_round_cost=measurement.tokens_per_round / measurement.speedup,
        measurement=measurement,
        categories=categories,
    )
