"""The bound of one token a pass: what a pass reads, counted by hand, over what memory gives."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from decoding.target import Target
from tests.support.tiny import tiny_llama
from tuner.evaluation.gpu.roofline import Bandwidth, Reading, Roofline, measure_bandwidth, reading, seconds_by_events

CPU = torch.device("cpu")
PER_POSITION = 6 * 2 * 2 * 8 * 4
"""Layers, keys and values, heads, head size, bytes of a float32."""


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_bound_is_bytes_per_second_over_bytes_per_token() -> None:
    bandwidth = Bandwidth(buffer_bytes=100, seconds=(4.0, 1.0, 2.0))
    assert bandwidth.bytes_per_second == 50.0
    roofline = Roofline(bandwidth=bandwidth, reading=Reading(weights=10, keys_and_values=15.0, mean_context=3.0))
    assert roofline.reading.total == 25.0
    assert roofline.tokens_per_second == 2.0
    both = bandwidth.and_also(Bandwidth(buffer_bytes=100, seconds=(2.0, 5.0)))
    assert both.seconds == (4.0, 1.0, 2.0, 2.0, 5.0)


def test_a_batch_reads_weights_once_and_keys_and_values_of_each_sequence() -> None:
    bandwidth = Bandwidth(buffer_bytes=100, seconds=(1.0,))
    roofline = Roofline(
        bandwidth=bandwidth, reading=Reading(weights=10, keys_and_values=15.0, mean_context=3.0, batch_size=4)
    )
    assert roofline.reading.total == 10 + 4 * 15
    assert roofline.tokens_per_second == pytest.approx(4 * 100 / 70)


def test_what_a_batch_reads_is_counted_by_its_texts() -> None:
    target = Target(tiny_llama())
    alone, together = reading(target, [10.0, 20.0]), reading(target, [10.0, 20.0], batch_size=3)
    assert together == alone.model_copy(update={"batch_size": 3})
    assert together.total == alone.weights + 3 * 15 * PER_POSITION


def test_the_first_read_is_not_counted() -> None:
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 23.0])
    found = measure_bandwidth(CPU, buffer_bytes=4096, num_reads=2, clock=lambda: next(times))
    assert found == Bandwidth(buffer_bytes=4096, seconds=(2.0, 3.0))


def test_cuda_events_time_the_device_and_not_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device needs 2 ms for the work; whatever the host's clock says is not asked for."""
    queue: list[float] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = sum(queue)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(time, "perf_counter", lambda: pytest.fail("the host's clock was read"))
    assert seconds_by_events(torch.device("cuda", 1), lambda: queue.append(2.0)) == pytest.approx(0.002)


def test_all_weights_count_but_the_embedding_of_which_a_row_is_read() -> None:
    model = tiny_llama()
    embedding = model.model.embed_tokens.weight.numel()
    found = reading(Target(model), [10.0])
    assert found.weights == 4 * (num_parameters(model) - embedding)
    assert found.keys_and_values == 10 * PER_POSITION
    assert (found.mean_context, found.experts) == (10.0, None)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_embedding_that_is_the_output_layer_counts() -> None:
    config = LlamaConfig(**{**tiny_llama().config.to_dict(), "tie_word_embeddings": True, "num_hidden_layers": 2})
    model = LlamaForCausalLM(config).eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert reading(Target(model), [1.0]).weights == 4 * num_parameters(model)


def test_half_the_precision_is_half_the_bytes() -> None:
    whole, half = reading(Target(tiny_llama()), [10.0]), reading(Target(tiny_llama().bfloat16()), [10.0])
    assert 2 * half.weights == whole.weights
    assert 2 * half.keys_and_values == whole.keys_and_values


def test_a_window_ends_what_is_read_of_the_layers_that_slide(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_llama())
    monkeypatch.setattr(target.config, "sliding_window", 4, raising=False)
    assert reading(target, [10.0]).keys_and_values == 4 * PER_POSITION
    kinds = ["sliding_attention", "full_attention"] * 3
    monkeypatch.setattr(target.config, "layer_types", kinds, raising=False)
    assert reading(target, [10.0]).keys_and_values == (4 + 10) / 2 * PER_POSITION
    # Short contexts are not cut, and the mean is over texts: (3 + 7) / 2 positions, where a window of 4 lets pass 3 and 7.
    assert reading(target, [2.0, 10.0]).keys_and_values == ((2 + 2) / 2 + (4 + 10) / 2) / 2 * PER_POSITION


def test_of_a_mixture_those_experts_count_that_compute_a_token() -> None:
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        )
    ).eval()  # fmt: skip
    stacked = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 3)
    assert stacked == 2 * 4 * 3 * 16 * 24
    found = reading(Target(model), [1.0])
    embedding = model.model.embed_tokens.weight.numel()
    assert found.experts == (2, 4)
    assert found.weights == 4 * (num_parameters(model) - embedding - stacked // 2)
