"""Variable-length attention, with torch's documented semantics in place of its kernel: the eager text, fewer recordings."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from decoding.cache.last_position import of_last_position, used_lengths
from decoding.decoder import plain_decoder
from decoding.errors import UnsupportedRunnerError
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.features import SpeedFeatures
from decoding.target import Target
from decoding.target.varlen import find_kernel
from tests.support.fake_graphs import FakeGraphs
from tests.support.families import VOCABULARY, build, some_tokens, target_of
from tests.support.grid import RULES
from tests.support.recorded_decoding import HEAD, alone_and_together, decoder_of, recorded_target, requests
from tests.support.recorders import CountingRecorder, unchecked
from tests.support.varlen_reference import varlen_reference

VARLEN = SpeedFeatures(varlen_attention=True)
EVERYTHING = SpeedFeatures(
    fused_projections=True,
    varlen_attention=True,
    plain_chain=4,
    look_every=2,
    whole_rounds=True,
    draft_vocabulary=VOCABULARY // 2,
)
CUDA = torch.device("cuda", 0)
HALF = torch.bfloat16


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference run in place of the kernel, which needs CUDA and half precision."""
    monkeypatch.setattr("decoding.target.target.find_kernel", lambda device, dtype: varlen_reference)


@functools.cache
def fake_graphs_of(family: str, features: SpeedFeatures) -> tuple[Target, FakeGraphs]:
    """Return one target for all tests of a family with these features; each uses the fixture `kernel`."""
    graphs = FakeGraphs()
    with unchecked():
        return recorded_target(family, graphs, features=features), graphs


@functools.cache
def eager_texts(family: str) -> list[tuple[int, ...]]:
    return [plain_decoder(target_of(family)).generate(request).tokens for request in requests()]


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("family", "draft"), [("llama", HEAD), ("gemma3", "half blocks")])
def test_text_is_the_eager_text(family: str, draft: str, tmp_path: Path) -> None:
    (target, graphs), plain = fake_graphs_of(family, VARLEN), eager_texts(family)
    decoder, replayed = decoder_of(target, draft, RULES["fixed 3"], tmp_path), graphs.num_replayed
    assert alone_and_together(decoder) == [plain[-1], *plain]
    assert graphs.num_replayed > replayed


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("draft", "rule"), [("half blocks", "fixed 3"), (HEAD, "AdaEDL, last dropped")])
def test_all_features_together_write_the_eager_text(draft: str, rule: str, tmp_path: Path) -> None:
    (target, graphs), plain = fake_graphs_of("gemma3", EVERYTHING), eager_texts("gemma3")
    decoder = decoder_of(target, draft, RULES[rule], tmp_path)
    assert alone_and_together(decoder) == [plain[-1], *plain]
    assert graphs.strangers(decoder) == []


# --- what it saves ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("features", "num_recordings"), [(SpeedFeatures(), 2), (VARLEN, 1)], ids=["masks", "lengths"])
def test_one_recording_serves_every_context(features: SpeedFeatures, num_recordings: int) -> None:
    recorder = CountingRecorder()
    target = recorded_target("llama", recorder, features=features, max_position_embeddings=512)
    (request,) = requests([(GPU_BUCKETS.slot_step - 12, 24)])
    target.runner.new_cache(target.num_layers, 2 * GPU_BUCKETS.slot_step)
    before = recorder.num_recorded
    plain_decoder(target).generate(request)
    assert recorder.num_recorded - before == num_recordings


def test_kernel_reads_the_cache_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = 3
    given: set[int] = set()

    def watched(query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Tensor:
        given.update((key.untyped_storage().data_ptr(), value.untyped_storage().data_ptr()))
        return varlen_reference(query, key, value, *args, **settings)

    monkeypatch.setattr("decoding.target.target.find_kernel", lambda device, dtype: watched)
    target = recorded_target("llama", None, features=VARLEN)
    plain_decoder(target).generate_batch(requests([(5, 6)] * num_rows))
    given.clear()
    plain_decoder(target).generate_batch(requests([(5, 6)] * num_rows))
    storages = [each for each in target.runner._storages if each.num_rows == num_rows]  # type: ignore[attr-defined]
    own = {kept.untyped_storage().data_ptr() for layer in storages[0].layers for kept in (layer.keys, layer.values)}
    assert given == own


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_lengths_of_rows_and_of_their_last_positions() -> None:
    lengths = used_lengths(torch.tensor([7, 4]), width=3, num_slots=10)
    assert lengths.dtype == torch.int32
    assert lengths[0, 0].tolist() == [[0, 3, 6], [0, 10, 20], [7, 4, 0]]
    narrowed = of_last_position(lengths, 3, torch.tensor([5, 3]))
    assert narrowed[0, 0].tolist() == [[0, 1, 2], [0, 10, 20], [6, 4, 0]]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (torch.device("cpu"), HALF, "runs on CUDA only, and the model is on cpu"),
        (CUDA, torch.float32, "not in float32"),
    ],
)
def test_other_devices_and_precisions_are_refused(device: torch.device, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(UnsupportedRunnerError, match=reason):
        find_kernel(device, dtype)


def test_older_kernel_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window_size: tuple[int, int]) -> None: ...

    monkeypatch.setattr(varlen, "varlen_attn", older)
    with pytest.raises(UnsupportedRunnerError, match=r"variable-length attention of torch .* has no 'enable_gqa'"):
        find_kernel(CUDA, HALF)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("family", ["gemma2", "gptj"])
def test_family_with_other_attention_is_refused_in_one_line(family: str) -> None:
    with pytest.raises(UnsupportedRunnerError, match=r"^[^\n]*variable-length attention[^\n]*$"):
        recorded_target(family, None, features=VARLEN)


def test_model_keeps_its_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.target.target.find_kernel", lambda device, dtype: varlen_reference)
    model = build("llama")
    recorded = recorded_target("llama", None, features=VARLEN)
    token_ids = torch.tensor([some_tokens(9)])
    with torch.inference_mode():
        assert torch.equal(recorded.model(token_ids).logits, model(token_ids).logits)
    assert Target(model).runner.features == SpeedFeatures()
