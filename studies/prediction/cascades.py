"""Predict cascades: every stage is replayed, and the choice between them by the chooser that decoding uses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from decoding.draft_length import DraftLengthRule, RoundCosts
from decoding.drafters.build import stage_rule
from decoding.drafts import Cascade, CascadeStage, Draft, StageChoice
from studies.prediction.contract import DraftPredictor, Prediction
from studies.prediction.predictor import Predictor
from studies.prediction.replay import CascadeReplay, LookupReplay, ModelReplay

LEAST_CASCADE_GAIN = 0.01
"""Least predicted gain over the best draft in the pool for which a cascade is worth a trial."""
NUM_TRIED, NUM_CASCADES = 2, 2
"""Number of drafts after a lookup that are tried with a choice, and of cascades that join the pool at most."""
COPIED = (4, 8)
"""Tokens to copy, of the copying stages that are tried."""
PRICED_TOKENS = 4
"""Drafted tokens of a round whose cost gives the prices of a choice."""


class CascadePredictor(DraftPredictor[Cascade]):
    """Replays all stages of a cascade."""

    def predict(self, draft: Cascade, rule: DraftLengthRule, known: Predictor) -> Prediction:
        """Replay `rule` on the recordings of the last stage, after the others."""
        keeper = next((stage.draft for stage in draft.stages if stage.draft.has_head), None)
        copies, models = list[LookupReplay](), list[ModelReplay]()
        for stage in draft.stages[:-1]:
            assert stage.max_tokens is not None, "of every stage but the last"
            if (source := stage.draft.copy_source) is not None:
                copies.append(known.copying(source, stage.max_tokens))
            else:
                models.append(_model(stage, keeper, known))
        return known.replay_cascade(draft, rule, CascadeReplay(copies, models, draft.choice))


def _model(stage: CascadeStage, keeper: Draft | None, known: Predictor) -> ModelReplay:
    """Return the replay of a stage; if another one keeps the states of a head, the whole target verifies its rounds."""
    rule, costs = stage_rule(stage), known.costs(stage.draft)
    assert rule is not None, "of every stage but the last"
    if keeper is not None and keeper != stage.draft:
        costs = costs.model_copy(update={"verify": known.whole.verify})
    costs = costs.looking() if rule.controller().looks_at_drafts else costs
    return ModelReplay(known.survey.record(stage.draft), rule, costs)


def cascades(known: Predictor, pool: Sequence[Draft]) -> list[Draft]:
    """Return the best cascades of drafts in `pool` that are predicted to beat every one of them by `LEAST_CASCADE_GAIN`.

    Tried are lookups that must pay, before the best drafts, and choices between the best copy and the two best models of
    different kinds. Prices are read off the cost table.
    """
    rated = known.best_first(pool)
    tried: list[Draft] = [with_choice(each.draft, known) for each in rated if each.draft.lookup_first is not None][
        :NUM_TRIED
    ]
    tried += choices_between(known, rated)
    least = rated[0].speedup * (1 + LEAST_CASCADE_GAIN) if rated else 0.0
    better = [each.draft for each in known.best_first(tried) if each.speedup >= least]
    return better[:NUM_CASCADES]


def choices_between(known: Predictor, rated: Sequence[Prediction]) -> list[Cascade]:
    """Return choices between the two best models of different kinds in `rated`, alone and after its best copy, in both orders.

    `rated` is best first. Without two kinds that run the model, or with a trained head in both, there is nothing to choose.
    """
    copies = [each.draft for each in rated if each.draft.copy_source is not None][:1]
    models: dict[str, Prediction] = {}
    for each in rated:
        draft = each.draft
        if draft.runs_model and draft.lookup_first is None and draft.candidate_tree is None:
            models.setdefault(draft.label, each)
    best = list(models.values())[:2]
    if len(best) < 2 or all(each.draft.has_head for each in best):
        return []
    before = [[], *([CascadeStage(draft=copy, max_tokens=most)] for copy in copies for most in COPIED)]
    return [_chosen(known, stages, *pair) for stages in before for pair in permutations(best)]


def _chosen(known: Predictor, copies: list[CascadeStage], first: Prediction, last: Prediction) -> Cascade:
    """Return the choice between copies and two models, the first with the rule that suits it best."""
    threshold = first.rule.model_dump().get("threshold")
    stages = [
        *copies,
        CascadeStage(draft=first.draft, max_tokens=first.rule.max_tokens, threshold=threshold),
        CascadeStage(draft=last.draft),
    ]
    costs = [known.costs(stage.draft) if stage.draft.runs_model else known.whole for stage in stages]
    return Cascade(stages=tuple(stages), choice=StageChoice(prices=tuple(map(price_of, costs))))


def with_choice(draft: Draft, known: Predictor) -> Draft:
    """Return a draft with a lookup before it, whose lookup must pay: the prices are read off the cost table."""
    lookup = draft.lookup_first
    assert lookup is not None, "there is a lookup to choose"
    prices = price_of(known.whole), price_of(known.costs(draft))
    return draft.with_lookup(lookup.with_choice(StageChoice(prices=prices)))


def price_of(costs: RoundCosts) -> float:
    """Return the cost of a drafted token and its verification, beyond the plain pass that a round takes."""
    return round(max(costs.of(PRICED_TOKENS) - 1.0, 0.0) / PRICED_TOKENS, 4)
