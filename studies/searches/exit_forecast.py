"""Forecasts of every exit of a model, from one teacher-forced pass over plain decoding and from measured costs.

Our formulation. A forecast orders the exits; real decoding
decides which is best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from decoding.documents.strict_yaml import Document
from decoding.draft_length import AnyRule, DraftLengthRule, Fixed, RoundCosts, TopProbability
from decoding.drafts import EarlyExit
from decoding.lockstep import shared_batch_size
from decoding.timing.draft_costs import measure_draft_costs
from studies.contract import Problem
from studies.prediction.lockstep_cost import LockstepBatches, batches_of
from studies.prediction.replay import Recording, replay
from studies.prediction.survey import Survey

TIMED_EXITS = 3
"""Number of exits whose costs are measured; the others are interpolated, as every block costs the same."""

THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


class ExitForecast(Document):
    """A prediction on tuning prompts. Never reported as a measurement."""

    draft: EarlyExit
    agreement: float
    """Share of positions at which a drafted token would be accepted."""
    acceptance: float
    """Mean over positions of sum over v of min(p, q), the exact sampling acceptance."""
    rule: AnyRule
    """The rule with the best prediction, among fixed lengths and top-probability thresholds."""
    speedup: float
    """Predicted speed-up with `rule`."""


def forecast_exits(problem: Problem, drafts: Sequence[EarlyExit], max_tokens: int) -> list[ExitForecast]:
    """Return a forecast for each of `drafts`, the best first. Needs a continuation of at least two tokens."""
    survey = Survey(
        problem.target,
        problem.prompts,
        problem.continuations,
        decoding=problem.decoding,
        seed=problem.seed,
        heads=problem.heads,
    )
    recordings = survey.record_all(drafts)
    costs = _costs(problem, drafts, max_tokens)
    batches = LockstepBatches(
        tuple(batches_of(survey.indices, shared_batch_size(problem.target, problem.batch_size)).values())
    )

    def forecast(draft: EarlyExit, recorded: Sequence[Recording]) -> ExitForecast:
        lockstep, max_drafted = batches.of_draft(draft, problem.decoding), problem.target.max_drafted
        speedups = {
            rule: replay(rule, recorded, costs[draft], None, lockstep, max_drafted=max_drafted).speedup
            for rule in _rules(max_tokens)
        }
        return _best_forecast(draft, recorded, speedups)

    return sorted(map(forecast, drafts, recordings), key=lambda forecast: -forecast.speedup)


def _best_forecast(
    draft: EarlyExit, recordings: Sequence[Recording], speedups: Mapping[DraftLengthRule, float]
) -> ExitForecast:
    """Return the forecast with the rule of the highest speed-up."""
    rule = max(speedups, key=lambda rule: speedups[rule])
    return ExitForecast(
        draft=draft,
        agreement=float(np.mean([recording.agreement for recording in recordings])),
        acceptance=float(np.mean([recording.acceptance for recording in recordings])),
        rule=rule,
        speedup=speedups[rule],
    )


def _rules(max_tokens: int) -> list[DraftLengthRule]:
    fixed: list[DraftLengthRule] = [Fixed(max_tokens=length) for length in range(1, max_tokens + 1)]
    return [*fixed, *(TopProbability(max_tokens=max_tokens, threshold=threshold) for threshold in THRESHOLDS)]


def _costs(problem: Problem, drafts: Sequence[EarlyExit], max_tokens: int) -> dict[EarlyExit, RoundCosts]:
    costs: dict[EarlyExit, RoundCosts] = {}
    for group in _by_kind(drafts):
        indices = np.linspace(0, len(group) - 1, min(TIMED_EXITS, len(group))).round().astype(int)
        timed: dict[int, RoundCosts] = {}
        for draft in (group[index] for index in indices):
            measured = measure_draft_costs(
                problem.target,
                draft,
                max_tokens,
                problem.decoding,
                heads=problem.heads,
                num_sequences=problem.batch_size,
            )
            assert measured is not None, "an early exit drafts"
            timed[draft.exit_layer] = measured
        costs |= {draft: _interpolate(timed, draft.exit_layer) for draft in group}
    return costs


def _by_kind(drafts: Sequence[EarlyExit]) -> Iterator[list[EarlyExit]]:
    """Yield the drafts without a head, then those with one, by exit layer."""
    for has_head in (False, True):
        group = [draft for draft in drafts if (draft.head is not None) == has_head]
        if group:
            yield sorted(group, key=lambda draft: draft.exit_layer)


def _interpolate(timed: Mapping[int, RoundCosts], exit_layer: int) -> RoundCosts:
    layers = sorted(timed)
    between = [np.interp(exit_layer, layers, [timed[layer].draft_step for layer in layers])]
    widths = range(len(timed[layers[0]].verify))
    between += [np.interp(exit_layer, layers, [timed[layer].verify[width] for layer in layers]) for width in widths]
    draft_step, *verify = (float(value) for value in between)
    look = float(np.interp(exit_layer, layers, [timed[layer].look for layer in layers]))
    return RoundCosts(draft_step=draft_step, look=look, verify=tuple(verify))
