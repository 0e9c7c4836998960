"""Real CUDA graphs against eager passes. Run it first on a new machine: `pytest -n 0 tests/gpu`.

The rules that the passes must keep are checked without a GPU, in tests/gpu_safety; here is what only a device can tell.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoding.decoder import plain_decoder
from decoding.runners.graphs import CudaGraphs
from decoding.target import Target
from tests.support.families import build, target_of
from tests.support.grid import RULES
from tests.support.recorded_decoding import (
    DRAFTS,
    FAMILIES,
    alone_and_together,
    decoder_of,
    recorded_target,
    requests,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"
UNQUANTISED = [name for name, draft in DRAFTS.items() if draft.parts.bits is None]
"""Quantised drafts have no kernel on CUDA."""
NUM_STREAMS = 32
"""Streams that torch hands out in turns."""


@pytest.fixture
def graphs() -> CudaGraphs:
    return CudaGraphs(torch.device(DEVICE))


@dataclass(frozen=True)
class Value:
    """The outputs of a pass."""

    tensor: Tensor

    def copied(self) -> Value:
        return Value(self.tensor.clone())


class Product:
    """A pass: a matrix product, which needs a workspace of cuBLAS."""

    def __init__(self, device: str = DEVICE) -> None:
        self.weight = torch.eye(256, device=device)
        self.given = torch.ones((4, 256), device=device)
        self.streams: list[int] = []

    def __call__(self) -> Value:
        self.streams.append(torch.cuda.current_stream().cuda_stream)
        return Value(10 * self.given @ self.weight)

    def waiting(self) -> Value:
        outputs = self()
        return Value(outputs.tensor * self.given.sum().item())


def check_recording(graphs: CudaGraphs, run: Product) -> Callable[[], Value]:
    """Record a pass, and check that its replays follow the input and that their outputs stay."""
    run.given.fill_(1.0)
    outputs, play = graphs.record(run)
    found = []
    for number in (2.0, 3.0):
        run.given.fill_(number)
        found.append(play())
    for number, each in enumerate((outputs, *found), start=1):
        assert torch.equal(each.tensor, torch.full_like(each.tensor, 10.0 * number))
    return play


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", UNQUANTISED)
@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_replayed_text_is_the_eager_text(draft: str, prefix_reuse: bool, tmp_path: Path) -> None:
    """Twice: the second text is written by recordings alone."""
    eager = plain_decoder(Target(build("llama").to(DEVICE)))
    plain = [eager.generate(request).tokens for request in requests()]
    target = recorded_target("llama", recorder := CudaGraphs(torch.device(DEVICE)), DEVICE)
    for rule in (RULES["fixed 3"], RULES["AdaEDL, last dropped"]):
        decoder = decoder_of(target, draft, rule, tmp_path, prefix_reuse=prefix_reuse)
        assert alone_and_together(decoder) == [plain[-1], *plain]
        num_recorded = recorder.num_recorded
        assert alone_and_together(decoder) == [plain[-1], *plain]
        assert recorder.num_recorded == num_recorded


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_text_of_every_family_is_the_eager_text(family: str, tmp_path: Path) -> None:
    eager = plain_decoder(Target(build(family).to(DEVICE)))
    plain = [eager.generate(request).tokens for request in requests()]
    target = recorded_target(family, None, DEVICE)
    for draft in ("plain", "half blocks", "exit"):
        decoder = decoder_of(target, draft, RULES["fixed 3"], tmp_path)
        assert alone_and_together(decoder) == [plain[-1], *plain], draft


@pytest.mark.parametrize("draft", ["plain", "half blocks"])
def test_sampled_text_is_the_eager_decoders(draft: str, tmp_path: Path) -> None:
    rule = RULES["fixed 3"]
    eager = decoder_of(Target(build("llama").to(DEVICE)), draft, rule, tmp_path)
    decoder = decoder_of(recorded_target("llama", None, DEVICE), draft, rule, tmp_path)
    assert alone_and_together(decoder, sampled=True, device=DEVICE) == alone_and_together(
        eager, sampled=True, device=DEVICE
    )


# torch's compiler warns of much, and an error raised where it traces spoils the process for the tests that follow.
@pytest.mark.filterwarnings("default", "error:the layers run uncompiled", "error:a pass cannot be recorded")
def test_compiled_and_recorded_text_is_the_eager_text(tmp_path: Path) -> None:
    eager = plain_decoder(Target(build("llama").to(DEVICE)))
    plain = [eager.generate(request).tokens for request in requests()]
    target = Target(build("llama").to(DEVICE), "static")
    for draft in UNQUANTISED:
        decoder = decoder_of(target, draft, RULES["fixed 3"], tmp_path)
        assert alone_and_together(decoder) == [plain[-1], *plain], draft


def test_text_on_the_device_is_the_text_on_the_cpu() -> None:
    """Not a matter of recordings; if it fails, look there first."""
    request = requests()[-1]
    on_device = plain_decoder(Target(build("llama").to(DEVICE))).generate(request).tokens
    assert on_device == plain_decoder(target_of("llama")).generate(request).tokens


# --- recorders --------------------------------------------------------------------------------------------------------


def test_recordings_of_one_stream_do_not_disturb_one_another(graphs: CudaGraphs) -> None:
    runs = [Product() for _ in range(NUM_STREAMS + 8)]
    plays = [check_recording(graphs, run) for run in runs]
    (stream,) = {stream for run in runs for stream in run.streams}
    assert stream != torch.cuda.default_stream().cuda_stream
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    del plays[::2]
    filler = [torch.full((2**22,), float("nan"), device=DEVICE) for _ in range(8)]
    for run, play in zip(runs[1::2], plays, strict=True):
        run.given.fill_(4.0)
        assert torch.equal(play().tensor, torch.full_like(run.given, 40.0))
    assert all(bool(each.isnan().all()) for each in filler), "no recording writes to memory of others"


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_failed_capture_spoils_nothing(graphs: CudaGraphs, num_before: int) -> None:
    earlier = [check_recording(graphs, Product()) for _ in range(num_before)]
    with pytest.warns(UserWarning, match="runs slower: .*captur"):
        outputs, play = graphs.record(Product().waiting)
    assert torch.equal(outputs.tensor, play().tensor)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(4, device=DEVICE)  # refused by torch 2.11 if the generator still believes in the capture
    check_recording(graphs, Product())
    for each in earlier:
        each()
    torch.cuda.synchronize()


def test_out_of_memory_in_a_capture_is_raised_and_spoils_nothing(graphs: CudaGraphs) -> None:
    earlier, run = check_recording(graphs, Product()), Product()

    def greedy() -> Value:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2 * torch.cuda.get_device_properties(DEVICE).total_memory, dtype=torch.uint8, device=DEVICE)
        return run()

    with pytest.raises(torch.OutOfMemoryError):
        graphs.record(greedy)
    torch.rand(4, device=DEVICE)
    check_recording(graphs, Product())
    earlier()


def test_memory_of_dropped_candidates_is_used_again(tmp_path: Path) -> None:
    target = recorded_target("llama", None, DEVICE)
    plain_decoder(target).generate_batch(requests())
    reserved = []
    for _ in range(6):
        decoder = decoder_of(target, "half blocks", RULES["fixed 3"], tmp_path)
        alone_and_together(decoder)
        del decoder
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1:] == [reserved[1]] * 5


def test_memory_of_a_dropped_model_is_freed() -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    used_by: list[int] = []
    for _ in range(3):
        target = recorded_target("llama", None, DEVICE)
        plain_decoder(target).generate_batch(requests())
        del target
        used_by.append(used())
    assert used_by[1:] == [used_by[1]] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_recordings_of_the_second_device_compute() -> None:
    run = Product("cuda:1")
    check_recording(CudaGraphs(torch.device("cuda:1")), run)
    assert torch.cuda.current_device() == 0
