"""Replays: the rounds of real greedy decoding, from a recording alone, and what they would cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor

from decoding.decode import Request, speculative
from decoding.decoder import plain_decoder
from decoding.draft_length import RULES as ALL_RULES
from decoding.draft_length import (
    AdaEdl,
    BetaThompson,
    Controller,
    CostAwareRule,
    Decision,
    DraftDistribution,
    DraftLengthRule,
    Fixed,
    RoundCosts,
    TopProbability,
)
from decoding.drafters.build import build_drafter
from decoding.drafts import EarlyExit
from decoding.profile import Decoding
from decoding.rounds import Generation, Round
from decoding.target import Target
from decoding.target.states import exit_logits, exit_states
from decoding.text import Ending
from studies.prediction.replay import Recording, replay
from tests.support.draft_recordings import recorded
from tests.support.tiny import tiny_target

COSTS = RoundCosts(draft_step=0.25, verify=(1.0, 1.1, 1.3))
PROMPT = (3, 9, 27, 14, 42, 5)


class Watched(Fixed):
    """A fixed length whose controllers are kept, each with the rounds that it saw."""

    _made: list[_Watching] = PrivateAttr(default_factory=list)

    def controller(self) -> Controller:
        self._made.append(_Watching(self.max_tokens))
        return self._made[-1]

    @property
    def rounds(self) -> list[list[tuple[int, int]]]:
        return [controller.rounds for controller in self._made]


class _Watching(Controller):
    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.rounds: list[tuple[int, int]] = []

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.rounds.append((num_drafted, num_accepted))


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def text(target: Target) -> tuple[int, ...]:
    return plain_decoder(target).generate(Request(PROMPT, Ending(40))).tokens


def recording_of(target: Target, text: Sequence[int], exit_layer: int) -> Recording:
    ids = torch.tensor([[*PROMPT, *text[:-1]]])
    with torch.inference_mode():
        states, logits = exit_states(target, ids, [exit_layer], first=len(PROMPT))
        drafted = exit_logits(target, ids, states[exit_layer], None, first=len(PROMPT))
    return Recording.of(logits[0], drafted[0])


def decoded(target: Target, exit_layer: int, rule: DraftLengthRule) -> tuple[Round, ...]:
    drafter = build_drafter(target, EarlyExit(exit_layer=exit_layer))
    assert drafter is not None
    return Generation.collect(speculative(target, drafter, rule.controller(), Request(PROMPT, Ending(40)))).rounds


def test_rounds_of_a_fixed_length_are_those_of_real_decoding(target: Target, text: tuple[int, ...]) -> None:
    exit_layer = 3
    recording = recording_of(target, text, exit_layer)
    for length in (1, 3, 7):
        watched = Watched(max_tokens=length)
        replayed = replay(watched, [recording], COSTS)
        real = decoded(target, exit_layer, Fixed(max_tokens=length))
        assert watched.rounds == [[(each.num_drafted, each.num_accepted) for each in real]]
        assert replayed.tokens == sum(len(each.tokens) for each in real) == 39
        assert replayed.cost == pytest.approx(sum(COSTS.of(each.num_drafted) for each in real))


@pytest.mark.parametrize("name", ALL_RULES)
def test_every_registered_rule_is_replayed(target: Target, text: tuple[int, ...], name: str) -> None:
    rule = ALL_RULES[name](max_tokens=6)
    rule = rule.with_costs(COSTS) if isinstance(rule, CostAwareRule) else rule
    replayed = replay(rule, [recording_of(target, text, 4)], COSTS)
    assert replayed.tokens == 39
    assert replayed.rounds <= 39
    assert replayed.cost > 0.0


def test_rule_without_memory_stops_as_in_decoding_up_to_a_rejection(target: Target, text: tuple[int, ...]) -> None:
    rule = TopProbability(max_tokens=6, threshold=0.5)

    class Stopping(_Watching):
        def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
            return rule.controller().decide(num_drafted, distribution)

    class WatchedStopping(Watched):
        def controller(self) -> Controller:
            self._made.append(Stopping(self.max_tokens))
            return self._made[-1]

    watched = WatchedStopping(max_tokens=6)
    replay(watched, [recording_of(target, text, 4)], COSTS)
    real = decoded(target, 4, rule)
    (rounds,) = watched.rounds
    assert [accepted for _, accepted in rounds] == [each.num_accepted for each in real]
    all_accepted = [index for index, each in enumerate(real) if each.num_accepted == each.num_drafted]
    assert len({real[index].num_drafted for index in all_accepted}) > 1
    assert [rounds[index][0] for index in all_accepted] == [real[index].num_drafted for index in all_accepted]


@pytest.mark.parametrize(
    ("matches", "cost"),
    [
        ("++-+++", 2 * (1.3 + 0.5)),  # two rounds of two drafts, all accepted, the third token the target's own
        ("+-++", (1.3 + 0.5) + (1.1 + 0.25)),  # the second rejected; then one draft and the last token
        ("----", 2 * (1.3 + 0.5) + (1.1 + 0.25) + 1.0),  # nothing accepted; drafts never reach past the text
        ("+", 1.0),  # the last token is the target's
    ],
)
def test_cost_of_a_replay_adds_up_by_hand(matches: str, cost: float) -> None:
    replayed = replay(Fixed(max_tokens=2), [recorded(matches)], COSTS)
    assert (replayed.tokens, replayed.cost) == (len(matches), pytest.approx(cost))
    assert replayed.speedup == pytest.approx(len(matches) / cost)


def test_pass_of_a_token_that_is_not_drawn_is_paid() -> None:
    # The bound 1 - sqrt(H) is below 0.5 at the second token: a pass is run there, and what it says is not drafted.
    recording = recorded("++++", [0.0, 1.0, 0.0, 0.0])
    rule = AdaEdl(max_tokens=4, gamma=1.0, initial_threshold=0.5, step=0.0, keep_last=False)
    assert replay(rule, [recording], COSTS).cost == pytest.approx((1.1 + 2 * 0.25) + (1.1 + 0.25))
    kept = rule.model_copy(update={"keep_last": True})
    assert replay(kept, [recording], COSTS).cost == pytest.approx((1.3 + 2 * 0.25) + 1.0)


@pytest.mark.parametrize(("persistent", "num_controllers"), [(False, 3), (True, 1)])
def test_texts_share_a_controller_if_the_rule_is_persistent(persistent: bool, num_controllers: int) -> None:
    rule = Watched(max_tokens=2, persistent=persistent)
    replayed = replay(rule, [recorded("++-")] * 3, COSTS)
    assert len(rule.rounds) == num_controllers
    assert replayed.tokens == 9


def test_cost_aware_rule_weighs_the_costs_of_the_replay() -> None:
    recordings = [recorded("+" * 60)] * 4
    cheap = replay(BetaThompson(), recordings, RoundCosts(draft_step=0.05, verify=(1.0, 1.02)))
    expensive = replay(BetaThompson(), recordings, RoundCosts(draft_step=3.0, verify=(1.0, 4.0)))
    assert cheap.speedup > 2
    assert expensive.speedup == pytest.approx(1.0), "no acceptance is worth a draft of three passes"


def test_greedy_recording_compares_the_most_likely_tokens() -> None:
    target = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    draft = torch.tensor([[3.0, 1.0, 0.0], [3.0, 1.0, 0.0]])
    recording = Recording.of(target, draft)
    assert recording.matches == (True, False)
    assert recording.agreement == 0.5
    for seen, scores in zip(recording.seen, draft, strict=True):
        asked = DraftDistribution(scores)
        assert (seen.top_probability, seen.entropy) == pytest.approx((asked.top_probability, asked.entropy))
    expected = [torch.minimum(p.softmax(-1), q.softmax(-1)).sum() for p, q in zip(target, draft, strict=True)]
    assert recording.acceptance == pytest.approx(float(sum(expected)) / 2, rel=5e-4)  # kept in float16


def _sampled(target: list[float], draft: list[float], **options: Any) -> Recording:
    rows: list[Tensor] = [torch.tensor(logits).repeat(4000, 1) for logits in (target, draft)]
    return Recording.of(*rows, Decoding(temperature=0.5), **options)


def test_sampled_drafts_are_accepted_as_often_as_the_distributions_overlap() -> None:
    recording = _sampled([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    p, q = (torch.tensor(logits).div(0.5).softmax(-1) for logits in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]))
    overlap = float(torch.minimum(p, q).sum())
    assert recording.acceptance == pytest.approx(overlap, abs=1e-5)
    assert recording.agreement == pytest.approx(overlap, abs=0.03)  # four standard errors
    assert recording.seen[0].top_probability == pytest.approx(float(q.max()))
    assert _sampled([1.0, 0.0], [1.0, 0.0]).agreement == 1.0
    assert _sampled([90.0, 0.0], [0.0, 90.0]).agreement == 0.0
