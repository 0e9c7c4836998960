"""Attention of few positions: the values of float64, whatever else is in the pass, and no read beyond its reach."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.decoder import plain_decoder
from decoding.kernels.attention import ALL, attend
from decoding.kernels.choice import kernel_for
from decoding.runners.eager import EagerRunner
from decoding.runners.masks import MaskKinds, Positions
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.target.attention import kernel_attention
from tests.support.families import build
from tests.support.recorded_decoding import requests
from tests.support.recorders import CountingRecorder

CPU = torch.device("cpu")
PRECISIONS = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
SUPPORTED = [dtype for dtype in PRECISIONS if kernel_for("attention", CPU, dtype).kernel is not None]
needs_kernel = pytest.mark.skipif(not SUPPORTED, reason="the processor lacks the instructions")
uncompiled = partial(StaticRunner, compiled=False)


def states(
    dtype: torch.dtype,
    *,
    batch: int = 1,
    heads: int = 4,
    groups: int = 2,
    width: int = 1,
    slots: int = 40,
    size: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries, keys and values."""
    shapes = (batch, heads, width, size), (batch, groups, slots, size), (batch, groups, slots, size)
    query, key, value = (torch.randn(shape).to(dtype) for shape in shapes)
    return query, key, value


def at(*starts: int, width: int = 1) -> Tensor:
    """Return positions [sequences, 1, 1, width]."""
    return (torch.tensor(starts)[:, None] + torch.arange(width))[:, None, None]


def reference(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int) -> Tensor:
    """Return attention in float64, by a mask."""
    shared, slots, last = query.shape[1] // key.shape[1], torch.arange(key.shape[2]), positions.transpose(-1, -2)
    query, key, value = (each.double() for each in (query, key, value))
    scores = scale * query @ key.repeat_interleave(shared, dim=1).transpose(-1, -2)
    seen = (slots <= last) & (slots > last - window if window != ALL else slots >= 0)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return (weights @ value.repeat_interleave(shared, dim=1)).transpose(1, 2)


def assert_right(given: tuple[Tensor, Tensor, Tensor], positions: Tensor, window: int = ALL) -> None:
    found = attend(*given, positions, 0.3, window)
    expected = reference(*given, positions, 0.3, window)
    assert found.dtype == given[0].dtype
    assert found.is_contiguous()
    tolerance = PRECISIONS[found.dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("instructions")
@needs_kernel
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_values_equal_those_of_float64(dtype: torch.dtype) -> None:
    """Every size meets 1 to 16 positions; ratios of heads and odd reaches take turns."""
    torch.manual_seed(0)
    for size, width in itertools.product([*range(32, 129, 16), 8, 20, 256], range(1, 17)):
        groups, shared, start = 1 + width % 3, (1, 3, 4, 7)[width % 4], (0, 1, 31, 32, 65, 130)[width % 6]
        given = states(dtype, heads=groups * shared, groups=groups, width=width, slots=start + width + 5, size=size)
        assert_right(given, at(start, width=width))


@pytest.mark.usefixtures("instructions")
@needs_kernel
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_long_contexts_are_combined_from_chunks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for start, window in itertools.product([510, 511, 512, 1023, 1300], [ALL, 1, 6, 33, 600]):
        assert_right(states(dtype, width=3, slots=1400), at(start, width=3), window)


@needs_kernel
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_a_cache_of_any_layout_is_read_where_it_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = states(dtype, batch=3, width=2, slots=50)
    expected = attend(query[1:], key[1:], value[1:], at(44, 30, width=2), 0.3, ALL)
    slots_first = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value)]
    found = attend(*(each[1:] for each in slots_first), at(44, 30, width=2), 0.3, ALL)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("instructions")
@needs_kernel
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_scores_of_any_size_have_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = states(dtype, slots=70)
    for factor in (0.0, 300.0):
        assert_right((query * factor, key, value), at(66))
    assert attend(query, key * torch.nan, value, at(66), 0.3, ALL).isnan().all()


