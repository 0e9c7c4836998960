"""The costs of a round, on a clock that the passes themselves move, and the rules that ask for them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.decode import Request
from decoding.draft_length import BetaThompson, Controller, CostAwareRule, DraftLengthRule, Fixed, RoundCosts
from decoding.drafters.build import build_drafter
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafters.prompt_lookup import CopyDrafter, LookupFirst
from decoding.drafts import Draft, LayerSkip, Lookup, PlainDecoding, PromptLookup, SuffixDraft
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.contract import Outputs, Part
from decoding.target import Target
from decoding.text import TokenSequence
from decoding.timing.round_costs import LEAST_COST, MOST_SWEEPS, measure_round_costs, with_measured_costs
from tests.support.heads import write_heads
from tests.support.shared_passes import watch_shared_passes
from tests.support.tiny import tiny_target

SKIP = LayerSkip.blocks((2, 3))


@dataclass
class Clock:
    """Stands still but for what the passes take."""

    seconds: float = 0.0

    def read(self) -> float:
        return self.seconds


@dataclass
class TimedDrafter(Drafter):
    """A drafter that computes nothing, takes scripted seconds and records the positions of its drafts."""

    clock: Clock
    draft_seconds: float = 0.5
    first_seconds: float = 0.0
    """What the first step of a draft takes more."""
    look_seconds: float = 0.0
    """What a step takes more if a rule looks at what it gives."""
    verify_seconds: tuple[float, ...] = tuple(2.0 + 0.1 * width**2 for width in range(65))
    most: int = 64
    disturbed: dict[tuple[int, int], float] = field(default_factory=dict)
    """Extra seconds of the verification of this sweep and width."""
    positions: set[tuple[int, int]] = field(default_factory=set)
    asked: list[int] = field(default_factory=list)

    def prefill(self, text: TokenSequence, cache: KVCache) -> Tensor:
        self.clock.seconds += 1000.0
        return torch.zeros(1, 2)

    def draft(
        self, text: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        assert controller.limit() == limit
        self.positions.add((cache.length, text.length))
        self.asked.append(limit)
        drafted = min(limit, self.most)
        self.clock.seconds += drafted * self.draft_seconds + (self.first_seconds if drafted else 0.0)
        self.clock.seconds += drafted * self.look_seconds if controller.looks_at_drafts else 0.0
        return Proposal(drafted, None)

    def verify(self, text: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        sweep = self.asked.count(draft.num_tokens) - 1
        self.clock.seconds += self.verify_seconds[draft.num_tokens]
        self.clock.seconds += self.disturbed.get((sweep, draft.num_tokens), 0.0)
        return Outputs(torch.zeros(draft.num_tokens + 1, 2), None)


class TimedTarget(Target):
    """A tiny target whose plain pass takes two seconds of the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(tiny_target().model)
        self._clock = clock
        self.plain_seconds = 2.0

    def run(self, part: Part, token_ids: Tensor, cache: KVCache, start: int, **settings: Any) -> Outputs:
        assert token_ids.shape == (1, 1)
        self._clock.seconds += self.plain_seconds
        return Outputs(torch.zeros(1, 2), None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all that is measured."""
    planted = Clock()
    monkeypatch.setattr(time, "perf_counter", planted.read)
    return planted


def measure(clock: Clock, max_tokens: int, **settings: Any) -> RoundCosts:
    return measure_round_costs(TimedTarget(clock), TimedDrafter(clock, **settings), max_tokens)


def test_costs_are_in_plain_passes_and_widths_are_interpolated(clock: Clock) -> None:
    costs = measure(clock, 9)
    assert costs.draft_step == 0.25  # 0.5 s of 2 s
    # (2 + 0.1 n^2) s of 2 s at 0, 1, 2, 3, 4, 6, 8, 9; half-way between 1.8 and 2.8, and between 2.8 and 4.2.
    assert costs.verify == pytest.approx((1.0, 1.05, 1.2, 1.45, 1.8, 2.3, 2.8, 3.5, 4.2, 5.05))
    assert len(measure(clock, 64).verify) == 65


def test_disturbed_passes_do_not_count(clock: Clock) -> None:
    quiet = measure(clock, 8)
    assert measure(clock, 8, disturbed={(0, 2): 50.0, (1, 2): 50.0, (1, 4): 50.0, (4, 0): 50.0}) == quiet
    always = measure(clock, 8, disturbed={(sweep, 3): 50.0 for sweep in range(MOST_SWEEPS)}).verify
    assert always[3] == always[4] == pytest.approx(1.8), "no more than a wider one"
    assert always[:3] == quiet.verify[:3]


def test_load_that_slows_everything_alike_changes_nothing(clock: Clock) -> None:
    slow = tuple(3 * (2.0 + 0.1 * n**2) for n in range(65))
    target = TimedTarget(clock)
    target.plain_seconds = 6.0
    drafter = TimedDrafter(clock, draft_seconds=1.5, verify_seconds=slow)
    assert measure_round_costs(target, drafter, 9) == measure(clock, 9)


def test_what_is_too_short_for_the_clock_still_costs_something(clock: Clock) -> None:
    assert measure(clock, 4, draft_seconds=0.0).draft_step == LEAST_COST
    # Each on a clock of its own, so that the one that is read stands still.
    drafter = TimedDrafter(Clock())
    costs = measure_round_costs(TimedTarget(Clock()), drafter, 2)
    assert costs == RoundCosts(draft_step=0.5, verify=(1.0, 1.0, 1.0))  # a draft of two as long as one of one
    assert drafter.asked == [0, 1, 2, 2] * MOST_SWEEPS  # the longest again, looked at


@pytest.mark.parametrize(("budget_seconds", "num_sweeps"), [(0.0, 5), (1143.9, 5), (1144.1, 6), (1e9, MOST_SWEEPS)])
def test_sweeps_are_repeated_until_the_time_is_spent(clock: Clock, budget_seconds: float, num_sweeps: int) -> None:
    drafter = TimedDrafter(clock)
    # Reading the prompt takes 1000 s, a sweep 12 s for six plain steps, 4.5 s to draft and 12.3 s to verify: five end at 1144 s.
    measure_round_costs(TimedTarget(clock), drafter, 3, budget_seconds=budget_seconds)
    assert drafter.asked == [0, 1, 2, 3, 3] * num_sweeps


def test_extra_time_of_the_first_draft_step_counts_as_verification(clock: Clock) -> None:
    costs, even = measure(clock, 4, first_seconds=0.6), measure(clock, 4)
    for num_drafted in range(1, 5):
        # 0.5 s a step and 0.6 s more for the first, of 2 s for a plain one.
        assert costs.of(num_drafted) == pytest.approx(even.of(num_drafted) + 0.3, abs=2e-4)
    assert costs.of(0) == even.of(0)
    assert costs.draft_step == pytest.approx(0.25 + 0.3 / 4)


def test_a_rule_that_looks_at_each_token_pays_for_it(clock: Clock) -> None:
    costs, blind = measure(clock, 4, look_seconds=0.3), measure(clock, 4)
    assert costs.look == pytest.approx(0.15)  # 0.3 s of 2 s
    assert (costs.draft_step, costs.verify) == (blind.draft_step, blind.verify)
    assert blind.look == 0.0
    assert costs.looking().of(3) == pytest.approx(costs.of(3) + 0.45)
    assert costs.looking().look == 0.0, "paid once"


@pytest.mark.parametrize(
    ("context_length", "max_tokens", "position", "longest"),
    [(256, 8, 64, 8), (40, 8, 31, 8), (12, 16, 1, 10), (3, 8, 1, 1)],
)
def test_prompt_gives_way_to_the_drafts_and_the_drafts_to_the_context(
    clock: Clock, context_length: int, max_tokens: int, position: int, longest: int
) -> None:
    target, drafter = TimedTarget(clock), TimedDrafter(clock)
    target.config.max_position_embeddings = context_length
    costs = measure_round_costs(target, drafter, max_tokens)
    assert drafter.positions == {(position, position + 1)}
    assert max(drafter.asked) == len(costs.verify) - 1 == longest


def test_drafter_is_measured_as_far_as_it_goes(clock: Clock) -> None:
    costs = measure(clock, 8, most=3)
    assert costs.draft_step == 0.25
    assert costs.verify == pytest.approx((1.0, 1.05, 1.2, 1.45))
    with pytest.raises(ValueError, match="not a single token was drafted"):
        measure(clock, 8, most=0)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        measure(clock, 0)


def test_of_a_lookup_in_front_nothing_is_measured(clock: Clock) -> None:
    drafter = LookupFirst(TimedDrafter(clock), Lookup())
    assert measure_round_costs(TimedTarget(clock), drafter, 9) == measure(clock, 9)


def test_texts_that_take_turns_cost_each_what_one_does(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = TimedTarget(clock), TimedDrafter(clock)
    monkeypatch.setattr(Target, "unbatchable_reason", "for the sake of the test")
    assert measure_round_costs(target, drafter, 9, num_sequences=4) == measure(clock, 9)


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_rounds_of_several_texts_are_passes_of_all(prefix_reuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    assert target.unbatchable_reason is None
    asked: list[tuple[tuple[int, ...], set[tuple[int, int]]]] = []
    watch_shared_passes(target, monkeypatch, lambda part, spans: asked.append((tuple(spans), set(spans.values()))))
    drafter = LayerSkipDrafter(target, SKIP, prefix_reuse=prefix_reuse)
    costs = measure_round_costs(target, drafter, 2, num_sequences=3, prompt_length=9, budget_seconds=0.0)
    assert len(costs.verify) == 3
    assert {rows for rows, _ in asked} == {(0, 1, 2)}
    # Plain steps after the prompts, and between them rounds of 0, 1 and 2 drafts: a step for each, then one verification.
    sweep = [{(9, 1)}] + [{(9, 1)}] * 2 + [{(9, 1)}, {(9, 2)}, {(9, 1)}] + [{(9, 1)}, {(10, 1)}, {(9, 3)}, {(9, 1)}]
    assert [positions for _, positions in asked[: len(sweep)]] == sweep


def test_whatever_drafts_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    target, before = tiny_target(), torch.get_rng_state()
    head = build_drafter(target, write_heads(target, tmp_path, [3])[3], heads=HeadFolder(target, tmp_path))
    assert head is not None
    drafters: list[Drafter] = [LayerSkipDrafter(target, SKIP), head, CopyDrafter(target, SuffixDraft())]
    drafters += [CopyDrafter(target, PromptLookup(max_ngram=n, min_ngram=n)) for n in (2, 32)]
    for drafter in drafters:
        for num_sequences in (1, 2):
            costs = measure_round_costs(target, drafter, 5, num_sequences=num_sequences, budget_seconds=0.0)
            assert len(costs.verify) == 6
            assert list(costs.verify) == sorted(costs.verify)
            assert min(costs.verify[0], costs.draft_step) >= LEAST_COST
    assert torch.equal(torch.get_rng_state(), before)


MEASURED = RoundCosts(draft_step=0.2, verify=(1.0, 1.1))


@pytest.mark.parametrize(
    ("draft", "rule", "ready", "num_measured"),
    [
        (SKIP, BetaThompson(max_tokens=5), BetaThompson(max_tokens=5, costs=MEASURED), 1),
        (SKIP, BetaThompson(costs=MEASURED), BetaThompson(costs=MEASURED), 0),
        (SKIP, Fixed(max_tokens=3), Fixed(max_tokens=3), 0),
        (PlainDecoding(), BetaThompson(), BetaThompson(), 0),
    ],
)
def test_costs_are_measured_once_where_a_rule_lacks_them(
    draft: Draft, rule: DraftLengthRule, ready: DraftLengthRule, num_measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def stand_in(target: Target, drafter: Drafter, max_tokens: int) -> RoundCosts:
        asked.append(max_tokens)
        return MEASURED

    monkeypatch.setattr("decoding.timing.round_costs.measure_round_costs", stand_in)
    target = tiny_target()
    found = with_measured_costs(target, draft, rule, Decoding())
    assert found == ready
    assert asked == [rule.max_tokens] * num_measured
    if isinstance(rule, CostAwareRule) and num_measured:
        with pytest.raises(ValueError, match="'beta_thompson' has no costs"):
            rule.controller()
