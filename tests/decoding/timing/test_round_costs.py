"""The micro-benchmark of a round, on a clock that the passes themselves move; and the decoder that asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import (
    Controller,
    RoundCosts,
)
from decoding.drafters.build import build_drafter
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafters.lookup_first import LookupFirst
from decoding.drafters.prompt_lookup import CopyDrafter
from decoding.drafts import LayerSkip, Lookup, PromptLookup, SuffixDraft
from decoding.head_folder import HeadFolder
from decoding.runners.contract import Outputs, Part
from decoding.target import Target
from decoding.text import Shaping, TokenSequence
from decoding.timing.round_costs import LEAST_COST, MOST_SWEEPS, measure_round_costs
from tests.support.heads import write_heads
from tests.support.shared_passes import watch_shared_passes
from tests.support.tiny import tiny_target

SKIP = LayerSkip.blocks((2, 3))


@dataclass
class Clock:
    """Stands still but for what the passes take."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class TimedDrafter:
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
        self,
        text: TokenSequence,
        cache: KVCache,
        controller: Controller,
        shaping: Shaping,
        acceptance: Acceptance,
        limit: int,
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


def measure(max_tokens: int, **settings: object) -> RoundCosts:
    clock = Clock()
    return measure_round_costs(TimedTarget(clock), TimedDrafter(clock, **settings), max_tokens, clock=clock)


def test_costs_are_in_plain_passes_and_widths_are_interpolated() -> None:
    costs = measure(9)
    assert costs.draft_step == 0.25  # 0.5 s of 2 s
    # (2 + 0.1 n^2) s of 2 s at 0, 1, 2, 3, 4, 6, 8, 9; half-way between 1.8 and 2.8, and between 2.8 and 4.2.
    assert costs.verify == pytest.approx((1.0, 1.05, 1.2, 1.45, 1.8, 2.3, 2.8, 3.5, 4.2, 5.05))


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 8, 16, 64])
def test_every_length_up_to_the_longest_has_a_cost(max_tokens: int) -> None:
    assert len(measure(max_tokens).verify) == max_tokens + 1


def test_disturbed_passes_do_not_count() -> None:
    assert measure(8, disturbed={(0, 2): 50.0, (1, 2): 50.0, (1, 4): 50.0, (4, 0): 50.0}) == measure(8)


def test_pass_that_was_always_disturbed_costs_no_more_than_a_wider_one() -> None:
    disturbed = {(sweep, 3): 50.0 for sweep in range(MOST_SWEEPS)}
    verify = measure(8, disturbed=disturbed).verify
    assert verify[3] == verify[4] == pytest.approx(1.8)
    assert verify[:3] == measure(8).verify[:3]


def test_draft_too_fast_for_the_clock_still_costs_something() -> None:
    assert measure(4, draft_seconds=0.0).draft_step == LEAST_COST


def test_clock_that_stands_still_makes_all_passes_alike_and_ends() -> None:
    clock = Clock()
    drafter = TimedDrafter(Clock())
    costs = measure_round_costs(TimedTarget(Clock()), drafter, 2, clock=clock)
    assert costs == RoundCosts(draft_step=0.5, verify=(1.0, 1.0, 1.0))  # a draft of two as long as one of one
    assert drafter.asked == [0, 1, 2, 2] * MOST_SWEEPS  # the longest again, looked at


@pytest.mark.parametrize(("budget_seconds", "num_sweeps"), [(0.0, 5), (1143.9, 5), (1144.1, 6), (1e9, MOST_SWEEPS)])
def test_sweeps_are_repeated_until_the_time_is_spent(budget_seconds: float, num_sweeps: int) -> None:
    clock = Clock()
    drafter = TimedDrafter(clock)
    # Reading the prompt takes 1000 s, a sweep 12 s for six plain steps, 4.5 s to draft and 12.3 s to verify: five end at 1144 s.
    measure_round_costs(TimedTarget(clock), drafter, 3, budget_seconds=budget_seconds, clock=clock)
    assert drafter.asked == [0, 1, 2, 3, 3] * num_sweeps


def test_load_that_slows_everything_alike_changes_nothing() -> None:
    clock = Clock()
    drafter = TimedDrafter(clock, draft_seconds=1.5, verify_seconds=tuple(3 * (2.0 + 0.1 * n**2) for n in range(65)))
    target = TimedTarget(clock)
    target.plain_seconds = 6.0
    assert measure_round_costs(target, drafter, 9, clock=clock) == measure(9)


def test_extra_time_of_the_first_draft_step_counts_as_verification() -> None:
    costs, even = measure(4, first_seconds=0.6), measure(4)
    for num_drafted in range(1, 5):
        # 0.5 s a step and 0.6 s more for the first, of 2 s for a plain one.
        assert costs.of(num_drafted) == pytest.approx(even.of(num_drafted) + 0.3, abs=2e-4)
    assert costs.of(0) == even.of(0)
    assert costs.draft_step == pytest.approx(0.25 + 0.3 / 4)


