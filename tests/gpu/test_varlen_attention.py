"""Variable-length attention on a device: the kernel against its documented semantics, and texts against eager ones."""

from __future__ import annotations

import functools

import pytest
import torch

from decoding.cache.last_position import used_lengths
from decoding.decoder import plain_decoder
from decoding.runners.features import SpeedFeatures
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.target.varlen import find_kernel
from tests.support.families import build
from tests.support.recorded_decoding import requests
from tests.support.varlen_reference import varlen_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda")
NUM_SLOTS = 512


@pytest.mark.parametrize("window", [None, 1, 6, 300])
@pytest.mark.parametrize(("num_heads", "num_shared"), [(4, 4), (8, 2)])
@pytest.mark.parametrize("width", [1, 5, 16])
@torch.inference_mode()
def test_kernel_computes_what_it_documents(width: int, num_heads: int, num_shared: int, window: int | None) -> None:
    torch.manual_seed(0)
    used = torch.tensor([width, 200, NUM_SLOTS - 1], device=DEVICE)
    query = torch.randn(3 * width, num_heads, 64, device=DEVICE, dtype=torch.bfloat16)
    key, value = (torch.randn(3 * NUM_SLOTS, num_shared, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    query_ends, key_ends, lengths = used_lengths(used, width, NUM_SLOTS)[0, 0]
    reach = (-1 if window is None else window - 1, 0)
    found, expected = (
        each(
            query,
            key,
            value,
            query_ends,
            key_ends,
            width,
            NUM_SLOTS,
            window_size=reach,
            enable_gqa=num_heads != num_shared,
            seqused_k=lengths[:3],
        )
        for each in (find_kernel(DEVICE, torch.bfloat16), varlen_reference)
    )
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_recorded_passes_run(compiled: bool) -> None:
    """The check of a new target compares logits with the eager ones; texts in bfloat16 may differ by ties."""
    model = build("mistral", hidden_size=64).to(DEVICE, torch.bfloat16)
    features = SpeedFeatures(varlen_attention=True)
    target = Target(model, functools.partial(StaticRunner, compiled=compiled, features=features))
    for generation in plain_decoder(target).generate_batch(requests()).generations:
        assert generation.tokens
    assert plain_decoder(target).generate(requests()[0]).tokens
