"""Attention kernels on CUDA: cuDNN is left out of every pass, ours and `generate`'s, and torch's settings return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.backends import cuda

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.target import Target
from decoding.target.attention import attention_backends
from decoding.text import Ending
from tests.support.families import build
from tuner.measuring.generation import StockGeneration


def allowed() -> tuple[bool, bool, bool, bool]:
    """Return torch's settings for cuDNN, flash, efficient and plain attention."""
    return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def test_cudnn_is_left_out_on_cuda_only_and_only_inside() -> None:
    before = allowed()
    assert before[0], "torch's own default"
    with attention_backends(torch.device("cpu")):
        assert allowed() == before
    with attention_backends(torch.device("cuda", 0)):
        assert allowed() == (False, True, True, True)
    assert allowed() == before


@pytest.mark.parametrize("runner", ["eager", "static"])
@pytest.mark.usefixtures("uncompiled")
def test_every_pass_asks_for_its_device(monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    target = Target(build("llama"), runner)
    decoder = plain_decoder(target)  # checks the model with passes of its own
    open_now, seen = _watch(monkeypatch, "decoding.target.parts.attention_backends"), list[int]()
    target.blocks[0].register_forward_hook(lambda *_: seen.append(len(open_now)))
    decoder.generate(Request((5, 17, 33), Ending(6)))
    assert seen == [1] * 6


def test_stock_generation_runs_with_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    open_now, seen = _watch(monkeypatch, "tuner.measuring.generation.attention_backends"), list[int]()
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(len(open_now)))
    StockGeneration("hf", model, frozenset(), "hf").decode([[5, 17, 33]], 6)
    assert seen == [1] * 6


def _watch(monkeypatch: pytest.MonkeyPatch, name: str) -> list[torch.device]:
    """Replace `attention_backends` where it is used; return the devices for which it is open at the moment."""
    open_now: list[torch.device] = []

    @contextmanager
    def watched(device: torch.device) -> Iterator[None]:
        open_now.append(device)
        yield
        open_now.pop()

    monkeypatch.setattr(name, watched)
    return open_now
