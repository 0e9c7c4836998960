"""Early exits: the head sees every position once, in order, with its own keys and values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decoding.decode import Request, autoregressive, speculative
from decoding.draft_length import (
    Controller,
    Decision,
    DraftDistribution,
)
from decoding.drafters.build import build_drafter
from decoding.drafters.contract import Drafter
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafters.prompt_lookup import LookupFirst
from decoding.drafts import EarlyExit, Lookup
from decoding.exit_heads import new_exit_head
from decoding.rounds import Generation
from decoding.target import ExitView, Target
from decoding.target.states import exit_logits, exit_states
from decoding.text import Ending, TokenSequence
from tests.support.families import (
    NUM_LAYERS,
    SUPPORTED,
    build,
    some_tokens,
    target_of,
)
from tests.support.generations import AnyLength
from tests.support.heads import untrained_head

NUM_NEW_TOKENS = 14
TargetOf = Callable[[str], Target]


def request_of(num_prompt: int = 9, num_new: int = NUM_NEW_TOKENS) -> Request:
    return Request(some_tokens(num_prompt), Ending(num_new))


def plain(target: Target, request: Request) -> tuple[int, ...]:
    return Generation.collect(autoregressive(target, request)).tokens


def write(target: Target, drafter: Drafter, controller: Controller, request: Request) -> Generation:
    return Generation.collect(speculative(target, drafter, controller, request))


@pytest.mark.parametrize("family", SUPPORTED)
def test_last_block_as_the_head_of_the_last_exit_is_always_right(family: str) -> None:
    """The draft equals the whole model only if the head has seen every position with the right state; after lookups too."""
    target, num_drafted = target_of(family), 0
    for prefix_reuse in (True, False):
        drafter = EarlyExitDrafter(target, NUM_LAYERS - 1, new_exit_head(target), prefix_reuse=prefix_reuse)
        for each in (drafter, LookupFirst(drafter, Lookup(max_ngram=2, max_tokens=3))):
            for step in write(target, each, AnyLength(int(prefix_reuse)), request_of(num_new=40)).rounds:
                if not step.looked_up:
                    assert step.num_accepted == step.num_drafted
                    num_drafted += step.num_drafted
    assert num_drafted > 20


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_draft_is_what_a_pass_over_the_whole_text_would_say(prefix_reuse: bool) -> None:
    """After rounds that accepted none, some and all, the head's logits equal a fresh pass over the sequence."""
    target = target_of("llama")
    exit_layer, head = 2, untrained_head(target)
    drafter = EarlyExitDrafter(target, exit_layer, head, prefix_reuse=prefix_reuse)
    seen: list[tuple[int, Tensor]] = []

    class Watching(AnyLength):
        def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
            seen.append((num_drafted, distribution._scores))
            return super().decide(num_drafted, distribution)

    request = request_of(num_new=60)
    controller = Watching(5)
    start = 0
    text = list(request.prompt)
    checked, kinds = 0, set()
    for step in speculative(target, drafter, controller, request):
        if hasattr(step, "num_drafted"):
            for num_drafted, scores in seen[start:]:
                if num_drafted == 0:  # the text before it is verified
                    with torch.no_grad():
                        ids = torch.tensor([text])
                        states, _ = exit_states(target, ids, [exit_layer])
                        expected = exit_logits(target, ids, states[exit_layer], head)[0, -1]
                    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-3)
                    checked += 1
            kinds.add((step.num_drafted > 0, step.num_accepted == step.num_drafted))
            text += step.tokens
        else:
            text.append(step.token)
        start = len(seen)
    assert checked > 5
    assert len(kinds) == 3, "rounds that draft nothing, and that accept some or all"


class DropsThird(Controller):
    """Looks at the third token and drops it."""

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        return Decision.STOP if num_drafted == 2 else Decision.CONTINUE


@pytest.mark.parametrize(
    ("bits", "kept"),
    [
        pytest.param(None, 3, id="the last token and two drafts"),
        pytest.param(8, 0, id="nothing of quantised blocks"),
    ],
)
def test_head_forgets_what_is_not_verified_from_its_states(bits: int | None, kept: int) -> None:
    target = target_of("llama")
    drafter = EarlyExitDrafter(target, 2, new_exit_head(target), bits=bits)
    text, cache = TokenSequence(some_tokens(9), 32, target.device), target.new_cache(32)
    with torch.inference_mode():
        drafter.prefill(text, cache)
        cache.length = text.length
        text.append([7])
        draft = drafter.draft(text, cache, DropsThird(5), Request([0], Ending(9)), 5)
        branch = cache.branch
        assert draft.num_tokens == 2
        assert (branch.length, branch.pending) == (9 + kept, None)
        drafter.verify(text, cache, draft)
        assert branch.num_known == 12, "the states of the verification take over where the head's end"
        fresh = exit_states(target, text.span(0, text.length + 2), [2])[0][2]
        if branch.pending is not None:
            torch.testing.assert_close(branch.pending[0], fresh[0, -branch.pending.shape[-2] :], rtol=1e-4, atol=1e-4)


def test_exits_of_a_batch_are_those_of_its_texts_alone() -> None:
    for family in ("llama", "gemma3", "gpt_neox_parallel"):
        target = target_of(family)
        head = untrained_head(target)
        short, long = some_tokens(5), some_tokens(9, seed=1)
        batch = torch.tensor([[*short, 0, 0, 0, 0], long])
        with torch.no_grad():
            states, logits = exit_states(target, batch, [1, 3])
            drafted = exit_logits(target, batch, states[3], head)
            alone, own = exit_states(target, torch.tensor([short]), [1, 3])
            torch.testing.assert_close(logits[0, :5], own[0], rtol=1e-4, atol=1e-4)
            for exit_layer in (1, 3):
                torch.testing.assert_close(states[exit_layer][0, :5], alone[exit_layer][0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                drafted[0, :5], exit_logits(target, torch.tensor([short]), alone[3], head)[0], rtol=1e-4, atol=1e-4
            )
            whole = exit_logits(
                target,
                batch,
                exit_states(target, batch, [NUM_LAYERS - 1])[0][NUM_LAYERS - 1],
                target.blocks[-1],
            )
            torch.testing.assert_close(whole, logits, rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_head_and_nothing_else() -> None:
    target = Target(build("llama").requires_grad_(False))
    head = new_exit_head(target)
    ids = torch.tensor([some_tokens(6)])
    with torch.no_grad():
        states, _ = exit_states(target, ids, [2])
    exit_logits(target, ids, states[2], head).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())
    assert all(parameter.grad is None for parameter in target.model.parameters())


@pytest.mark.parametrize("exit_layer", [0, NUM_LAYERS])
def test_exit_layer_out_of_range_is_refused(exit_layer: int) -> None:
    target = target_of("llama")
    for use in (
        lambda: ExitView(target, exit_layer, new_exit_head(target)),
        lambda: exit_states(target, torch.tensor([[1, 2]]), [exit_layer]),
        lambda: build_drafter(target, EarlyExit.model_construct(exit_layer=exit_layer, head=None)),
    ):
        with pytest.raises(ValueError, match=f"exits at layer {exit_layer}, but it must be 1 to 4"):
            use()
