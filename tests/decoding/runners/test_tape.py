"""Tapes: replayed passes compute what running them again would, and passes that cannot be replayed are run again."""

from __future__ import annotations

import gc
import platform
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.memory import LARGE_PAGE
from decoding.runners.compilation import CompiledBlocks
from decoding.runners.contract import Outputs
from decoding.runners.tape import Tapes
from decoding.target import Target
from decoding.text import Ending
from tests.support.families import build

Run = Callable[[], Outputs]


class Pass:
    """A pass over memory of its own, which counts its runs."""

    def __init__(self, size: int = 3) -> None:
        self.num_runs = 0
        self.given = torch.arange(size, dtype=torch.float32)
        self.kept = torch.zeros(size)
        self.weight = torch.full((size,), 3.0)

    def __call__(self) -> Outputs:
        self.num_runs += 1
        self.kept.add_(self.given)
        logits = self.given * self.weight + 1
        return Outputs(logits, None, logits.argmax(), None, self.kept * 2)


@pytest.fixture
def tapes() -> Tapes:
    return Tapes()


@torch.inference_mode()
def test_a_replay_computes_from_what_the_memory_holds_now(tapes: Tapes) -> None:
    run = Pass()
    outputs, play = tapes.record(run)
    assert outputs.logits.tolist() == [1, 4, 7]
    num_runs = run.num_runs
    run.given.copy_(torch.tensor([5.0, 1.0, 0.0]))
    run.kept.zero_()
    again = play()
    assert run.num_runs == num_runs, "the tape runs, and not the function"
    assert again.logits.tolist() == [16, 4, 1]
    assert again.states is None
    assert again.choices.item() == 0
    assert again.verdict is None
    assert again.looked is not None
    assert again.looked.tolist() == [10, 2, 0]
    assert run.kept.tolist() == [5, 1, 0], "what a pass writes in place is written by its replay"


@torch.inference_mode()
def test_later_replays_do_not_change_earlier_results(tapes: Tapes) -> None:
    run = Pass()
    _, play = tapes.record(run)
    first = play()
    run.given.zero_()
    assert play().logits.tolist() == [1, 1, 1]
    assert first.logits.tolist() == [1, 4, 7]


def _large_page_bytes(tensor: Tensor) -> int:
    """Return how many bytes of the mapping that holds the middle of a tensor are in large pages."""
    middle, is_there = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            is_there = int(found[1], 16) <= middle < int(found[2], 16)
        elif is_there and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("memory that is not mapped")


HAS_LARGE_PAGES = (
    sys.platform == "linux"
    and Path("/sys/kernel/mm/transparent_hugepage").is_dir()
    and tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)
)


@pytest.mark.skipif(not HAS_LARGE_PAGES, reason="needs Linux 6.1 with large pages")
@torch.inference_mode()
def test_the_memory_of_recorded_passes_is_in_large_pages_and_holds_what_it_held(tapes: Tapes) -> None:
    run = Pass(4 * LARGE_PAGE)  # 16 of them
    place, expected = run.weight.data_ptr(), run().logits
    _, play = tapes.record(run)
    assert _large_page_bytes(run.weight) >= 14 * LARGE_PAGE, "all but the ends"
    assert run.weight.data_ptr() == place
    assert torch.equal(play().logits, expected)


