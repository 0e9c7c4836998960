"""Model identity: equal in every precision, different for other weights or another configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from decoding.fingerprint import fingerprint, tokenizer_sha256
from tests.support.tiny import tiny_llama, tiny_tokenizer


def test_precision_does_not_matter_where_a_configuration_holds_others(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = {"vocab_size": 32, "hidden_size": 16, "num_key_value_heads": 1, "head_dim": 8, **sizes}
    vision = {"hidden_size": 16, "image_size": 28, "patch_size": 14, **sizes}
    image_tokens = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7, "mm_tokens_per_image": 4}
    config = Gemma3Config(text_config=text, vision_config=vision, **image_tokens)
    Gemma3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path)
    loads = [
        Gemma3ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert fingerprint(loads[0]) == fingerprint(loads[1])
    loads[1].config.text_config.rms_norm_eps = 0.5
    assert fingerprint(loads[0]).config_sha256 != fingerprint(loads[1]).config_sha256


def test_how_attention_is_computed_does_not_matter(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    loads = [
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=kind, dtype=torch.float32)
        for kind in ("eager", "sdpa")
    ]
    assert fingerprint(loads[0]) == fingerprint(loads[1]) == fingerprint(tiny_llama())


def test_the_ends_of_a_weight_are_sampled() -> None:
    for index in (0, -1):
        model = tiny_llama()
        with torch.no_grad():
            model.model.layers[2].self_attn.q_proj.weight.view(-1)[index] += 1.0
        assert fingerprint(model).weights_sha256 != fingerprint(tiny_llama()).weights_sha256


def test_every_setting_that_computes_something_else_is_seen() -> None:
    for setting in ("rms_norm_eps", "hidden_act", "num_attention_heads"):
        model = tiny_llama()
        setattr(model.config, setting, {"rms_norm_eps": 0.5, "hidden_act": "relu", "num_attention_heads": 2}[setting])
        assert fingerprint(model).config_sha256 != fingerprint(tiny_llama()).config_sha256


def test_settings_of_loading_do_not_matter() -> None:
    for setting in ("name_or_path", "use_cache", "dtype", "transformers_version", "architectures"):
        model = tiny_llama()
        setattr(model.config, setting, {"use_cache": False, "architectures": ["X"]}.get(setting, "float16"))
        assert fingerprint(model) == fingerprint(tiny_llama())


def test_another_end_of_text_token_is_another_tokenizer() -> None:
    ended = tiny_tokenizer()
    ended.eos_token = "w5"
    assert tokenizer_sha256(ended) != tokenizer_sha256(tiny_tokenizer())


def test_a_tokenizer_is_its_vocabulary() -> None:
    grown = tiny_tokenizer()
    grown.add_tokens(["another"])
    assert tokenizer_sha256(tiny_tokenizer()) == tokenizer_sha256(tiny_tokenizer())
    assert tokenizer_sha256(grown) != tokenizer_sha256(tiny_tokenizer())