def test_a_rule_that_looks_at_each_token_pays_for_it() -> None:
    costs, blind = measure(4, look_seconds=0.3), measure(4)
    assert costs.look == pytest.approx(0.15)  # 0.3 s of 2 s
    assert (costs.draft_step, costs.verify) == (blind.draft_step, blind.verify)
    assert blind.look == 0.0
    assert costs.looking().of(3) == pytest.approx(costs.of(3) + 0.45)
    assert costs.looking().look == 0.0, "paid once"


def test_every_draft_begins_after_the_same_text() -> None:
    clock = Clock()
    drafter = TimedDrafter(clock)
    measure_round_costs(TimedTarget(clock), drafter, 4, prompt_length=10, clock=clock)
    assert drafter.positions == {(10, 11)}


@pytest.mark.parametrize(
    ("context_length", "max_tokens", "position", "longest"),
    [(256, 8, 64, 8), (40, 8, 31, 8), (12, 16, 1, 10), (3, 8, 1, 1)],
)
def test_prompt_gives_way_to_the_drafts_and_the_drafts_to_the_context(
    context_length: int, max_tokens: int, position: int, longest: int
) -> None:
    clock = Clock()
    target, drafter = TimedTarget(clock), TimedDrafter(clock)
    target.config.max_position_embeddings = context_length
    costs = measure_round_costs(target, drafter, max_tokens, clock=clock)
    assert drafter.positions == {(position, position + 1)}
    assert max(drafter.asked) == len(costs.verify) - 1 == longest


def test_drafter_that_proposes_fewer_tokens_is_measured_as_far_as_it_goes() -> None:
    costs = measure(8, most=3)
    assert costs.draft_step == 0.25
    assert costs.verify == pytest.approx((1.0, 1.05, 1.2, 1.45))


def test_drafter_that_proposes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="not a single token was drafted"):
        measure(8, most=0)


@pytest.mark.parametrize("wrong", ["max_tokens", "num_sequences", "prompt_length"])
def test_numbers_below_one_are_refused(wrong: str) -> None:
    target = tiny_target()
    numbers = {"max_tokens": 8, "num_sequences": 1, "prompt_length": 64, wrong: 0}
    with pytest.raises(ValueError, match=f"{wrong} must be at least 1, got 0"):
        measure_round_costs(target, LayerSkipDrafter(target, SKIP), **numbers)


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


def test_rounds_of_several_texts_are_measured_with_whatever_drafts(tmp_path: Path) -> None:
    target = tiny_target()
    head = build_drafter(target, write_heads(target, tmp_path, [3])[3], heads=HeadFolder(target, tmp_path))
    assert head is not None
    for drafter in (head, CopyDrafter(target, PromptLookup())):
        costs = measure_round_costs(target, drafter, 3, num_sequences=2, budget_seconds=0.0)
        assert len(costs.verify) == 4
        assert min(costs.verify) > LEAST_COST


def test_texts_that_take_turns_cost_each_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    target, drafter = TimedTarget(clock), TimedDrafter(clock)
    monkeypatch.setattr(Target, "unbatchable_reason", "for the sake of the test")
    assert measure_round_costs(target, drafter, 9, num_sequences=4, clock=clock) == measure(9)


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_real_drafter_is_measured_and_left_as_it_was(prefix_reuse: bool) -> None:
    target = tiny_target()
    drafter: Drafter = LayerSkipDrafter(target, SKIP, prefix_reuse=prefix_reuse)
    before = torch.get_rng_state()
    costs = measure_round_costs(target, drafter, 5, budget_seconds=0.0)
    assert len(costs.verify) == 6
    assert costs.verify[0] > LEAST_COST
    assert list(costs.verify) == sorted(costs.verify)
    assert costs.draft_step > LEAST_COST
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("lookup", [PromptLookup(), PromptLookup(max_ngram=32, min_ngram=32), SuffixDraft()])
def test_copies_up_to_the_longest_are_measured_on_a_repetitive_prompt(lookup: PromptLookup | SuffixDraft) -> None:
    target = tiny_target()
    costs = measure_round_costs(target, CopyDrafter(target, lookup), 9, budget_seconds=0.0)
    assert len(costs.verify) == 10
    assert LEAST_COST <= costs.draft_step < costs.verify[0]


@pytest.mark.parametrize(("context_length", "longest"), [(256, 8), (12, 8), (3, 1)])
def test_copies_are_measured_in_a_short_context_too(context_length: int, longest: int) -> None:
    target = tiny_target()
    target.config.max_position_embeddings = context_length
    drafter = CopyDrafter(target, PromptLookup())
    costs = measure_round_costs(target, drafter, 8, budget_seconds=0.0)
    assert len(costs.verify) == longest + 1


def test_of_a_lookup_in_front_nothing_is_measured() -> None:
    clock = Clock()
    drafter = LookupFirst(TimedDrafter(clock), Lookup())
    assert measure_round_costs(TimedTarget(clock), drafter, 9, clock=clock) == measure(9)