@pytest.mark.usefixtures("instructions")
@needs_kernel
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_slots_beyond_the_reach_are_not_read(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = states(dtype, width=2, slots=100)
    expected = attend(query, key[:, :, :43], value[:, :, :43], at(41, width=2), 0.3, ALL)
    key[:, :, 43:], value[:, :, 43:] = torch.nan, torch.nan
    assert torch.equal(attend(query, key, value, at(41, width=2), 0.3, ALL), expected)


@pytest.mark.usefixtures("instructions")
@needs_kernel
@pytest.mark.parametrize(("start", "size"), [(20, 16), (1020, 64), (1020, 36)])
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_a_position_gets_the_same_bits_whatever_else_is_in_the_pass(dtype: torch.dtype, start: int, size: int) -> None:
    """Few rows read keys and values where they are, more convert each once."""
    torch.manual_seed(0)
    query, key, value = states(dtype, width=16, slots=1100, size=size)
    whole = attend(query, key, value, at(start, width=16), 0.3, ALL)
    for first, end in [(0, 1), (0, 5), (3, 4), (7, 16), (15, 16)]:
        part = attend(query[:, :, first:end], key, value, at(start + first, width=end - first), 0.3, ALL)
        assert torch.equal(part, whole[:, first:end])
    try:
        torch.set_num_threads(2)
        assert torch.equal(attend(query, key, value, at(start, width=16), 0.3, ALL), whole)
    finally:
        torch.set_num_threads(1)


# --- where it is used -------------------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox_parallel"])
def test_all_layers_of_ordinary_families_attend_by_the_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or several sequences: the text of the other grids is the eager text by these calls."""
    windows: list[int] = []

    def watched(*given: Any) -> Tensor:
        windows.append(given[-1])
        return attend(*given)

    monkeypatch.setattr("decoding.target.attention.attend", watched)
    target = Target(build(family), uncompiled)
    assert target.runner.attends_by_position
    for both in ([(5, 6)], [(5, 6)] * 2):
        windows.clear()
        plain_decoder(target).generate_batch(requests(both))
        expected = [ALL if window is None else window for window in target.mask_kinds.windows]  # type: ignore[union-attr]
        assert windows[: len(expected)] == expected


@pytest.mark.parametrize("family", ["gemma2", "gptj"])
def test_other_attention_keeps_its_masks(family: str) -> None:
    """Soft-caps, sinks, and attention that is not transformers' own, or gets its mask by position."""
    target = Target(build(family), uncompiled)
    assert not target.runner.attends_by_position
    assert not any(target.anatomy.attends_plainly)


@pytest.mark.parametrize("planted", ["bias", "two calls"])
def test_one_layer_that_does_more_than_the_kernel_keeps_the_masks_of_all(
    planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    genuine = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def more(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Any:
        if module.layer_idx != 2:
            return genuine(module, query, key, value, mask, **settings)
        if planted == "two calls":
            genuine(module, query, key, value, mask, **settings)
            return genuine(module, query, key, value, mask, **settings)
        bias = torch.zeros(query.shape[-2], key.shape[-2]).masked_fill(
            torch.ones(query.shape[-2], key.shape[-2]).triu(1 + key.shape[-2] - query.shape[-2]).bool(), -1e9
        )
        return genuine(module, query, key, value, bias - 0.1, **{**settings, "is_causal": False})

    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", more)
    target = Target(build("llama"))
    assert target.anatomy.attends_plainly == (True, True, False, True, True)
    assert not runner(target.mask_kinds).attends_by_position  # type: ignore[arg-type]


def runner(kinds: MaskKinds, **settings: Any) -> StaticRunner:
    return StaticRunner(kinds, settings.pop("device", CPU), compiled=False, **settings)


def test_runners_that_record_and_other_precisions_keep_their_masks() -> None:
    plain = MaskKinds((None,), torch.float32, attends_plainly=True)
    assert not runner(plain, recorder=CountingRecorder()).attends_by_position, "a recorder stands for a GPU"
    assert not runner(MaskKinds((None,), torch.float64, attends_plainly=True)).attends_by_position
    assert not runner(MaskKinds((None,), torch.float32)).attends_by_position
    assert not EagerRunner(plain).attends_by_position
    assert not Target(build("llama")).runner.attends_by_position
    assert (
        kernel_for("attention", torch.device("cuda", 0), torch.float32).reason == "there is no kernel of ours for cuda"
    )


class Layer(torch.nn.Module):
    """What the attention of a prepared layer has."""

    num_key_value_groups = 2
    is_causal = True
    sdtune_window = 3


def test_autograd_gets_the_same_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("decoding.target.attention.attend", None)
    query, key, value = states(torch.float32, width=3)
    query.requires_grad_()
    found, _ = kernel_attention(Layer(), query, key, value, at(17, width=3), scaling=0.3)
    torch.testing.assert_close(found.double(), reference(query, key, value, at(17, width=3), 0.3, 3))
    found.sum().backward()
    assert query.grad is not None


def test_positions_stand_in_for_masks_of_every_kind() -> None:
    kinds = Positions((None, 4, None), torch.float32)
    alone, together = torch.tensor([3, 4]), torch.tensor([[3, 4], [7, 8]])
    assert [each.tolist() for each in kinds.masks(alone, 64)] == [[[[[3, 4]]]]] * 2
    assert kinds.masks(together, 64)[0].shape == (2, 1, 1, 2)
