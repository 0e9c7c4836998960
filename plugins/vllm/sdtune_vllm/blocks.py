"""The modules of a loaded target that draft: which of its blocks and sublayers run, and the exit head after them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decoding.drafts import DraftDocument
from sdtune_vllm.settings import UnsupportedError

HEAD = "sdtune_head"
"""Prefix of the exit head's names in vLLM."""
NORMS = {"input_layernorm", "post_attention_layernorm"}


class Step(NamedTuple):
    """A block of the draft, and which of its sublayers run."""

    block: nn.Module
    attention: bool
    mlp: bool


def steps_of(target: nn.Module, draft: DraftDocument) -> list[Step]:
    """Return the blocks that draft. Raises `UnsupportedError` for a model whose blocks cannot be called one by one."""
    layers = getattr(getattr(target, "model", None), "layers", None)
    if layers is None or not hasattr(target, "compute_logits"):
        raise UnsupportedError(f"{type(target).__name__} has no list of blocks as Llama has")
    names = list(inspect.signature(type(layers[0]).forward).parameters)
    if names[:4] != ["self", "positions", "hidden_states", "residual"]:
        raise UnsupportedError(
            f"the blocks of {type(target).__name__} take other arguments than Llama's: {', '.join(names[1:])}"
        )
    skipped = draft.skipped(len(layers))
    steps = [
        Step(block, index not in skipped.skip_attention, index not in skipped.skip_mlp)
        for index, block in enumerate(layers)
    ]
    if any(step.attention != step.mlp and not _is_plain(step.block) for step in steps):
        raise UnsupportedError(
            f"the blocks of {type(target).__name__} have more norms than Llama's: skip whole blocks only"
        )
    return [step for step in steps if step.attention or step.mlp]


def _is_plain(block: nn.Module) -> bool:
    """Return True for a block with a norm before each sublayer and none after: attention and MLP may then run alone."""
    norms = {name for name, _ in block.named_children() if name.endswith("layernorm")}
    return norms == NORMS and hasattr(block, "self_attn") and hasattr(block, "mlp")


def run(target: nn.Module, steps: list[Step], head: nn.Module | None, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the draft's logits [requests, vocabulary] after one token of each request."""
    model: Any = target.model
    hidden, residual = model.embed_input_ids(tokens), None
    for block, attention, mlp in steps:
        if attention and mlp:
            hidden, residual = block(positions, hidden, residual)
            continue
        norm: Any = block.input_layernorm if attention else block.post_attention_layernorm
        if residual is None:
            residual, hidden = hidden, norm(hidden)
        else:
            hidden, residual = norm(hidden, residual)
        sublayer: Any = block.self_attn if attention else block.mlp
        hidden = sublayer(positions=positions, hidden_states=hidden) if attention else sublayer(hidden)
    if head is not None:
        hidden, residual = head(positions, hidden, residual)
    hidden, _ = model.norm(hidden, residual)
    logits: Tensor = target.compute_logits(hidden)  # type: ignore[operator]
    return logits


def load_head(target: nn.Module, config: Any, file: Path) -> tuple[nn.Module, str]:
    """Return the exit head, a block like the last one, and the name of its attention, which has keys and values of its own."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.utils.torch_utils import set_default_torch_dtype

    if not supports_eagle3(target):
        raise UnsupportedError(f"{type(target).__name__} does not hand over the states that an exit head reads in vLLM")
    layers: Any = target.model.layers  # type: ignore[union-attr]
    kind, prefix = type(layers[-1]), f"{HEAD}.layers.{len(layers) - 1}"
    known = {
        "vllm_config": config,
        "config": config.model_config.hf_text_config,
        "cache_config": config.cache_config,
        "quant_config": None,
        "prefix": prefix,
    }
    wanted = inspect.signature(kind.__init__).parameters
    if "vllm_config" in wanted:  # it reads the configuration from there
        known = {name: known[name] for name in ("vllm_config", "prefix")}
    if config.quant_config is not None:
        raise UnsupportedError("the model is quantised, and its exit head is not: this was not run with this plugin")
    device, dtype = next(target.parameters()).device, config.model_config.dtype
    with set_current_vllm_config(config, check_compile=False), set_default_torch_dtype(dtype), torch.device(device):
        head: nn.Module = kind(**{name: value for name, value in known.items() if name in wanted})
    _fill(target, head, file)
    process_weights_after_loading(head, config.model_config, device)
    attentions = config.compilation_config.static_forward_context
    name = next(name for name in attentions if name.startswith(prefix))
    backend = attentions[name].attn_backend
    if backend.forward_includes_kv_cache_update:
        raise UnsupportedError(
            f"{backend.get_name()} does not write keys and values without attention, as an exit head needs"
        )
    return head.eval(), name


def _fill(target: Any, head: nn.Module, file: Path) -> None:
    """Load the head as the model's last block, by the model's own loader, which knows what vLLM keeps in one weight."""
    from safetensors import safe_open

    layers = target.model.layers
    place = f"model.layers.{len(layers)}"
    layers.append(head)
    try:
        with safe_open(file, "pt") as weights:
            named = {f"{place}.{name}": weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 - no dict
        loaded = target.load_weights(named.items())
    except (KeyError, ValueError) as cause:
        raise UnsupportedError(f"{file} has weights that {type(head).__name__} lacks") from cause
    finally:
        del layers[-1]
    if missing := {f"{place}.{name}" for name, _ in head.named_parameters()} - loaded:
        raise UnsupportedError(f"{file} lacks weights of {type(head).__name__}: {', '.join(sorted(missing))}")
