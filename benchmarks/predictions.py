"""Predicted speed-ups against real decoding, for random configurations of every kind.

All are predicted from one survey of the plain outputs and a table of costs that is measured here, then decoded on the same
prompts: differences are errors of the prediction, not of the choice of prompts. Tables show rank correlation, errors and bias: of
all, by kind of draft, by rule, by category, and with the correction that a search would have made from all other configurations.
Adaptive rules start cold on every prompt, as in the replay. A trial of a search has fewer prompts, so its noise is larger.

    python -m benchmarks.predictions --config configs/demo.yaml --configurations 20 --bits 8 --json predictions.json
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import stats

from benchmarks.random_candidates import kind_of, random_candidates
from benchmarks.results import show, write
from benchmarks.task import Printed, facts_of, head_drafts, read_config, search_arguments
from decoding.draft_length import RULES
from studies.contract import Candidate
from studies.measurement import Measurement
from studies.prediction.guided import Residual
from studies.prediction.predictor import Predictor
from studies.prediction.predictors import Prediction
from studies.prediction.survey import Survey
from tuner.measuring.cost_table import measure_cost_table
from tuner.search.task import open_bench, prepare

CHUNK = 6
"""Configurations that are measured side by side and share one plain decoding per prompt."""


@dataclass(frozen=True)
class PredictedPair:
    """A configuration, its prediction, the corrected one, and its measurement."""

    candidate: Candidate
    prediction: Prediction
    corrected: float
    measured: Measurement


def main() -> None:
    """Predict, decode, print and write."""
    parser = search_arguments(__doc__)
    parser.add_argument("--configurations", type=int, default=60, help="random configurations, at least 3")
    parser.add_argument("--prompts", type=int, default=16, help="most tuning prompts to predict and measure on")
    parser.add_argument("--max-tokens", type=int, default=12, help="longest draft")
    parser.add_argument(
        "--bits", type=int, nargs="*", choices=(4, 8), default=[], help="precisions of quantised drafts"
    )
    args = parser.parse_args()
    progress = Printed()
    task = prepare(read_config(args), progress)
    heads, seed = head_drafts(task), task.config.seed
    bench = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
    prompts, outputs = bench.prompts[: args.prompts], bench.continuations[: args.prompts]
    lengths = [len(prompt) for prompt in prompts]
    contexts = sorted({min(lengths), max(lengths) + bench.max_new_tokens})
    start = time.perf_counter()
    costs = measure_cost_table(
        task.target, max_tokens=args.max_tokens, contexts=contexts, bits=tuple(args.bits), seed=seed
    )
    progress.say(costs.describe())
    candidates = random_candidates(
        task.target,
        args.configurations,
        seed,
        rules=tuple(RULES),
        max_tokens=args.max_tokens,
        heads=heads,
        bits=tuple(args.bits),
    )
    costed = time.perf_counter()
    survey = Survey(task.target, prompts, outputs, decoding=task.decoding, seed=seed, heads=task.head_folder)
    predictor = Predictor(survey, costs, max_tokens=args.max_tokens, decoding=task.decoding)
    progress.stage(f"predicting {len(candidates)} configurations")
    predictions = [predictor.predict(each.draft, each.draft_length) for each in candidates]
    predicted = time.perf_counter()
    progress.stage(f"decoding with {len(candidates)} configurations on {len(prompts)} prompts")
    measured: list[Measurement] = []
    for first in range(0, len(candidates), CHUNK):
        measured += bench.side_by_side(candidates[first : first + CHUNK], range(len(prompts)))
    seconds = {
        "costs": costed - start,
        "predictions": predicted - costed,
        "decoding": time.perf_counter() - predicted,
    }
    corrected = corrected_by_others(predictions, [each.speedup for each in measured])
    pairs = [PredictedPair(*parts) for parts in zip(candidates, predictions, corrected, measured, strict=True)]
    rows = [
        {"configurations": name, **accuracy(pairs_of, lambda pair: (pair.prediction.speedup, pair.measured.speedup))}
        for name, pairs_of in by_group(pairs).items()
    ]
    rows += [
        {
            "configurations": "all, corrected by all others",
            **accuracy(pairs, lambda p: (p.corrected, p.measured.speedup)),
        },
        {"configurations": "all: tokens per round", **accuracy(pairs, _tokens_per_round)},
        {"configurations": "all: cost of a round", **accuracy(pairs, _round_cost)},
    ]
    for name in sorted({name for pair in pairs for name in pair.measured.by_category()}):
        rows.append({"configurations": f"category {name}", **accuracy(pairs, partial(_on, predictor, name))})
    show("Predicted against measured speed-ups of random configurations", rows)
    wrong = sum(not each.is_lossless for each in measured)
    print(f"\n{wrong} of {len(measured)} configurations wrote other outputs than plain decoding")
    print("seconds: " + ", ".join(f"{value:.1f} for {name}" for name, value in seconds.items()))
    facts = {
        **facts_of(task),
        "accuracy": rows,
        "seconds": seconds,
        "costs": costs.model_dump(mode="json"),
        "samples": [each.model_dump(mode="json")["samples"] for each in measured],
    }
    write(args.json, facts, [_line(pair) for pair in pairs], device=task.target.device)


def by_group(pairs: Sequence[PredictedPair]) -> dict[str, list[PredictedPair]]:
    """Return all pairs, the pairs of each kind of draft and of each rule."""
    groups: dict[str, list[PredictedPair]] = {"all": list(pairs)}
    for pair in sorted(pairs, key=lambda pair: kind_of(pair.candidate.draft)):
        groups.setdefault(kind_of(pair.candidate.draft), []).append(pair)
    for pair in sorted(pairs, key=lambda pair: pair.candidate.draft_length.rule):
        groups.setdefault(pair.candidate.draft_length.rule, []).append(pair)
    return groups


def accuracy(
    pairs: Sequence[PredictedPair], figures: Callable[[PredictedPair], tuple[float, float]]
) -> dict[str, float | int | None]:
    """Return the agreement of predicted with measured figures; no correlation of fewer than 3 pairs or constant values."""
    logs = np.log(np.array([figures(pair) for pair in pairs]))
    errors = np.abs(np.exp(logs[:, 0] - logs[:, 1]) - 1)
    may_correlate = len(pairs) >= 3 and bool(np.all(np.ptp(logs, axis=0) > 0))
    return {
        "count": len(pairs),
        "Spearman": float(stats.spearmanr(logs[:, 0], logs[:, 1]).statistic) if may_correlate else None,
        "Pearson of logs": float(stats.pearsonr(logs[:, 0], logs[:, 1]).statistic) if may_correlate else None,
        "median error": float(np.median(errors)),
        "worst error": float(np.max(errors)),
        "measured / predicted": math.exp(float(np.mean(logs[:, 1] - logs[:, 0]))),
    }


def corrected_by_others(predictions: Sequence[Prediction], measured: Sequence[float]) -> list[float]:
    """Return predicted speed-ups, each corrected by all other pairs (leave one out), of which there is at least one."""
    corrected = []
    for index, prediction in enumerate(predictions):
        residual = Residual()
        for other, (known, speedup) in enumerate(zip(predictions, measured, strict=True)):
            if other != index:
                residual.learn(known, speedup)
        (value,), _ = residual.corrected([prediction])
        corrected.append(float(value))
    return corrected


def _tokens_per_round(pair: PredictedPair) -> tuple[float, float]:
    replayed = pair.prediction.replayed
    return replayed.tokens / replayed.rounds, pair.measured.tokens_per_round


def _round_cost(pair: PredictedPair) -> tuple[float, float]:
    replayed = pair.prediction.replayed
    return replayed.cost / replayed.rounds, pair.measured.tokens_per_round / pair.measured.speedup


def _on(predictor: Predictor, category: str, pair: PredictedPair) -> tuple[float, float]:
    """Return both speed-ups on the prompts of a category."""
    measured = pair.measured.by_category()[category]
    parts = [part for sample in measured.samples for part in predictor.parts[sample.prompt]]
    return pair.prediction.replayed.speedup_on(parts), measured.speedup


def _line(pair: PredictedPair) -> dict[str, object]:
    low, high = pair.measured.speedup_interval().ci95
    return {
        "kind": kind_of(pair.candidate.draft),
        "draft": pair.candidate.draft.describe(),
        "rule": pair.candidate.draft_length.describe(),
        "predicted": pair.prediction.speedup,
        "corrected": pair.corrected,
        "measured": pair.measured.speedup,
        "low": low,
        "high": high,
        "prompts": len(pair.measured.samples),
        "identical": pair.measured.num_identical,
        "ties": pair.measured.num_ties,
    }


if __name__ == "__main__":
    main()
