"""Tiny random models of many families, in float32: what the losslessness grid decodes with.

Every family is built from its own configuration, with a window shorter than the texts where it has one. Random weights at the
usual scale give near-uniform logits and texts that repeat one token; here logits are spread, and later blocks are quieter than
earlier ones, so that a draft without some of them is right sometimes but not always.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

VOCABULARY = 96
NUM_LAYERS = 5
WINDOW = 6

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
GEMMA: dict[str, Any] = {
    **GROUPED,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


def make(family: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A model of transformers' `{family}ForCausalLM`, sizes as above where `settings` do not say otherwise."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    liven(model)
    return model


@torch.no_grad()
def liven(model: PreTrainedModel) -> None:
    """Draw weights that keep the size of what passes through them, and make each block quieter than the one before."""
    for module_name, module in model.named_modules():
        block = re.search(r"\.(?:layers|h)\.(\d+)", module_name)
        loudness = 0.9 ** int(block.group(1)) if block else 1.0
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                weight.normal_()
            elif weight.ndim >= 2:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif name == "weight":  # a norm; some families store its difference from 1
                offset = 1.0 if not weight.any() else 0.0
                weight.normal_(mean=loudness, std=0.1).sub_(offset)
    model.get_output_embeddings().weight.mul_(3.0)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": functools.partial(make, "Llama", **GROUPED),
    "qwen2": functools.partial(make, "Qwen2", **GROUPED),
    "qwen3": functools.partial(make, "Qwen3", head_dim=8, **GROUPED),
    "mistral": functools.partial(make, "Mistral", sliding_window=WINDOW, **GROUPED),
    "gemma2": functools.partial(make, "Gemma2", **GEMMA),
    "gemma3": functools.partial(make, "Gemma3Text", **GEMMA),
    "phi3": functools.partial(make, "Phi3", **GROUPED),
    "olmo2": functools.partial(make, "Olmo2", **GROUPED),
    "gpt_neox parallel": functools.partial(make, "GPTNeoX", use_parallel_residual=True),
    "gpt_neox sequential": functools.partial(make, "GPTNeoX", use_parallel_residual=False),
    "mixtral": functools.partial(make, "Mixtral", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
}
