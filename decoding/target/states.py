"""Eager passes that read states: of whole sequences without a cache, for training and surveys, and of every sublayer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from decoding.cache.known_prompt import KnownPrompt
from decoding.cache.kv_cache import KVCache
from decoding.errors import UnsupportedModelError
from decoding.runners.eager import EagerRunner
from decoding.target.parts import run_whole, with_blocks
from decoding.target.stand_ins import Head, PassState, Tap, first_of
from decoding.target.target import Target


def exit_states(
    target: Target,
    token_ids: Tensor,
    exit_layers: Sequence[int] | Mapping[int, int],
    *,
    first: int = 0,
    known: KnownPrompt | None = None,
) -> tuple[dict[int, Tensor], Tensor]:
    """Run `token_ids` [batch, length] once without a cache and return exit states and logits.

    The states [batch, length, hidden] are those after the first N blocks, for each N of `exit_layers`. A mapping names the
    position from which on the states of an exit are kept. The logits [batch, length - first, vocabulary] start at position
    `first`. Shorter sequences are padded on the right: causal attention ignores later positions. What is `known` of the first
    positions of a single sequence is not computed again if no state of them is wanted. Raises `ValueError` for an impossible exit
    layer.
    """
    for exit_layer in exit_layers:
        target.check_exit_layer(exit_layer)
    starts = exit_layers if isinstance(exit_layers, Mapping) else dict.fromkeys(exit_layers, 0)
    states = dict[int, Tensor]()
    skipped = first if known is not None and all(start >= first for start in starts.values()) else 0

    def tap(block: nn.Module, exit_layer: int, start: int) -> Tap:
        def keep(found: Tensor) -> None:
            states[exit_layer] = found[..., start - skipped :, :].clone() if start > skipped else found

        return Tap(block, record=keep)

    blocks = [
        tap(block, layer, starts[layer]) if layer in starts else block
        for layer, block in enumerate(target.blocks, start=1)
    ]
    if skipped:
        cache = cache_after(target, token_ids[:, :first], token_ids.shape[1] - first, known)
        logits = EagerRunner().run(target.part(blocks), token_ids[:, first:], cache, first).logits[None]
    else:
        logits = run_whole(with_blocks(target.model, target.anatomy.path, blocks), token_ids, first)
    return {layer: states[layer] for layer in starts}, logits


def exit_logits(
    target: Target,
    token_ids: Tensor,
    states: Tensor,
    head: nn.Module | None,
    *,
    first: int = 0,
    bits: int | None = None,
) -> Tensor:
    """Return logits [batch, length - first, vocabulary] of an exit, from position `first` on.

    `states` [batch, length, hidden] are the exit's states of `token_ids` [batch, length]. The block of `head` receives
    gradients; without a head the states are used as they are. With `bits` head and LM head have quantised weights, and nothing
    receives gradients.
    """
    blocks = target.emitting(states)
    if head is not None:
        blocks[-1] = Head(head if bits is None else target.quantised.within(head, bits))
    view = with_blocks(target.model, target.anatomy.path, blocks)
    if bits is not None and (lm_head := target.lm_heads.quantised(None, bits)) is not None:
        setattr(view, lm_head.name, lm_head.stand_in(PassState()))
    return run_whole(view, token_ids, first)


def sublayer_outputs(target: Target, token_ids: Tensor, *, after: KVCache | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return attention and MLP outputs of every block, each [width, hidden], before the residual add.

    One eager pass over `token_ids` [1, width] after what a cache holds, which does not grow. Raises `UnsupportedModelError` if a
    block has no separate module for one of them.
    """
    outputs: list[dict[str, Tensor]] = [{} for _ in target.blocks]
    cache = KVCache(target.num_layers, token_ids.shape[1]) if after is None else after
    handles = []
    try:
        for index, block in enumerate(target.blocks):
            for kind, parts in (("attention", target.anatomy.attention), ("mlp", target.anatomy.mlp)):
                part = parts[index]
                if part is None:
                    raise UnsupportedModelError(
                        f"block {index} has no separate {kind} module whose output could be read"
                    )
                hook = partial(_record_output, outputs[index], kind)
                handles.append(getattr(block, part.name).register_forward_hook(hook))
        EagerRunner().run(target.part(list(target.blocks)), token_ids, cache, cache.length, last_only=True)
    finally:
        for handle in handles:
            handle.remove()
    return [(out["attention"][0], out["mlp"][0]) for out in outputs]


def logit_lens(target: Target, token_ids: Tensor, *, after: KVCache | None = None) -> Iterator[Tensor]:
    """Yield logits [width, vocabulary] after each block, through the model's own final norm and LM head.

    Eager passes over `token_ids` [1, width] after what a cache holds, which does not grow.
    """
    states: list[Tensor] = []
    cache = KVCache(target.num_layers, token_ids.shape[1]) if after is None else after
    runner = EagerRunner()
    tapped, start = target.part([Tap(block, record=states.append) for block in target.blocks]), cache.length
    runner.run(tapped, token_ids, cache, start, last_only=True)
    emit, *rest = target.emitting(states[0])
    view = target.part([emit, *rest])
    for state in states:
        emit.states = state
        yield runner.run(view, token_ids, cache, start).logits


def cache_after(target: Target, before: Tensor, room: int, known: KnownPrompt | None = None) -> KVCache:
    """Return a cache that holds `before` [1, n], with room for more positions.

    What is `known` of its first tokens, if anything, is not computed again; an eager pass reads the others.
    """
    length = before.shape[1]
    cache = KVCache(target.num_layers, length + room)
    if known is not None:
        known.recall(cache)
    if cache.length < length:
        unread = before[:, cache.length :]
        EagerRunner().run(target.part(list(target.blocks)), unread, cache, cache.length, last_only=True)
        cache.length = length
    return cache


def _record_output(outputs: dict[str, Tensor], kind: str, module: nn.Module, args: Any, output: Any) -> None:
    outputs[kind] = first_of(output)
