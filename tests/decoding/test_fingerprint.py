"""Which model is it? The same in every precision, another for other weights or another configuration."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from decoding.fingerprint import fingerprint, tokenizer_sha256
from tests.tiny import tiny_llama, tiny_tokenizer


def test_precision_and_folder_do_not_matter(tmp_path: Path) -> None:
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "a")
    loads = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    ]
    loads[0].config.name_or_path = "elsewhere"
    assert fingerprint(loads[0]) == fingerprint(loads[1])


def test_other_weights_and_shapes_are_seen() -> None:
    base = fingerprint(tiny_llama())
    changed = tiny_llama()
    with torch.no_grad():
        changed.model.layers[3].mlp.up_proj.weight.view(-1)[0] += 1.0  # a sampled place
    assert fingerprint(changed).weights_sha256 != base.weights_sha256
    assert fingerprint(tiny_llama(seed=1)).weights_sha256 != base.weights_sha256
    assert fingerprint(tiny_llama(5)).weights_sha256 != base.weights_sha256
    assert fingerprint(tiny_llama()) == base


def test_a_configuration_that_computes_something_else_is_seen() -> None:
    model = tiny_llama()
    before = fingerprint(model)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}
    assert fingerprint(model).config_sha256 != before.config_sha256
    assert fingerprint(model).weights_sha256 == before.weights_sha256


def test_a_tokenizer_is_its_vocabulary() -> None:
    grown = tiny_tokenizer()
    grown.add_tokens(["another"])
    assert tokenizer_sha256(tiny_tokenizer()) == tokenizer_sha256(tiny_tokenizer())
    assert tokenizer_sha256(grown) != tokenizer_sha256(tiny_tokenizer())
