"""Tiny random float32 models of many families, for the losslessness grid.

Each is built from its family's own configuration, with a window shorter than the sequences where it has one. Random
weights of the usual scale give near-uniform logits and sequences that repeat one token. Here the logits are spread
and later blocks are quieter than earlier ones, so that a draft without some of them is right sometimes but not
always.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from decoding.runners.static import StaticRunner
from decoding.target import Target

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
GROUPED = {"num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED_WINDOWS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
PER_LAYER_INPUTS = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
GEMMA_3N = {
    **HEADS,
    **MIXED_WINDOWS,
    **PER_LAYER_INPUTS,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "intermediate_size": [48] * NUM_LAYERS,
    "activation_sparsity_pattern": [0.0] * NUM_LAYERS,
}
GEMMA_4 = {**HEADS, **MIXED_WINDOWS, **PER_LAYER_INPUTS, "global_head_dim": 8}

# Name -> transformers' configuration class without `Config`, and deviations from SIZES. Seeds are chosen so that the output does
# not degenerate into repeating a token or two.
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"seed": 3, **GROUPED}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {"seed": 4, **HEADS}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, **GROUPED}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 8, **HEADS, **MIXED_WINDOWS}),
    "gemma3": ("Gemma3Text", {"query_pre_attn_scalar": 8, **HEADS, **MIXED_WINDOWS}),
    "phi3": ("Phi3", {"seed": 4, **GROUPED}),
    "olmo2": ("Olmo2", {"seed": 8, **GROUPED}),
    "gpt_neox_parallel": ("GPTNeoX", {"seed": 10, "use_parallel_residual": True}),
    "gpt_neox_sequential": ("GPTNeoX", {"seed": 4, "use_parallel_residual": False}),
    "mixtral": ("Mixtral", {"seed": 5, **LOCAL_EXPERTS, **GROUPED}),
}
PROMISED = frozenset(SUPPORTED)
# Each has something that a view must handle: blocks that return tuples; positional mask arguments; alibi;
# sinks and an MLP that returns a tuple; states of four dimensions; an input of its own for each layer.
SUPPORTED |= {
    "gptj": ("GPTJ", {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "rotary_dim": 4, "seed": 1}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "seed": 2}),
    "bloom": ("Bloom", {"n_layer": NUM_LAYERS, "n_head": 4, "seed": 8}),
    "gpt_oss": ("GptOss", {"sliding_window": WINDOW, "rope_parameters": PLAIN_ROPE, **LOCAL_EXPERTS, **HEADS}),
    "gemma3n": ("Gemma3nText", {"num_kv_shared_layers": 0, **GEMMA_3N}),
    "gemma4": ("Gemma4Text", {"num_kv_shared_layers": 0, **GEMMA_4}),
}

# Name -> as above, and a word from the reason for the refusal.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_next": (
        "Qwen3Next",
        {"shared_expert_intermediate_size": 16, **HEADS, **EXPERTS, **LINEAR_ATTENTION},
        "recurrent state in 3 of 5 layers",
    ),
    "mamba": ("Mamba", {"state_size": 4}, "recurrent state in 5 of 5 layers"),
    "falcon_h1": (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, **GROUPED},
        "recurrent state in 5 of 5 layers",
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"], **GROUPED},
        "recurrent state in 3 of 5 layers",
    ),
    "rwkv": ("Rwkv", {"attention_hidden_size": 32, "context_length": 256}, "keeps its state elsewhere"),
    "gemma3n_shared": ("Gemma3nText", {"num_kv_shared_layers": 2, **GEMMA_3N}, "shares another layer's"),
    "gemma4_shared": ("Gemma4Text", {"num_kv_shared_layers": 2, **GEMMA_4}, "shares another layer's"),
}


def of_depth(family: str, num_layers: int) -> dict[str, Any]:
    """Return the settings for `build` that leave a family its first blocks: for tests that look at no values."""
    own = SUPPORTED[family][1]
    listed = {name: value[:num_layers] for name, value in own.items() if isinstance(value, list)}
    return {**listed, "num_hidden_layers": num_layers, **({"n_layer": num_layers} if "n_layer" in own else {})}


def build(family: str, **settings: Any) -> PreTrainedModel:
    """Build the tiny model of one of the families above; `settings` override its own."""
    config_class, own = (SUPPORTED.get(family) or REFUSED[family])[:2]
    return make(config_class, **{**own, **settings})


@torch.inference_mode(False)  # what is shared may be made by a test in inference mode, and is then used by others
def make(config_class: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Build a tiny causal language model of transformers' `{config_class}Config` with SIZES and `settings`."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{config_class}Config")(**{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    liven(model)
    return model


def dbrx() -> PreTrainedModel:
    """Build a DBRX, whose attention returns the residual stream too."""
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}
    experts = {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 256, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    config = transformers.DbrxConfig(attn_config=attention, ffn_config=experts, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    liven(model)
    return model


@functools.cache
@torch.inference_mode(False)
def target_of(family: str) -> Target:
    """Return the family's model, built once per process."""
    return Target(build(family))


@functools.cache
@torch.inference_mode(False)
def static_target_of(family: str) -> Target:
    """Return the family's model with the static runner, uncompiled, made and checked once per process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoding.kernels.choice.MIN_REFINED", 0)  # as of a large vocabulary
        return Target(build(family), functools.partial(StaticRunner, compiled=False))


def some_tokens(count: int, seed: int = 0) -> list[int]:
    """Return a prompt of `count` random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator).tolist()


@torch.no_grad()
def liven(model: PreTrainedModel) -> None:
    """Draw weights that preserve activation sizes, and make each block quieter than the one before."""
    for path, module in model.named_modules():
        block = re.search(r"\.(?:layers|h)\.(\d+)", path)
        loudness = 0.9 ** int(block.group(1)) if block else 1.0
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                weight.normal_()
            elif weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif name == "weight":  # a norm; some families store its difference from 1
                offset = 0.0 if weight.any() else 1.0
                weight.normal_(mean=loudness, std=0.1).sub_(offset)
    head = model.get_output_embeddings()
    if head is not None:
        head.weight.mul_(3.0)
