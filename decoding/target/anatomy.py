"""The structure of a loaded decoder, found by inspection and by a two-token pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from decoding.cache.kv_cache import KVCache
from decoding.errors import SdtuneError, UnsupportedModelError, UnsupportedRunnerError, one_line
from decoding.memory import is_out_of_memory
from decoding.runners.masks import MaskKinds
from decoding.target.stand_ins import first_of

REPLACED = "sdpa"
"""transformers' implementation of attention whose place kernels take."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Sublayer:
    """A branch of a block: its module's name and number of outputs (0 for a bare tensor)."""

    name: str
    num_outputs: int


@dataclass(frozen=True)
class Anatomy:
    """The structure that one forward pass revealed: the blocks' location and their sublayers."""

    path: tuple[str, ...]
    """Attribute names from the model to its list of blocks."""
    block_outputs: int
    """Number of values that a block returns (0 for a bare tensor)."""
    attention: tuple[Sublayer | None, ...]
    """Per block, the module that received the cache."""
    mlp: tuple[Sublayer | None, ...]
    """Per block, the largest other module that keeps the shape of the hidden states."""
    attends_plainly: tuple[bool, ...]
    """Per block, True if its attention is one that a kernel may take over (see `_is_plain`), and gets its
    mask by name.
    """


@dataclass(frozen=True)
class RopeChange:
    """The position from which a rotary embedding's frequencies depend on the sequence length.

    `once` is True if the frequencies change only at this position.
    """

    position: int
    once: bool


@contextmanager
def refusing(model: Any, doing: str) -> Iterator[None]:
    """Turn what the code of `model` raises into an `UnsupportedModelError`; our own errors and lack of memory pass.

    For calls into the model only.
    """
    try:
        yield
    except SdtuneError:
        raise
    except Exception as cause:
        if is_out_of_memory(cause):
            raise
        kind, reason = type(cause).__name__, one_line(cause)
        described = kind if reason == kind else f"{kind}: {reason}"
        raise UnsupportedModelError(f"{type(model).__name__} {doing}: {described}") from cause


def refuse_recurrent_state(model: PreTrainedModel, config: Any) -> None:
    """Raise UnsupportedModelError if the model's own cache cannot be rolled back.

    Without this check `crop` would return without an error and corrupt the output.
    """
    with refusing(model, "has a configuration for which transformers makes no key-value cache"):
        layers = DynamicCache(config=config).layers
    kinds = [
        type(layer).__name__ for layer in layers if not layer.is_croppable and not getattr(layer, "is_sliding", False)
    ]
    if kinds:
        raise UnsupportedModelError(
            f"{config.model_type} keeps a recurrent state in {len(kinds)} of {len(layers)} layers ({kinds[0]}), which cannot be "
            "rolled back after a rejected draft: only models whose whole state is a key-value cache can decode speculatively"
        )


