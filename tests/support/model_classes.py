"""Tiny models of every class that transformers registers for causal language modelling, shrunk by the names of their settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.support.families import VOCABULARY, dbrx, liven

MOST_PARAMETERS = 3_000_000
NUM_LAYERS = 4
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LAST_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": VOCABULARY - 1}
LATENT = {"qk_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8}
ALL_FULL = {"layer_types": ["full_attention"] * NUM_LAYERS}

# Patterns of settings' names, and the value that such a setting gets where it is a number.
SIZES: dict[str, int] = {
    r".*vocab_size(_per_layer_input)?|n_vocab": VOCABULARY,
    r"hidden_size|d_model|n_embd|dim|hidden_dim|embed_dim|word_embed_proj_dim|embedding_size|emb_dim|n_embed|lru_width": 32,
    r"attention_hidden_size|model_dim|projection_dim|dim_model|embedding_dim": 32,
    r".*intermediate_size(_mlp)?|.*ffn_dim|d_ff|d_inner|n_inner|dff|dim_ff|.*ffn_hidden_size|inner_dim|feed_forward_size": 32,
    r"(num_|n_)?(hidden_|decoder_|encoder_)?layers?|num_blocks": NUM_LAYERS,
    r"(num_|n_)?heads?|.*attention_heads": 4,
    r".*key_value_heads|.*kv_heads": 2,
    r".*head_dim|d_kv|size_per_head|kv_channels|.*head_size|dim_head|.*lora_rank|hidden_size_per_layer_input": 8,
    r"(n_routed_|num_local_|num_|moe_num_|n_|zero_)?experts?|zero_expert_num|.*conv_kernel|conv_L_cache|rotary_dim": 4,
    r".*experts_per_tok(en)?|moe_topk|moe_k|top_k": 2,
    r"n_group|topk_group|n_shared_experts|num_shared_experts?|first_k_dense_replace|num_dense_layers": 1,
    r".*sliding_window|window_size": 6,
    r"max_position_embeddings|n_positions|n_ctx|max_seq.*_len(gth)?|context_length|max_(target|source)_positions": 128,
    r"num_kv_shared_layers": 0,
    r"laurel_rank": 4,
}
# Settings that must fit others.
OWN: dict[str, dict[str, Any]] = {
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nTextConfig": {"activation_sparsity_pattern": [0.0] * NUM_LAYERS},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "LongcatFlashConfig": LATENT,
    "XmodConfig": {"default_language": "en_XX"},
}
ENCODERS = (
    "Bert",
    "BertGeneration",
    "BigBird",
    "Camembert",
    "Electra",
    "Ernie",
    "MegatronBert",
    "RemBert",
    "Roberta",
    "XLMRoberta",
)
"""Families that are decoders if their configuration says so."""


def classes() -> dict[str, tuple[type, type, dict[str, Any]]]:
    """Return the configuration and the model class of each entry by name; encoders are entered as decoders too."""
    entries: dict[str, tuple[type, type, dict[str, Any]]] = {}
    for config, found in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        model = found[0] if isinstance(found, tuple) else found
        entries[config.__name__.removesuffix("Config")] = config, model, {}
    for name in ENCODERS:
        entries[f"{name} as a decoder"] = *entries[name][:2], {"is_decoder": True}
    return entries


def build_tiny(name: str) -> PreTrainedModel:
    """Build the model; raise what the last attempt raised if no variant can be built and run by transformers itself."""
    config, model_class, more = classes()[name]
    if name == "Dbrx":
        return dbrx()
    failure: Exception | None = None
    for settings in _variants(config):
        try:
            return _built(config(**{**settings, **OWN.get(config.__name__, {}), **more}), model_class)
        except Exception as cause:  # whatever a configuration or a model objects to
            failure = failure or cause
    assert failure is not None, "there are variants"
    raise failure


def _built(config: Any, model_class: Any) -> PreTrainedModel:
    with torch.device("meta"):
        num_parameters = sum(weight.numel() for weight in model_class(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"still has {num_parameters} parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config).float().eval()
    liven(model)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    return model


def _variants(config: Any) -> Iterator[dict[str, Any]]:
    sizes = _shrunk(config)
    for tokens in (NO_TOKENS, LAST_TOKENS):
        for more in ({}, {"head_dim": 8}, {"num_key_value_heads": 4}, LATENT, ALL_FULL, {**ALL_FULL, "head_dim": 8}):
            yield {**sizes, **tokens, **more}


def _shrunk(config: Any, depth: int = 0) -> dict[str, Any]:
    defaults = config().to_dict()
    sizes: dict[str, Any] = {}
    for name, value in defaults.items():
        if isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), None)
            if size is not None:
                sizes[name] = size
    nested = getattr(config, "sub_configs", {}) if depth < 2 else {}
    for name, kind in nested.items():
        if kind is not transformers.PretrainedConfig and name in defaults:
            sizes[name] = {} if kind is transformers.AutoConfig else _shrunk(kind, depth + 1)
    return sizes
