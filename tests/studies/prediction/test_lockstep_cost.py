"""Sequences in lockstep: predicted passes equal the passes of decoding, and have a cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import BetaThompson, DraftLengthRule, Fixed, RoundCosts
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PromptLookup
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.target import Target
from decoding.text import Ending
from studies.prediction.predictor import Predictor
from studies.prediction.replay import (
    Asked,
    LockstepBatches,
    Recording,
    ReplayedRound,
    cost_in_lockstep,
    passes_in_lockstep,
    replay,
)
from studies.prediction.survey import Survey
from tests.support.costs import made_up_costs
from tests.support.draft_recordings import recorded
from tests.support.heads import write_heads
from tests.support.shared_passes import watch_shared_passes
from tests.support.tiny import tiny_target

COSTS = RoundCosts(draft_step=0.25, verify=(1.0, 1.1, 1.3, 1.6))
WHOLE = RoundCosts(draft_step=0.001, verify=(1.0, 1.5, 2.0))
SIZES = ((8, 33), (8, 20), (4, 27))
"""Lengths of the prompts and of their continuations."""


@pytest.fixture(scope="module")
def target() -> Target:
    made = tiny_target()
    assert made.unbatchable_reason is None
    return made


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    prompts = ((3, 9, 27, 3, 9, 27, 3, 9), (8, 2, 31, 8, 2, 44, 8, 2), (5, 6, 7, 9))
    return [Request(prompt, Ending(new_tokens)) for prompt, (_, new_tokens) in zip(prompts, SIZES, strict=True)]


@pytest.fixture(scope="module")
def survey(target: Target, requests: list[Request], tmp_path_factory: pytest.TempPathFactory) -> Survey:
    texts = [plain_decoder(target).generate(each).tokens for each in requests]
    heads = HeadFolder(target, tmp_path_factory.mktemp("heads"))
    return Survey(target, [each.prompt for each in requests], texts, depth=4, heads=heads)


def rounds_of(decoder: Decoder, requests: Sequence[Request]) -> list[list[ReplayedRound]]:
    """The rounds of each sequence when it is decoded alone, with a draft in every pass for rules that draw."""
    return [
        [
            ReplayedRound(
                step.num_drafted, 0 if step.looked_up else step.num_drafted, step.num_accepted, step.looked_up
            )
            for step in decoder.generate(request).rounds
        ]
        for request in requests
    ]


@pytest.mark.parametrize(
    ("kind", "lookup", "prefix_reuse"),
    [
        ("blocks", None, True),
        ("first block", Lookup(max_tokens=3), False),
        ("exit", Lookup(max_tokens=3), True),
        ("head", None, True),
        ("nothing is drafted now and then", None, True),
    ],
)
def test_passes_are_those_of_decoding(
    kind: str,
    lookup: Lookup | None,
    prefix_reuse: bool,
    target: Target,
    requests: list[Request],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule: DraftLengthRule = Fixed(max_tokens=3)
    draft: Any = LayerSkip.blocks((1, 2, 4))
    if kind == "first block":
        draft = LayerSkip.blocks((0, 2))
    elif kind == "exit":
        draft = EarlyExit(exit_layer=3)
    elif kind == "head":
        draft = write_heads(target, tmp_path, [2])[2]
    elif kind.startswith("nothing"):
        rule = BetaThompson(max_tokens=3, costs=RoundCosts(draft_step=0.6, verify=(1.0, 1.1, 1.2, 1.3)))
    draft = draft.model_copy(update={"lookup": lookup})
    decoder = Decoder(target, draft, rule, Decoding(prefix_reuse=prefix_reuse), heads=HeadFolder(target, tmp_path))
    together = LockstepBatches(((0, 1, 2),)).of_draft(draft, Decoding(prefix_reuse=prefix_reuse))
    asked = [together.asked(rounds, COSTS, WHOLE) for rounds in rounds_of(decoder, requests)]
    predicted = [(len(shared), shared[0].verifies) for shared in passes_in_lockstep(asked)]

    passes: list[tuple[int, bool]] = []
    watch_shared_passes(target, monkeypatch, lambda part, spans: passes.append((len(spans), part.verifies)))
    decoder.generate_batch(requests)
    assert predicted == passes
    if kind.startswith("nothing"):
        assert len({num_texts for num_texts, _ in passes}) > 1


def test_pass_costs_as_much_as_its_most_expensive_sequence() -> None:
    together = LockstepBatches(((0, 1),))
    texts = [[ReplayedRound(2, 2, 2)], [ReplayedRound(1, 1, 0), ReplayedRound(0, 0, 0)]]
    # Two draft steps, the first of both; both verifications together, as wide as the wider; the rest of the second text.
    assert cost_in_lockstep(together.asked(steps, COSTS, None) for steps in texts) == pytest.approx(
        0.25 * 2 + 1.3 + 1.0
    )


def test_texts_that_want_different_parts_share_nothing() -> None:
    resumes = LockstepBatches(((0, 1),), resumes=True)
    texts = [[ReplayedRound(1, 1, 0)], [ReplayedRound(0, 0, 0)], [ReplayedRound(2, 0, 0, looked_up=True)]]
    passes = list(passes_in_lockstep(resumes.asked(steps, COSTS, WHOLE) for steps in texts))
    assert [[each.cost for each in shared] for shared in passes] == [[0.25], [1.0, 2.0], [1.1]]
    assert cost_in_lockstep(iter([each]) for each in (Asked("a", True, 2.0), Asked("b", True, 3.0))) == 5.0


@pytest.mark.parametrize("matches", ["+++-++-", "-------", "+++++++"])
def test_equal_sequences_in_lockstep_cost_as_much_as_one(matches: str) -> None:
    rule = Fixed(max_tokens=2)
    one = replay(rule, [recorded(matches)], COSTS)
    three = replay(rule, [recorded(matches)] * 3, COSTS, None, LockstepBatches(((0, 1, 2),)))
    assert three.speedup == pytest.approx(one.speedup)
    assert three.costs_per_token == pytest.approx(one.costs_per_token)
    assert (three.tokens, three.rounds, three.draft_passes) == tuple(
        3 * count for count in (one.tokens, one.rounds, one.draft_passes)
    )


def test_text_that_is_drafted_wrong_holds_up_the_others() -> None:
    rule = Fixed(max_tokens=2)
    recordings = [recorded("+++++++++"), recorded("---------")]
    together = replay(rule, recordings, COSTS, None, LockstepBatches(((0, 1),)))
    right, wrong = (replay(rule, [each], COSTS) for each in recordings)
    assert wrong.speedup < 1 < right.speedup
    assert together.speedup <= wrong.speedup * (1 + 1e-9)
    assert together.speedup_on([0]) == pytest.approx(together.speedup)


def test_plain_decoding_of_a_batch_takes_as_long_as_its_longest_text() -> None:
    """A rule that never drafts is plain decoding, whatever the lengths of the texts."""
    recordings: list[Recording] = [recorded("++++++"), recorded("--"), recorded("+-+")]
    never = BetaThompson(max_tokens=2)
    costs = RoundCosts(draft_step=5.0, verify=(1.0, 9.0, 19.0))
    replayed = replay(never, recordings, costs, None, LockstepBatches(((0, 1), (2,))))
    assert replayed.draft_passes == 0
    assert replayed.speedup == pytest.approx(1.0)
    assert replayed.costs_per_token == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("draft", [LayerSkip.blocks((1, 2)), PromptLookup(), EarlyExit(exit_layer=2, lookup=Lookup())])
def test_predictions_are_in_lockstep_where_passes_are_shared(draft: Any, target: Target, survey: Survey) -> None:
    def predictor(**how: Any) -> Predictor:
        return Predictor(survey, made_up_costs(target), max_tokens=4, **how)

    rule = Fixed(max_tokens=4)
    alone, decode_in_lockstep = predictor(), predictor(batch_size=3)
    assert decode_in_lockstep.parts == {0: (0,)}
    assert alone.parts == {0: (0,), 1: (1,), 2: (2,)}
    one, three = alone.predict(draft, rule).replayed, decode_in_lockstep.predict(draft, rule).replayed
    assert (three.tokens, three.rounds) == (one.tokens, one.rounds)
    lengths = [new_tokens - 1 for _, new_tokens in SIZES]
    costs = [cost * length for cost, length in zip(one.costs_per_token, lengths, strict=True)]
    (in_all,) = (cost * max(lengths) for cost in three.costs_per_token)
    assert max(costs) <= in_all * (1 + 1e-9) < sum(costs)


def test_sequences_that_cannot_share_passes_are_predicted_singly(
    target: Target, survey: Survey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "unbatchable_reason", "for the sake of the test")
    draft, rule = LayerSkip.blocks((1, 2)), Fixed(max_tokens=2)
    alone = Predictor(survey, made_up_costs(target), max_tokens=4)
    turns = Predictor(survey, made_up_costs(target), max_tokens=4, batch_size=2)
    assert turns.predict(draft, rule).replayed == alone.predict(draft, rule).replayed
    assert turns.parts == {0: (0, 1), 1: (2,)}
