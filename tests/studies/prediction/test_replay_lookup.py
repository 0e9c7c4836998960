"""Replays of prompt lookup: the rounds of real decoding, from the text alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import BetaThompson, DraftLengthRule, Fixed, RoundCosts
from decoding.drafters.prompt_lookup import look_up
from decoding.drafts import (
    EarlyExit,
    FirstLookup,
    LayerSkip,
    Lookup,
    PromptLookup,
    SuffixDraft,
    SuffixLookup,
)
from decoding.drafts.history import RequestHistory
from decoding.drafts.lookup import CopySettings
from decoding.profile import Decoding
from decoding.rounds import Round
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from studies.prediction.predictor import Predictor
from studies.prediction.replay import LookupReplay, replay, replay_copies
from studies.prediction.survey import Guess, Survey
from tests.support.costs import made_up_costs
from tests.support.tiny import tiny_target

NUM_LAYERS = 6
PROMPTS = ((3, 9, 27, 3, 9, 27, 3, 9), (8, 2, 31, 8, 2, 44, 8, 2), (5, 6, 7, 9))
COSTS = RoundCosts(draft_step=0.25, verify=(1.0, 1.1, 1.3))
WHOLE = RoundCosts(draft_step=0.001, verify=(1.0, 1.2, 1.4))


def guess(lookup: CopySettings) -> Guess:
    return partial(look_up, source=lookup)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(NUM_LAYERS)


@pytest.fixture(scope="module")
def texts(target: Target) -> list[tuple[int, ...]]:
    return [plain_decoder(target).generate(Request(prompt, Ending(40))).tokens for prompt in PROMPTS]


@pytest.mark.parametrize("draft", [LayerSkip.blocks([2, 4]), EarlyExit(exit_layer=3)], ids=lambda draft: draft.kind)
@pytest.mark.parametrize(
    "front",
    [
        Lookup(max_ngram=4, min_ngram=2, max_tokens=6),
        SuffixLookup(max_tokens=6),
    ],
    ids=lambda front: front.describe(),
)
def test_rounds_with_a_lookup_before_a_draft_equal_decoding(
    target: Target, texts: list[tuple[int, ...]], draft: LayerSkip | EarlyExit, front: FirstLookup
) -> None:
    survey = Survey(target, PROMPTS, texts, depth=2)
    rule = Fixed(max_tokens=2)
    decoder = Decoder(target, draft.model_copy(update={"lookup": front}), rule)
    decoded = [decoder.generate(Request(prompt, Ending(40))) for prompt in PROMPTS]
    lookup = LookupReplay(survey.copies(guess(front), front.max_tokens), front.max_tokens, WHOLE)
    replayed = replay(rule, survey.record(draft), COSTS, lookup)
    rounds = [step for each in decoded for step in each.rounds]
    assert any(step.looked_up and step.num_accepted for step in rounds)
    assert any(step.num_drafted and not step.looked_up for step in rounds)
    assert replayed.rounds == len(rounds)
    assert replayed.draft_passes == sum(step.num_drafted for step in rounds if not step.looked_up)
    cost = sum(WHOLE.verify_cost(step.num_drafted) if step.looked_up else COSTS.of(step.num_drafted) for step in rounds)
    assert replayed.cost == pytest.approx(cost)
    assert replayed.tokens == sum(each.num_decoded for each in decoded)


@pytest.mark.parametrize("rule", [Fixed(max_tokens=4), BetaThompson(max_tokens=5)], ids=lambda rule: rule.rule)
@pytest.mark.parametrize("draft", [PromptLookup(max_ngram=2), SuffixDraft()], ids=lambda draft: draft.kind)
def test_rounds_of_a_lookup_alone_are_those_of_decoding(
    target: Target, texts: list[tuple[int, ...]], draft: PromptLookup | SuffixDraft, rule: DraftLengthRule
) -> None:
    survey = Survey(target, PROMPTS, texts)
    real = rule.with_costs(WHOLE) if isinstance(rule, BetaThompson) else rule
    rounds = [
        step for prompt in PROMPTS for step in Decoder(target, draft, real).generate(Request(prompt, Ending(40))).rounds
    ]
    assert any(step.num_accepted > 1 for step in rounds)
    replayed = replay_copies(rule, survey.copies(guess(draft), rule.max_tokens), WHOLE)
    assert replayed.rounds == len(rounds)
    assert replayed.cost == pytest.approx(sum(WHOLE.of(step.num_drafted) for step in rounds))
    assert replayed.draft_passes == 0


def test_rounds_in_which_a_draft_checks_copies_equal_decoding(target: Target, texts: list[tuple[int, ...]]) -> None:
    front = Lookup(max_ngram=4, min_ngram=1, direct_from=3, max_tokens=3)
    draft, rule, survey = LayerSkip(skip_attention=(2,)), Fixed(max_tokens=4), Survey(target, PROMPTS, texts, depth=4)
    predictor = Predictor(survey, made_up_costs(target), max_tokens=4)
    predicted = predictor.predict(draft.having(lookup=front), rule).replayed
    alone = predictor.predict(draft.having(lookup=front.model_copy(update={"min_ngram": 3, "direct_from": None})), rule)
    decoder = Decoder(target, draft.having(lookup=front), rule)
    rounds = [step for prompt in PROMPTS for step in decoder.generate(Request(prompt, Ending(40))).rounds]
    assert predicted.rounds == alone.replayed.rounds == len(rounds)
    assert predicted.draft_passes < alone.replayed.draft_passes
    assert predicted.cost < alone.replayed.cost


def test_rounds_after_earlier_answers_are_those_of_decoding(target: Target, texts: list[tuple[int, ...]]) -> None:
    draft, rule, prompts, answers = SuffixDraft(min_match=2), Fixed(max_tokens=4), PROMPTS * 2, texts * 2
    history, decoder, rounds = RequestHistory(max_tokens=1000), Decoder(target, draft, rule), list[Round]()
    for prompt in prompts:
        written = decoder.generate(Request(prompt, Ending(40), history=history))
        history.add(written.tokens)
        rounds += written.rounds

    def replayed(decoding: Decoding) -> int:
        survey = Survey(target, prompts, answers, decoding=decoding)
        return replay_copies(rule, survey.copies(guess(draft), 4), WHOLE).rounds

    assert replayed(Decoding(history=1000)) == len(rounds) < replayed(Decoding())


def test_prediction_of_a_long_rule_does_not_depend_on_earlier_ones(
    target: Target, texts: list[tuple[int, ...]]
) -> None:
    survey, costs, draft = Survey(target, PROMPTS, texts), made_up_costs(target), PromptLookup(max_ngram=2)
    fresh, used = (Predictor(survey, costs, max_tokens=2) for _ in range(2))
    short, long = Fixed(max_tokens=2), Fixed(max_tokens=6)
    assert used.predict(draft, short).replayed.rounds > fresh.predict(draft, long).replayed.rounds
    assert used.predict(draft, long) == fresh.predict(draft, long)


def test_sampled_copies_are_accepted_as_often_as_their_tokens_are_likely(
    target: Target, texts: list[tuple[int, ...]]
) -> None:
    draft = PromptLookup(max_ngram=2)
    greedy, *sampled = (
        [
            num is not None and num.num_right
            for text in Survey(target, PROMPTS, texts, decoding=Decoding(temperature=t), seed=seed).copies(
                guess(draft), 1
            )
            for num in text
        ]
        for t, seed in [(0.0, 0), *((2.0, seed) for seed in range(60))]
    )
    where_right = [index for index, num in enumerate(greedy) if num]
    assert where_right
    assert all(not each[index] for each in sampled for index in range(len(greedy)) if index not in where_right)
    share = sum(bool(each[index]) for each in sampled for index in where_right) / (len(sampled) * len(where_right))
    expected = []
    with torch.inference_mode():
        for prompt, text in zip(PROMPTS, texts, strict=True):
            logits = target.model(torch.tensor([[*prompt, *text[:-1]]])).logits[0, len(prompt) :]
            expected += torch.softmax(logits / 2.0, -1).gather(1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
    assert share == pytest.approx(sum(expected[index] for index in where_right) / len(where_right), abs=0.04)


@pytest.mark.parametrize(
    "draft", [PromptLookup(), LayerSkip.blocks([2, 4]), EarlyExit(exit_layer=3, lookup=Lookup(max_tokens=6))]
)
def test_rounds_in_bit_exact_mode_fit_into_a_verification(
    texts: list[tuple[int, ...]], draft: PromptLookup | LayerSkip | EarlyExit
) -> None:
    exact = Target(tiny_target(NUM_LAYERS).model, partial(StaticRunner, compiled=False, exact_width=4))
    assert exact.max_drafted == 3
    survey, rule = Survey(exact, PROMPTS, texts, depth=3), Fixed(max_tokens=8)
    decoder = Decoder(exact, draft, rule)
    rounds = [decoder.generate(Request(prompt, Ending(40))).rounds for prompt in PROMPTS]
    assert max(each.num_drafted for text in rounds for each in text) == 3
    if isinstance(draft, PromptLookup):
        replayed = replay_copies(rule, survey.copies(guess(draft), 8), WHOLE, max_drafted=exact.max_drafted)
        assert replayed.rounds == sum(map(len, rounds))
        expected = sum(WHOLE.of(each.num_drafted) for text in rounds for each in text)
    else:
        front = draft.lookup and LookupReplay(survey.copies(guess(draft.lookup), 6), 6, WHOLE)
        recordings = survey.record(draft.model_copy(update={"lookup": None}))
        replayed = replay(rule, recordings, COSTS, front, max_drafted=exact.max_drafted)
        expected = sum(
            WHOLE.verify_cost(each.num_drafted) if each.looked_up else COSTS.of(each.num_drafted)
            for text in rounds
            for each in text
        )
    assert replayed.cost == pytest.approx(expected)