class Wrapped(Tensor):
    """A weight without memory of its own, as those of quantised checkpoints are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        wrapped: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return function(*(each.inner if isinstance(each, Wrapped) else each for each in args), **(kwargs or {}))


@torch.inference_mode()
@pytest.mark.parametrize("changed", [Wrapped, Tensor.to_sparse])
def test_weights_without_memory_of_their_own_are_recorded(tapes: Tapes, changed: Callable[[Tensor], Tensor]) -> None:
    run = Pass()
    run.weight = changed(run.weight)
    run.given = run.given.new_tensor([0.0, 1.0, 2.0])

    def product() -> Outputs:
        logits = (run.weight * run.given).to_dense()
        return Outputs(logits, None, None, None, None)

    outputs, play = tapes.record(product)
    assert outputs.logits.tolist() == play().logits.tolist() == [0, 3, 6]


@torch.inference_mode()
def test_no_result_is_kept_alive(tapes: Tapes) -> None:
    outputs, play = tapes.record(Pass())
    alive = [weakref.ref(outputs.logits), weakref.ref(play().logits)]
    del outputs
    gc.collect()
    assert [each() for each in alive] == [None, None]


@torch.inference_mode()
def test_passes_alike_are_recorded_once_more_than_the_first_time(tapes: Tapes) -> None:
    first, second = Pass(3), Pass(5)
    tapes.record(first)
    _, play = tapes.record(second)
    assert (first.num_runs, second.num_runs) == (3, 2), "only the first of its structure is compared"
    assert tapes.num_recorded == 2
    assert play().logits.tolist() == [1, 4, 7, 10, 13]


def reading_the_host(given: Tensor) -> Run:
    return lambda: Outputs(given * int(given.sum().item()), None)


def using_new_memory(given: Tensor) -> Run:
    others = iter([torch.full((2,), float(number)) for number in range(9)])
    return lambda: Outputs(given + next(others), None)


def changing_its_operators(given: Tensor) -> Run:
    signs = iter([1, -1] * 5)
    return lambda: Outputs(given * 2 if next(signs) > 0 else given - 2, None)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (reading_the_host, "reads numbers on the host"),
        (using_new_memory, "not use the same memory"),
        (changing_its_operators, "not run the same operators"),
    ],
)
@torch.inference_mode()
def test_a_pass_that_cannot_be_replayed_is_run_again(tapes: Tapes, make: Callable[[Tensor], Run], reason: str) -> None:
    compute, num_runs = make(torch.ones(2)), 0

    def run() -> Outputs:
        nonlocal num_runs
        num_runs += 1
        return compute()

    with pytest.warns(UserWarning, match=f"a pass cannot be recorded and runs slower: it .*{reason}"):
        _, play = tapes.record(run)
    assert num_runs == 3
    play()
    assert num_runs == 4


def test_a_pass_under_autograd_is_not_recorded(tapes: Tapes) -> None:
    run = Pass()
    _, play = tapes.record(run)
    assert (tapes.num_recorded, run.num_runs) == (0, 1)
    play()
    assert run.num_runs == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by modules that torch's compiler imports
def test_decoding_with_prepared_passes_calls_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(build("llama"), "static")
    decoder, request = plain_decoder(target), Request((5, 3, 8, 1), Ending(9))
    expected = plain_decoder(Target(build("llama"), "eager")).generate(request).tokens
    decoder.prepare(4, 13)
    calls = 0

    def counted(self: CompiledBlocks, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(self, *args)

    original = CompiledBlocks.__call__
    monkeypatch.setattr(CompiledBlocks, "__call__", counted)
    assert decoder.generate(request).tokens == expected
    assert calls == 0
    assert getattr(target.runner.block_call, "problem", "missing") is None
    for draft in (LayerSkip(skip_attention=(1,), skip_mlp=(2,)), LayerSkip(skip_mlp=(4,), bits=4)):
        assert Decoder(target, draft, Fixed(max_tokens=3)).generate(request).tokens == expected
    assert getattr(target.runner.block_call, "problem", "missing") is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by modules that torch's compiler imports
def test_passes_are_recorded_whatever_other_numbers_an_earlier_model_of_the_process_had() -> None:
    for eps in (1e-6, 1e-5):
        target = Target(build("llama", rms_norm_eps=eps), "static")
        plain_decoder(target).prepare(4, 13)
        recorder = target.runner._recorder
        assert isinstance(recorder, Tapes)
        assert set(recorder.problems.values()) == {None}
