"""The account of a profile's time: passes, the time between them, and the expected cost of the rounds."""

from __future__ import annotations

import pytest
import torch

from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PlainDecoding, PromptLookup
from decoding.profile import Decoding
from decoding.rounds import Round
from decoding.target import Target
from tests.support.costs import made_up_costs
from tuner.bench.accounting import COPYING, Account, _Costs, longest_draft, metered, take_account

PROMPT = (5, 17, 33, 8, 2, 11)
SKIP = LayerSkip.blocks((3, 4))


def drafted(num_tokens: int, *, looked_up: bool = False) -> Round:
    return Round((1,), num_tokens, 0, seconds=1.0, draft_seconds=0.5, looked_up=looked_up)


def test_only_passes_are_counted(target: Target) -> None:
    times = iter(range(100))
    ids, cache = torch.tensor([PROMPT]), target.new_cache(8)
    with metered(target.runner, clock=lambda: float(next(times))) as meter, torch.inference_mode():
        for start in range(0, 6, 2):
            target.forward(ids[:, start : start + 2], cache, start)
    assert meter.seconds == 3.0


def test_the_runner_is_as_before_whatever_happened(target: Target) -> None:
    def fail() -> None:
        with metered(target.runner):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert "run" not in vars(target.runner)


def test_a_round_costs_its_drafts_and_its_verification(target: Target) -> None:
    table = made_up_costs(target)
    costs = _Costs(SKIP, Decoding(), table, context=20, looks=False)
    plain = table.plain_seconds(context=20)
    expected = 3 * table.draft_seconds(SKIP, context=20) + table.verify_seconds(SKIP, 3, context=20, prefix_reuse=True)
    assert costs.of(drafted(3)) == pytest.approx(expected / plain)
    assert costs.of(drafted(0)) == pytest.approx(1.0, rel=1e-3)
    looking = _Costs(SKIP, Decoding(), table, context=20, looks=True)
    assert looking.of(drafted(3)) == pytest.approx((expected + 3 * table.seconds.look) / plain)


def test_a_copy_costs_the_pass_of_the_whole_model_that_verifies_it(target: Target) -> None:
    table = made_up_costs(target)
    whole = table.verify_seconds(LayerSkip(), 3, context=20, prefix_reuse=False) / table.plain_seconds(context=20)
    in_front = SKIP.model_copy(update={"lookup": Lookup(max_tokens=4)})
    for draft in (PromptLookup(), in_front):
        costs = _Costs(draft, Decoding(), table, context=20, looks=True)
        assert costs.of(drafted(3, looked_up=True)) == pytest.approx(whole + 3 * COPYING)
    assert costs.of(drafted(3)) != costs.of(drafted(3, looked_up=True))


def test_shares_and_speedups_follow_from_the_sums() -> None:
    account = Account(
        plain_seconds=10.0,
        plain_tokens=100,
        profile_seconds=5.0,
        profile_tokens=100,
        pass_seconds=4.5,
        expected_passes=40.0,
    )
    assert account.bookkeeping == pytest.approx(0.1)
    assert account.speedup == pytest.approx(2.0)
    assert account.expected_speedup == pytest.approx(2.5)


def test_every_text_is_in_the_account(target: Target) -> None:
    told: list[None] = []
    account = take_account(
        Decoder(target, SKIP, Fixed(max_tokens=3)),
        SKIP,
        Decoding(),
        made_up_costs(target),
        [PROMPT, PROMPT[::-1]],
        max_new_tokens=20,
        eos_token_ids=frozenset(),
        on_text=lambda: told.append(None),
    )
    assert (account.plain_tokens, account.profile_tokens, len(told)) == (38, 38, 2)
    assert 0 < account.pass_seconds < account.profile_seconds
    assert 0 < account.bookkeeping < 1
    assert account.expected_passes > 0


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (SKIP, 5),
        (EarlyExit(exit_layer=2, lookup=Lookup(max_tokens=9)), 9),
        (EarlyExit(exit_layer=2, lookup=Lookup(max_tokens=2)), 5),
        (PromptLookup(), 5),
        (PlainDecoding(), 1),
    ],
)
def test_longest_draft_is_the_rules_or_the_lookups(draft: object, expected: int) -> None:
    assert longest_draft(draft, 5) == expected
