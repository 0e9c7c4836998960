"""Decoding on a fake CUDA device: tensors stay on their devices, and nothing waits inside a recorded pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from decoding.acceptance import Sampling
from decoding.decode import Request, speculative
from decoding.decoder import Decoder, plain_decoder
from decoding.deploy import OnMismatch, load_decoder
from decoding.draft_length import AdaEdl, Fixed, TopProbability
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PromptLookup
from decoding.errors import ProfileWarning, UnsupportedModelError
from decoding.exit_heads import new_exit_head
from decoding.rounds import Generation
from decoding.target import Target
from decoding.text import Ending
from tests.support.fake_cuda import DEVICE, fake_cuda
from tests.support.families import SUPPORTED, build, of_depth
from tests.support.profiles import profile_of

PROMPT = (7, 3, 9, 7, 3)
NUM_NEW_TOKENS = 3
NUM_LAYERS = 3
"""A view without the last block has two left: windows are still mixed with attention over everything."""
ALONE = frozenset({"bloom"})
"""Families whose sequences cannot share a pass; bloom's masks are its own, so the static runner refuses it."""


def request(num_tokens: int = NUM_NEW_TOKENS, *, samples: bool = False) -> Request:
    if samples:
        return Request(PROMPT, Ending(num_tokens), Sampling())
    return Request(PROMPT, Ending(num_tokens))


def decode_with_head(target: Target) -> None:
    drafter = EarlyExitDrafter(target, 2, new_exit_head(target))
    Generation.collect(speculative(target, drafter, Fixed(max_tokens=3).controller(), request()))


def decode_by(draft: LayerSkip | PromptLookup, rule: Fixed | AdaEdl | TopProbability) -> Callable[[Target], object]:
    return lambda target: Decoder(target, draft, rule).generate(request())


SKIP = LayerSkip.blocks((2,))
WAYS: dict[str, Callable[[Target], object]] = {
    "plain": lambda target: plain_decoder(target).generate(request()),
    "skip": decode_by(SKIP, Fixed(max_tokens=3)),
    "lookup, then skip with looks": decode_by(
        LayerSkip(skip_attention=(2,), skip_mlp=(2,), lookup=Lookup(max_tokens=2, min_ngram=3)), AdaEdl(max_tokens=2)
    ),
    "exit with head": decode_with_head,
    "lookup": decode_by(PromptLookup(), Fixed(max_tokens=3)),
    "sampling": lambda target: Decoder(target, SKIP, Fixed(max_tokens=2)).generate(request(samples=True)),
    "batch": lambda target: Decoder(target, SKIP, Fixed(max_tokens=2)).generate_batch([request(2), request()]),
}


EVERY_WAY, BATCHED = {"llama"}, {"gemma3", "gpt_neox_parallel", "mixtral"}
"""Families whose modules differ the most. All others decode with an exit head, which runs every kind of pass of one sequence."""


def ways_of(family: str) -> list[str]:
    if family in EVERY_WAY:
        return list(WAYS)
    return ["exit with head", "batch"] if family in BATCHED else ["exit with head"]


@pytest.mark.parametrize("family", sorted(set(SUPPORTED) - ALONE))
def test_every_family_decodes_without_a_device_mismatch_or_a_wait_in_a_recording(family: str) -> None:
    """A mismatch of devices raises within the fake device."""
    model = build(family, **of_depth(family, NUM_LAYERS)).to(torch.bfloat16)
    with fake_cuda() as device:
        target = device.target(model)
        for way in ways_of(family):
            recorded = device.num_recorded
            WAYS[way](target)
            assert device.waits_in_recordings == [], way
            assert device.num_recorded > recorded or way in ("plain", "lookup"), way


@pytest.mark.parametrize("draft", [LayerSkip(bits=8), LayerSkip.blocks((1,), bits=4), EarlyExit(exit_layer=2, bits=8)])
def test_quantised_drafts_are_refused_on_a_gpu(draft: LayerSkip | EarlyExit) -> None:
    """They would compute in float64 there."""
    model = build("llama", num_hidden_layers=NUM_LAYERS).to(torch.bfloat16)
    with fake_cuda() as device:
        target = device.target(model)
        assert not target.can_be_quantised
        with pytest.raises(
            UnsupportedModelError, match=r"no kernel on cuda yet, .*: run them on a CPU, or tune a draft"
        ):
            Decoder(target, draft, Fixed(max_tokens=3))


@pytest.mark.parametrize("on_mismatch", ["error", "plain"])
def test_a_profile_with_bits_is_refused_or_left_on_a_gpu_as_it_asks(on_mismatch: OnMismatch) -> None:
    model = build("llama", num_hidden_layers=NUM_LAYERS).to(torch.bfloat16)
    profile = profile_of(model, LayerSkip(bits=8), dtype="bfloat16")
    with fake_cuda() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoding.deploy.custom_generate.check_target", lambda *_: None)  # it reads values
        decoder = load_decoder(profile, on_mismatch=on_mismatch)
        target = device.target(model)
        patch.setattr("decoding.deploy.custom_generate.Target", lambda *_, **__: target)
        if on_mismatch == "error":
            with pytest.raises(UnsupportedModelError, match="no kernel on cuda yet"):
                decoder.decoder_for(model)
            return
        with pytest.warns(ProfileWarning, match="decoding plainly, without profile 'tiny': .* no kernel on cuda yet"):
            assert decoder.decoder_for(model).drafter is None


NOTED: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "item": (lambda values: values[0].item(), 1),
    "list": (lambda values: values.tolist(), 1),
    "truth": (lambda values: bool(values.sum() > 0), 1),
    "number": (lambda values: int(values.argmax()), 1),
    "float": (lambda values: float(values.max()), 1),
    "new tensor": (lambda values: torch.tensor([1, 2], device=DEVICE), 1),
    "moved tensor": (lambda values: torch.zeros(2).to(DEVICE), 1),
    "tensor to the host": (lambda values: values.cpu(), 1),
    "copy": (lambda values: values.copy_(torch.zeros(4)), 1),
    "blocking copy of pinned values": (lambda values: values.copy_(torch.zeros(4, pin_memory=True)), 1),
    "pinned copy": (lambda values: values.copy_(torch.zeros(6, pin_memory=True)[:4], non_blocking=True), 0),
    "boolean index": (lambda values: values[values > 0], 1),
    "assigned host values": (lambda values: values.__setitem__(slice(0, 2), torch.zeros(2)), 1),
    "multinomial": (lambda values: torch.multinomial(values.softmax(0), 1), 1),
    "fill": (lambda values: values.fill_(3), 0),
    "index on the device": (lambda values: values[torch.arange(2, device=DEVICE)], 0),
    "slice": (lambda values: values[None, 1:, ...], 0),
    "arithmetic": (lambda values: (values * 2).softmax(0).argmax(), 0),
}


def test_the_fake_device_notes_each_wait() -> None:
    with fake_cuda() as device:
        for name, (work, num_waits) in NOTED.items():
            values = torch.zeros(4, device=DEVICE)
            assert device.waits_of(partial(work, values)).total() == num_waits, name