def examine(model: PreTrainedModel, config: Any) -> Anatomy:
    """Run two tokens through the model and record the inputs and outputs of its blocks.

    Raises `UnsupportedModelError` if the model does not run on a `KVCache`, or if a layer does not write its keys and
    values exactly once per pass.
    """
    num_layers = getattr(config, "num_hidden_layers", None)
    if num_layers is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has a configuration without num_hidden_layers, by which its decoder blocks are found"
        )
    path = _find_blocks(model, num_layers)
    blocks = follow(model, path)
    cache = KVCache(len(blocks), capacity=2)
    outputs: list[int] = []
    calls, seen_calls, mask_names = _AttentionCalls(), list[list[Call]](), list[bool]()
    children: list[list[tuple[str, Sublayer, bool, bool]]] = [[] for _ in blocks]

    def watch_block(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        outputs.append(_num_outputs(output))
        seen_calls.append(calls.take())
        mask_names.append("attention_mask" in kwargs)

    def watch_child(index: int, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        takes_cache = any(value is cache for value in (*args, *kwargs.values()))
        given = args[0] if args else kwargs.get("hidden_states")
        first = first_of(output)
        keeps_shape = isinstance(given, Tensor) and isinstance(first, Tensor) and given.shape == first.shape
        children[index].append((name, Sublayer(name, _num_outputs(output)), takes_cache, keeps_shape))

    handles = []
    try:
        for index, block in enumerate(blocks):
            handles.append(block.register_forward_hook(watch_block, with_kwargs=True))
            for name, child in block.named_children():
                hook = functools.partial(watch_child, index, name)
                handles.append(child.register_forward_hook(hook, with_kwargs=True))
        with torch.inference_mode(), calls, refusing(model, "does not run on sdtune's key-value cache"):
            run_two_tokens(model, cache)
    finally:
        for handle in handles:
            handle.remove()
    if len(outputs) != len(blocks):
        raise UnsupportedModelError(
            f"{type(model).__name__} runs the {len(blocks)} modules of {'.'.join(path)} {len(outputs)} times in one pass, not once "
            "each: they are not its decoder blocks"
        )
    stateful = [index for index, updates in enumerate(cache.updates_per_layer) if updates != 1]
    if stateful:
        raise UnsupportedModelError(
            f"layer {stateful[0]} of {type(model).__name__} wrote its keys and values {cache.updates_per_layer[stateful[0]]} "
            "times in one pass instead of once: it keeps its state elsewhere or shares another layer's, and could not be "
            "rolled back after a rejected draft"
        )
    attention, mlp = [], []
    for block, seen in zip(blocks, children, strict=True):
        attention.append(next((sublayer for _, sublayer, takes_cache, _ in seen if takes_cache), None))
        others = [sublayer for _, sublayer, takes_cache, keeps_shape in seen if keeps_shape and not takes_cache]
        heaviest = max(others, key=lambda sublayer: _num_weights(getattr(block, sublayer.name)), default=None)
        # A norm keeps the shape too, but only an MLP holds matrices.
        is_mlp = heaviest is not None and any(p.ndim > 1 for p in getattr(block, heaviest.name).parameters())
        mlp.append(heaviest if is_mlp else None)
    plainly = [
        named and sublayer is not None and _is_plain(getattr(block, sublayer.name), calls_of_block)
        for block, sublayer, named, calls_of_block in zip(blocks, attention, mask_names, seen_calls, strict=True)
    ]
    return Anatomy(path, outputs[0], tuple(attention), tuple(mlp), tuple(plainly))


def run_two_tokens(model: Any, cache: KVCache, token_ids: Tensor | None = None) -> Tensor:
    """Run two tokens [1, 2], the first of the vocabulary by default, on an empty cache; return the logits of the last."""
    device = model.get_input_embeddings().weight.device
    positions = torch.arange(2, device=device)[None]
    cache.cover(0, 2)
    output = model(
        input_ids=positions if token_ids is None else token_ids,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits
    return logits


def _find_blocks(model: PreTrainedModel, num_layers: int) -> tuple[str, ...]:
    """Return the attribute path of the block list: the outermost ModuleList of the configured length, in no other list."""
    paths: list[list[str]] = [
        name.split(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and not any(map(str.isdigit, name.split(".")))
    ]
    if not paths:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {num_layers} decoder blocks, the number in its configuration"
        )
    outermost = min(paths, key=len)
    return tuple(outermost)


def find_rope_change(config: Any) -> RopeChange | None:
    """Return the first position where a rotary embedding depends on the sequence length, or None."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [rope for rope in parameters.values() if isinstance(rope, dict)]
    changes = []
    for rope in per_layer_type or [parameters]:
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            changes.append(RopeChange(rope["original_max_position_embeddings"], once=True))
        elif "dynamic" in kind:
            changes.append(RopeChange(config.max_position_embeddings, once=False))
    return min(changes, key=lambda change: change.position, default=None)


def follow(model: Any, path: tuple[str, ...]) -> nn.ModuleList:
    return functools.reduce(getattr, path, model)


def _num_outputs(output: Any) -> int:
    return len(output) if isinstance(output, tuple) else 0


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def find_mask_kinds(config: Any, dtype: torch.dtype) -> MaskKinds:
    """Return each layer's attention window, by transformers' own mask rules.

    Raises `UnsupportedRunnerError` for layers with other masks, and for attention implementations without fixed-shape
    masks.
    """
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise UnsupportedRunnerError(
            f"attention {implementation!r} does not support fixed-shape masks: load the model with sdpa"
        )
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    if strange := sorted({*kinds} - {"full_attention", "sliding_attention"}):
        raise UnsupportedRunnerError(f"layers of type {strange[0]!r} need masks that sdtune does not build")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    # Additive for `sdpa` too: it would turn a boolean mask into an additive one in every layer.
    return MaskKinds(windows, additive=dtype)


class _AttentionCalls(TorchFunctionMode):
    """Notes the calls of torch's attention made under it."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[Call] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is scaled_dot_product_attention:
            self._noted.append((tuple(args), dict(kwargs or {})))
        return function(*args, **(kwargs or {}))

    def take(self) -> list[Call]:
        noted, self._noted = self._noted, []
        return noted


def _is_plain(attention: nn.Module, calls: Sequence[Call]) -> bool:
    """Return True if a kernel that knows scale, window and shared heads may compute this layer's `calls`.

    Judged is what a layer does, not what it is called: one call of `scaled_dot_product_attention`, by which every position
    sees itself and the positions before it, without dropout or a bias of the scores.
    """
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", None)
    if implementation != REPLACED or len(calls) != 1:
        return False
    given, named = calls[0]
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    call: dict[str, Any] = {**dict(zip(names, given, strict=False)), **named}
    sizes = {call[name].shape[-1] for name in ("query", "key", "value")}
    lengths = {call[name].shape[-2] for name in ("query", "key", "value")}
    return len(sizes) == len(lengths) == 1 and not call.get("dropout_p") and _is_causal(call, lengths.pop())


def _is_causal(call: Mapping[str, Any], length: int) -> bool:
    mask: Tensor | None = call.get("attn_mask")
    if mask is None:
        return bool(call.get("is_causal"))
    seen = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype is not torch.bool:
        hidden = torch.full_like(mask, torch.finfo(mask.dtype).min)
        return bool((mask == torch.where(seen, 0, hidden)).all())
    return bool((mask == seen).all())
