"""Models that were compiled before they are given to a decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from decoding.deploy import load_decoder
from decoding.deploy.mismatch import compiled_model
from decoding.errors import ProfileWarning
from tests.support.profiles import profile_of
from tests.support.tiny import tiny_llama

PROMPT = torch.tensor([[5, 17, 33, 8]])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}
Backend = Callable[[Any, Any], Any]


def _by_method(model: LlamaForCausalLM, backend: Backend) -> None:
    model.compile(backend=backend)


def _by_forward(model: LlamaForCausalLM, backend: Backend) -> None:
    model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]


@pytest.mark.parametrize("compile_model", [_by_method, _by_forward])
def test_a_compiled_model_is_said_once_and_costs_no_compilation(
    compile_model: Callable[[LlamaForCausalLM, Backend], None],
) -> None:
    num_compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    model = tiny_llama()
    decoder, expected = load_decoder(profile_of(model)), model.generate(PROMPT, **GREEDY)
    compile_model(model, backend)
    with pytest.warns(ProfileWarning, match="is compiled") as caught:
        found = [decoder.generate(model, PROMPT, **GREEDY) for _ in range(2)]
    assert all(torch.equal(each, expected) for each in found)  # type: ignore[arg-type]
    assert len(caught) == 1
    assert num_compiled == 0
    assert decoder.last_generation is not None
    assert decoder.last_generation.num_drafted > 0


def test_compiled_blocks_are_said() -> None:
    model = tiny_llama()
    assert compiled_model(model) is None
    model.model.layers[1].compile(backend="eager")
    assert "is compiled" in str(compiled_model(model))
