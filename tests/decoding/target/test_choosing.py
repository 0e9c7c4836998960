"""The LM head of greedy requests: which models have one, what it computes, and which passes run it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import RepetitionPenaltyLogitsProcessor

from decoding.acceptance import Sampling
from decoding.decode import Request
from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, LayerSkip
from decoding.kernels.choice import can_choose
from decoding.kernels.quantised import RefinedLinear
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending, Shaping
from tests.support.families import build, some_tokens, target_of
from tests.support.generations import write, write_plainly

PROMPT, ENDING = some_tokens(9), Ending(24)
STATIC = functools.partial(StaticRunner, compiled=False)


@pytest.fixture(autouse=True)
def every_lm_head_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.kernels.choice.MIN_REFINED", 0)
    if not can_choose(build("llama").lm_head):
        pytest.skip("the processor lacks the instructions")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of positions of the passes that ran it."""
    noted, forward = list[int](), RefinedLinear.forward

    def note(self: RefinedLinear, values: Tensor) -> Tensor:
        noted.append(values.shape[:-1].numel())
        return forward(self, values)

    monkeypatch.setattr(RefinedLinear, "forward", note)
    return noted


def chooses(model: PreTrainedModel) -> bool:
    whole = Target(model, STATIC).lm_heads.whole
    return whole is not None and whole.choosing is not None


def test_a_model_that_changes_its_logits_has_none() -> None:
    assert chooses(build("llama"))
    capped = build("gemma2")
    assert capped.config.final_logit_softcapping
    assert not chooses(capped)
    capped.config.final_logit_softcapping = None
    assert chooses(capped)


@torch.inference_mode()
def test_the_largest_logits_are_the_models_bit_for_bit() -> None:
    target, ids = Target(build("llama"), STATIC), torch.tensor([some_tokens(40)])
    cache = target.new_cache(40)
    target.forward(ids[:, :30], cache, 0, last_only=True)
    for width in (1, 2, 5):
        cache.only_best = False
        exact = target.forward(ids[:, 30 : 30 + width], cache, 30)
        cache.only_best = True
        chosen = target.forward(ids[:, 30 : 30 + width], cache, 30)
        assert torch.equal(chosen.argmax(-1), exact.argmax(-1))
        assert torch.equal(chosen.amax(-1), exact.amax(-1))
        assert not torch.equal(chosen, exact), "the others are approximations"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_passes_run_it_and_write_the_same(
    dtype: torch.dtype, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    request, target = Request(PROMPT, ENDING), Target(build("llama").to(dtype), STATIC)
    with monkeypatch.context() as patch:
        patch.setattr("decoding.kernels.choice.MIN_REFINED", 2**40)
        expected = write_plainly(Target(build("llama").to(dtype), STATIC), request).tokens
    assert not calls
    assert write_plainly(target, request).tokens == expected
    assert calls == [1] * (len(expected) - 1)
    for draft in LayerSkip.blocks((1,)), EarlyExit(exit_layer=2), LayerSkip.blocks((1,), bits=8):
        calls.clear()
        assert write(target, draft, Fixed(max_tokens=3), request).tokens == expected
        assert max(calls) > 1, "verifications run it too"


def test_requests_that_read_other_logits_do_not_run_it(calls: list[int]) -> None:
    target, eager = Target(build("llama"), STATIC), target_of("llama")
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    shaped = Request(PROMPT, ENDING, shaping=Shaping(penalty))
    draft, rule = LayerSkip.blocks((1,)), Fixed(max_tokens=3)
    assert write(target, draft, rule, shaped).tokens == write_plainly(eager, shaped).tokens
    write(target, draft, rule, Request(PROMPT, ENDING, Sampling(torch.Generator().manual_seed(0))))
    assert not calls


def test_it_follows_the_weights() -> None:
    model, request = build("llama"), Request(PROMPT, ENDING)
    target = Target(model, STATIC)
    before = write_plainly(target, request).tokens
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    expected = write_plainly(Target(model), request).tokens
    assert write_plainly(target, request).tokens == expected != before
