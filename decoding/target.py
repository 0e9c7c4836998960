"""The only file that knows transformers' internals: finds the layer stack of a loaded decoder and makes views of it.

A *view* is a shallow copy of the model whose list of layers has other modules at some indices: identities where a block is
skipped, copies without their attention or MLP where a sublayer is, the stored states of the prefix where a pass resumes.
Weights are shared, the list keeps its length (families index masks and caches by it), and the loaded model itself is never
changed, so a view leaves nothing behind when it is dropped.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from decoding.cache import KVCache, RoundsCache
from decoding.errors import UnsupportedModelError


@dataclass(frozen=True)
class Sublayer:
    """A branch of a block: the name of its module, and how many values the module returns (0 for a bare tensor)."""

    name: str
    num_outputs: int


@dataclass(frozen=True)
class Anatomy:
    """What one forward pass showed of the model: where its blocks are and what stands in them."""

    path: tuple[str, ...]
    """Attribute names from the model to its list of blocks."""
    block_outputs: int
    """How many values a block returns (0 for a bare tensor)."""
    attention: tuple[Sublayer | None, ...]
    """Per block, the module that was handed the cache."""
    mlp: tuple[Sublayer | None, ...]
    """Per block, the heaviest other module that keeps the shape of the hidden states."""


@dataclass(frozen=True)
class RopeChange:
    """Where the frequencies of a rotary embedding begin to depend on the length of the text, and whether they change but once."""

    position: int
    once: bool


class Target:
    """A loaded causal language model, ready to be run whole or in part. One text at a time.

    Raises `UnsupportedModelError` if no stack of blocks is found or a block keeps state outside the KV cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.config: Any = model.config.get_text_config()
        _refuse_recurrent_state(self.config)
        self.anatomy = _examine(model, self.config)
        self._full = _with_blocks(model, self.anatomy.path, list(self.blocks))
        self._rope_change = _find_rope_change(self.config)

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's own decoder blocks."""
        return _follow(self.model, self.anatomy.path)

    @property
    def num_layers(self) -> int:
        """Number of decoder blocks."""
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        """Where token ids must be."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type the weights compute in."""
        return self.model.dtype

    @property
    def context_length(self) -> int | None:
        """Most positions the model was made for, if its configuration says so."""
        return getattr(self.config, "max_position_embeddings", None)

    def widest_pass(self, start: int) -> int | None:
        """Most positions a pass from `start` may cover and still compute what one-token passes would; None if any number.

        A `longrope` or `dynamic` rotary embedding picks the frequencies of a whole pass by its last position: a pass must not
        straddle the position where they change, and behind it those of a dynamic one change with every token.
        """
        change = self._rope_change
        if change is None:
            return None
        if start < change.position:
            return change.position - start
        return None if change.once else 1

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one text of at most `capacity` tokens."""
        return KVCache(self.num_layers, capacity)

    def forward(self, token_ids: Tensor, cache: KVCache, start: int, *, last_only: bool = False) -> Tensor:
        """The whole model on `token_ids` [1, width] at positions from `start`: logits [width (1 if `last_only`), vocabulary]."""
        return _run(self._full, token_ids, cache, start, last_only=last_only)

    def draft_view(self, skip_attention: Sequence[int], skip_mlp: Sequence[int], *, keep_boundary: bool) -> DraftView:
        """The model without these sublayers; `keep_boundary` records the states in front of the first block that has a skip."""
        return DraftView(self, frozenset(skip_attention), frozenset(skip_mlp), keep_boundary=keep_boundary)

    def resume_view(self, boundary: int, *, keep_states: bool = False) -> ResumeView:
        """The model from block `boundary` on, the states in front of it being known; `keep_states` records those of each pass."""
        return ResumeView(self, boundary, keep_states=keep_states)

    def block_view(self, index: int) -> BlockView:
        """Block `index` by itself."""
        return BlockView(self, index)

    def tapped_view(self, boundary: int) -> TappedView:
        """The whole model, which also gives the states in front of block `boundary`."""
        return TappedView(self, boundary)

    def exit_view(self, exit_layer: int, head: nn.Module) -> ExitView:
        """The first `exit_layer` blocks, `head` in the place of the others, and the model's own final norm and LM head."""
        return ExitView(self, exit_layer, head)

    def new_exit_head(self) -> nn.Module:
        """A block of the model's own class for an early exit, a copy of the last one, on its device and in its precision."""
        head = copy.deepcopy(self.blocks[-1])
        return head.requires_grad_(True).eval()

    def exit_states(
        self, token_ids: Tensor, exit_layers: Sequence[int], *, first: int = 0
    ) -> tuple[dict[int, Tensor], Tensor]:
        """One pass over `token_ids` [batch, length] without a cache: the states [batch, length, hidden] behind the first N blocks
        for each N of `exit_layers`, and the model's logits [batch, length - first, vocabulary] from position `first` on.

        Texts shorter than the longest are padded on the right: what stands behind a position does not change it.
        """
        for exit_layer in exit_layers:
            self.check_exit_layer(exit_layer)
        states: dict[int, list[Tensor]] = {exit_layer: [] for exit_layer in exit_layers}
        blocks = [
            _Tap(block, states[index + 1]) if index + 1 in states else block for index, block in enumerate(self.blocks)
        ]
        view = _with_blocks(self.model, self.anatomy.path, blocks)
        logits = _run_whole(view, token_ids, first)
        return {exit_layer: kept[0] for exit_layer, kept in states.items()}, logits

    def exit_logits(self, token_ids: Tensor, states: Tensor, head: nn.Module | None, *, first: int = 0) -> Tensor:
        """Logits [batch, length - first, vocabulary] of an exit from position `first` on, given its `states`
        [batch, length, hidden] of `token_ids` [batch, length].

        `head` is a block of `new_exit_head`, through whose weights gradients flow, or None for the states as they are.
        """
        emit = _Emit(self.blocks[0], self.anatomy.block_outputs)
        emit.states = states
        blocks = [emit, *(_Identity(block, self.anatomy.block_outputs) for block in list(self.blocks)[1:])]
        if head is not None:
            blocks[-1] = _Head(head)
        return _run_whole(_with_blocks(self.model, self.anatomy.path, blocks), token_ids, first)

    def check_exit_layer(self, exit_layer: int) -> None:
        """Raise ValueError unless the model can exit behind its first `exit_layer` blocks."""
        if not 0 < exit_layer < self.num_layers:
            raise ValueError(
                f"a draft exits behind the first 1 to {self.num_layers - 1} of {self.num_layers} layers, got {exit_layer}"
            )

    def sublayer_outputs(self, token_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Attention and MLP outputs of every block, each [width, hidden], before the residual add; one pass, no cache kept."""
        outputs: list[dict[str, Tensor]] = [{} for _ in self.blocks]
        handles = []
        try:
            for index, block in enumerate(self.blocks):
                for kind, parts in (("attention", self.anatomy.attention), ("mlp", self.anatomy.mlp)):
                    part = parts[index]
                    if part is None:
                        raise UnsupportedModelError(
                            f"block {index} has no separate {kind} module whose output could be read"
                        )
                    hook = functools.partial(_record_output, outputs[index], kind)
                    handles.append(getattr(block, part.name).register_forward_hook(hook))
            self.forward(token_ids, self.new_cache(token_ids.shape[1]), 0, last_only=True)
        finally:
            for handle in handles:
                handle.remove()
        return [(out["attention"][0], out["mlp"][0]) for out in outputs]

    def logit_lens(self, token_ids: Tensor) -> Iterator[Tensor]:
        """Logits [width, vocabulary] read off behind each block in turn, through the model's own final norm and head."""
        states: list[Tensor] = []
        cache = self.new_cache(token_ids.shape[1])
        taps = [_Tap(block, states) for block in self.blocks]
        _run(_with_blocks(self.model, self.anatomy.path, taps), token_ids, cache, 0, last_only=True)
        emit = _Emit(self.blocks[0], self.anatomy.block_outputs)
        rest = [_Identity(block, self.anatomy.block_outputs) for block in list(self.blocks)[1:]]
        view = _with_blocks(self.model, self.anatomy.path, [emit, *rest])
        for state in states:
            emit.states = state
            yield _run(view, token_ids, cache, 0, last_only=False)


class DraftView:
    """The target with sublayers left out. `boundary` is the first block that differs from the target's (None if none does)."""

    def __init__(
        self, target: Target, skip_attention: frozenset[int], skip_mlp: frozenset[int], *, keep_boundary: bool
    ) -> None:
        _check_indices(skip_attention | skip_mlp, target.num_layers)
        self.boundary = min(skip_attention | skip_mlp, default=None)
        self._states: list[Tensor] = []
        blocks: list[nn.Module] = [
            _without(block, index, target.anatomy, index in skip_attention, index in skip_mlp)
            for index, block in enumerate(target.blocks)
        ]
        self.keeps_boundary = keep_boundary and bool(self.boundary)
        if self.boundary and self.keeps_boundary:
            blocks[self.boundary - 1] = _Tap(blocks[self.boundary - 1], self._states)
        self._view = _with_blocks(target.model, target.anatomy.path, blocks)

    def forward(self, token_ids: Tensor, cache: KVCache, start: int) -> Tensor:
        """Logits [1, vocabulary] behind the last of `token_ids` [1, width]."""
        return _run(self._view, token_ids, cache, start, last_only=True)

    def rounds(self, token_ids: Tensor, cache: RoundsCache) -> Tensor:
        """Many rounds at once, the drafted tokens being given: logits [rounds, depth, vocabulary] of `token_ids` [rounds, depth].

        Row r stands at the positions from `cache.starts[r]` on: its logits are those that the draft would compute in a round
        that begins there and drafts just these tokens.
        """
        return _run_rounds(self._view, token_ids, cache)

    def take_states(self) -> list[Tensor]:
        """The boundary states [.., width, hidden] of each pass since the last call."""
        states = list(self._states)
        self._states.clear()
        return states


class BlockView:
    """One block of the target by itself, in many rounds at once."""

    def __init__(self, target: Target, index: int) -> None:
        _check_indices(frozenset([index]), target.num_layers)
        anatomy, blocks = target.anatomy, list(target.blocks)
        self._outputs: list[Tensor] = []
        self._given = _Resume(blocks[index])
        around = [_Identity(block, anatomy.block_outputs) for block in blocks]
        self._on_given = _with_blocks(
            target.model, anatomy.path, [*around[:index], _Tap(self._given, self._outputs), *around[index + 1 :]]
        )
        self._on_tokens = _with_blocks(
            target.model, anatomy.path, [*around[:index], _Tap(blocks[index], self._outputs), *around[index + 1 :]]
        )

    def rounds(self, token_ids: Tensor, cache: RoundsCache, states: Tensor | None) -> Tensor:
        """What comes out of the block, [.., rounds, depth, hidden], given the `states` that go in, or None for the embeddings.

        `token_ids` [rounds, depth] stand at the positions of `cache`, whose keys and values the block reads.
        """
        self._outputs.clear()
        if states is None:
            _run_rounds(self._on_tokens, token_ids, cache, last_only=True)
            return self._outputs.pop()
        self._given.states = states
        try:
            _run_rounds(self._on_given, token_ids, cache, last_only=True)
        finally:
            self._given.states = None
        return self._outputs.pop()


class ResumeView:
    """The target from a boundary on. The blocks in front of it compute the last position alone, or nothing if that is known."""

    def __init__(self, target: Target, boundary: int, *, keep_states: bool) -> None:
        if not 0 < boundary < target.num_layers:
            raise ValueError(f"a pass resumes at block 1 to {target.num_layers - 1}, got {boundary}")
        anatomy, blocks = target.anatomy, list(target.blocks)
        self._keeps_states, self._states = keep_states, list[Tensor]()
        self._resume = _Resume(blocks[boundary])
        self._append = _Resume(blocks[boundary], appends=True)
        known = [_Identity(block, anatomy.block_outputs) for block in blocks[:boundary]]
        self._last = [_LastPosition(block) for block in blocks[:boundary]]
        behind = blocks[boundary + 1 :]
        self._from_known = _with_blocks(target.model, anatomy.path, [*known, self._resume, *behind])
        self._from_last = _with_blocks(target.model, anatomy.path, [*self._last, self._append, *behind])

    def forward(self, token_ids: Tensor, cache: KVCache, start: int, states: Tensor) -> Tensor:
        """Logits [width, vocabulary] of `token_ids` [1, width], given the boundary `states` of all, or of all but the last."""
        width, known = token_ids.shape[1], states.shape[-2]
        if known not in (width, width - 1):
            raise ValueError(
                f"boundary states are known for {known} of {width} positions; all or all but the last are needed"
            )
        view, resume = (self._from_known, self._resume) if known == width else (self._from_last, self._append)
        resume.states = states
        for block in self._last:
            block.width = width
        try:
            logits = _run(view, token_ids, cache, start, last_only=False)
            if self._keeps_states and resume.states is not None:
                self._states = [resume.states]
            return logits
        finally:
            resume.states = None

    def take_states(self) -> Tensor:
        """The boundary states [.., width, hidden] of the latest pass, that of its last position among them; they are let go."""
        return self._states.pop()


class TappedView:
    """The whole model, recording the states in front of a boundary."""

    def __init__(self, target: Target, boundary: int) -> None:
        self._states: list[Tensor] = []
        blocks = list(target.blocks)
        blocks[boundary - 1] = _Tap(blocks[boundary - 1], self._states)
        self._view = _with_blocks(target.model, target.anatomy.path, blocks)

    def forward(
        self, token_ids: Tensor, cache: KVCache, start: int, *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logits [width (1 if `last_only`), vocabulary] of `token_ids` [1, width], and the boundary states [.., width, hidden]."""
        self._states.clear()
        logits = _run(self._view, token_ids, cache, start, last_only=last_only)
        return logits, self._states.pop()


class ExitView:
    """The first `exit_layer` blocks, then a head with keys and values of its own in the cache's branch (EESD, arXiv 2406.03853).

    The head stands at the last index, so that it is handed the mask and rotary embeddings of the block it was copied from.
    """

    def __init__(self, target: Target, exit_layer: int, head: nn.Module) -> None:
        target.check_exit_layer(exit_layer)
        anatomy, blocks = target.anatomy, list(target.blocks)
        self._states: list[Tensor] = []
        between = [_Identity(block, anatomy.block_outputs) for block in blocks[exit_layer:-1]]
        first = [*blocks[: exit_layer - 1], _Tap(blocks[exit_layer - 1], self._states)]
        self._last = [_LastPosition(block) for block in first]
        passed_by = [_Identity(block, anatomy.block_outputs) for block in blocks[:exit_layer]]
        self._fill, self._catch_up = _Resume(_Head(head)), _Resume(_Head(head), appends=True)
        self._step = _with_blocks(target.model, anatomy.path, [*first, *between, _Head(head)])
        self._from_pending = _with_blocks(target.model, anatomy.path, [*self._last, *between, self._catch_up])
        self._head_only = _with_blocks(target.model, anatomy.path, [*passed_by, *between, self._fill])

    def forward(self, token_ids: Tensor, cache: KVCache, start: int, pending: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits [1, vocabulary] behind the last of `token_ids` [1, width], and its state [.., 1, hidden] at the exit.

        The blocks run on the last token alone; the head also on the `pending` states [.., width - 1, hidden] of those before.
        """
        self._states.clear()
        if pending is None:
            logits = _run(self._step, token_ids, cache, start, last_only=True)
        else:
            for block in self._last:
                block.width = token_ids.shape[1]
            self._catch_up.states = pending
            try:
                logits = _run(self._from_pending, token_ids, cache, start, last_only=True)
            finally:
                self._catch_up.states = None
        return logits, self._states.pop()

    def fill(self, token_ids: Tensor, cache: KVCache, start: int, states: Tensor) -> None:
        """Run the head alone on the `states` [.., width, hidden] of `token_ids` [1, width], for its keys and values."""
        self._fill.states = states
        try:
            _run(self._head_only, token_ids, cache, start, last_only=True)
        finally:
            self._fill.states = None


# --- modules that stand in for blocks ---------------------------------------------------------------------------------


class _StandIn(nn.Module):
    """Stands at the index of a block and answers the block's attributes (families read e.g. `attention_type` in their loop)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not registered as a child: its weights belong to the model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)


class _Identity(_StandIn):
    """Lets the residual stream pass."""

    def __init__(self, block: nn.Module, num_outputs: int) -> None:
        super().__init__(block)
        self.num_outputs = num_outputs

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
        return _pack(hidden_states, self.num_outputs)


class _Tap(_StandIn):
    """Runs the block and records what comes out of it."""

    def __init__(self, block: nn.Module, states: list[Tensor]) -> None:
        super().__init__(block)
        self.__dict__["states"] = states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.block(*args, **kwargs)
        self.states.append(_first(output))
        return output


class _LastPosition(_StandIn):
    """Runs the block on the last position only of a pass of `width` positions."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.width = 1

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.block(
            hidden_states[..., -1:, :],
            *(_last_position(value, self.width) for value in args),
            **{name: _last_position(value, self.width) for name, value in kwargs.items()},
        )


class _Resume(_StandIn):
    """Runs the block on known states, followed by the last of the states that come in if it `appends`."""

    def __init__(self, block: nn.Module, *, appends: bool = False) -> None:
        super().__init__(block)
        self.appends = appends
        self.states: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert self.states is not None, "the states are set for the duration of a pass"
        states = self.states.to(hidden_states.device)
        if self.appends:
            states = torch.cat([states, hidden_states[..., -1:, :]], dim=-2)
        self.states = states
        return self.block(states, *args, **kwargs)


class _Head(_StandIn):
    """Runs an exit head on the branch of the cache, where its keys and values are kept apart from the stack's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(
            *(_branch(value) for value in args), **{name: _branch(value) for name, value in kwargs.items()}
        )


class _Emit(_StandIn):
    """Puts known states in the place of whatever comes in."""

    def __init__(self, block: nn.Module, num_outputs: int) -> None:
        super().__init__(block)
        self.num_outputs = num_outputs
        self.states: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
        assert self.states is not None, "the states are set before the pass"
        return _pack(self.states, self.num_outputs)


class _Zero(_StandIn):
    """A sublayer whose branch adds nothing: zeros of the shape of its input."""

    def __init__(self, sublayer: nn.Module, num_outputs: int) -> None:
        super().__init__(sublayer)
        self.num_outputs = num_outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        return _pack(torch.zeros_like(hidden_states), self.num_outputs)


# --- building and running views ---------------------------------------------------------------------------------------


def _without(block: nn.Module, index: int, anatomy: Anatomy, skip_attention: bool, skip_mlp: bool) -> nn.Module:
    """The block itself, an identity in its place, or a copy with one branch silenced."""
    if not skip_attention and not skip_mlp:
        return block
    if skip_attention and skip_mlp:
        return _Identity(block, anatomy.block_outputs)
    sublayer = (anatomy.attention if skip_attention else anatomy.mlp)[index]
    if sublayer is None:
        kind = "attention" if skip_attention else "MLP"
        raise UnsupportedModelError(f"block {index} has no separate {kind} module: only the whole block can be skipped")
    partial = _shallow_copy(block)
    setattr(partial, sublayer.name, _Zero(getattr(block, sublayer.name), sublayer.num_outputs))
    return partial


def _with_blocks(model: nn.Module, path: tuple[str, ...], blocks: Sequence[nn.Module]) -> nn.Module:
    """A shallow copy of `model` with `blocks` as its list of blocks; containers on the way are copied, all else is shared."""
    view = _shallow_copy(model)
    container = view
    for name in path[:-1]:
        child = _shallow_copy(getattr(container, name))
        setattr(container, name, child)
        container = child
    setattr(container, path[-1], _Blocks(blocks))
    return view


class _Blocks(nn.ModuleList):
    """A list of blocks that is its own full slice: some families slice the list at every pass, which copies it otherwise."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class that shares everything but its table of children."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = dict(module._modules)
    hooked = module.__dict__.get("forward")
    if isinstance(hooked, functools.partial) and hooked.args[:1] == (module,):
        # accelerate replaces `forward` by a partial that holds the module (device_map): let it hold the copy instead.
        twin.__dict__["forward"] = functools.partial(hooked.func, twin, *hooked.args[1:], **hooked.keywords)
        if "_old_forward" in twin.__dict__:
            twin.__dict__["_old_forward"] = type(module).forward.__get__(twin)
    return twin


def _run(view: nn.Module, token_ids: Tensor, cache: KVCache, start: int, *, last_only: bool) -> Tensor:
    """One forward pass at positions from `start`; logits [width or 1, vocabulary]."""
    width = token_ids.shape[1]
    cache.cover(start, width)
    positions = torch.arange(start, start + width, device=token_ids.device)[None]
    output = view(
        input_ids=token_ids,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1 if last_only else 0,
    )
    logits = output.logits[0]
    return logits[-1:] if last_only else logits  # not every family knows `logits_to_keep`


def _run_whole(view: nn.Module, token_ids: Tensor, first: int) -> Tensor:
    """One forward pass over whole texts [batch, length] without a cache; logits [batch, length - first, vocabulary]."""
    num_kept = token_ids.shape[1] - first
    logits = view(input_ids=token_ids, use_cache=False, logits_to_keep=num_kept).logits
    return logits[:, -num_kept:]


def _run_rounds(view: nn.Module, token_ids: Tensor, cache: RoundsCache, *, last_only: bool = False) -> Tensor:
    """One forward pass over rounds that begin at different places, laid out as a batch that is padded on the left."""
    device = token_ids.device
    output = view(
        input_ids=token_ids,
        position_ids=cache.positions(device),
        attention_mask=cache.attention_mask(device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1 if last_only else 0,
    )
    return output.logits


def _last_position(value: Any, width: int) -> Any:
    """What a block is handed beside the hidden states, narrowed to the last of `width` positions.

    Masks [.., width, keys], rotary embeddings [.., width, size] and inputs of the layer's own have a row a position, position
    and token ids an element; families differ in the names and the order of these, and some have more dimensions in front.
    """
    if isinstance(value, tuple):
        return tuple(_last_position(item, width) for item in value)
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    if value.dtype in (torch.int32, torch.int64):
        return value[..., -1:] if value.shape[-1] == width else value
    return value[..., -1:, :] if value.shape[-2] == width else value


def _branch(value: Any) -> Any:
    return value.branch if isinstance(value, KVCache) else value


def _pack(hidden_states: Tensor, num_outputs: int) -> Any:
    """A result of the form the family expects: a bare tensor, or a tuple whose other values are None."""
    return hidden_states if num_outputs == 0 else (hidden_states, *[None] * (num_outputs - 1))


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _record_output(outputs: dict[str, Tensor], kind: str, module: nn.Module, args: Any, output: Any) -> None:
    outputs[kind] = _first(output)


def _check_indices(indices: frozenset[int], num_layers: int) -> None:
    wrong = sorted(index for index in indices if not 0 <= index < num_layers)
    if wrong:
        raise ValueError(f"the model has layers 0 to {num_layers - 1}, got {wrong[0]}")


# --- finding out what is there ----------------------------------------------------------------------------------------


def _refuse_recurrent_state(config: Any) -> None:
    """Raise if the family's own cache cannot be rolled back: `crop` would return without an error and corrupt the output."""
    layers = DynamicCache(config=config).layers
    kinds = [
        type(layer).__name__ for layer in layers if not layer.is_croppable and not getattr(layer, "is_sliding", False)
    ]
    if kinds:
        raise UnsupportedModelError(
            f"{config.model_type} keeps a recurrent state in {len(kinds)} of {len(layers)} layers ({kinds[0]}), which cannot be "
            "rolled back after a rejected draft: only models whose whole state is a key-value cache can decode speculatively"
        )


def _examine(model: PreTrainedModel, config: Any) -> Anatomy:
    """Run two tokens through the model and watch what its blocks are handed and return."""
    path = _find_blocks(model, config.num_hidden_layers)
    blocks = _follow(model, path)
    cache = KVCache(len(blocks), capacity=2)
    outputs: list[int] = []
    children: list[list[tuple[str, Sublayer, bool, bool]]] = [[] for _ in blocks]

    def watch_block(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(_num_outputs(output))

    def watch_child(index: int, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        takes_cache = any(value is cache for value in (*args, *kwargs.values()))
        given = args[0] if args else kwargs.get("hidden_states")
        first = _first(output)
        keeps_shape = isinstance(given, Tensor) and isinstance(first, Tensor) and given.shape == first.shape
        children[index].append((name, Sublayer(name, _num_outputs(output)), takes_cache, keeps_shape))

    handles = []
    try:
        for index, block in enumerate(blocks):
            handles.append(block.register_forward_hook(watch_block))
            for name, child in block.named_children():
                hook = functools.partial(watch_child, index, name)
                handles.append(child.register_forward_hook(hook, with_kwargs=True))
        token_ids = torch.zeros((1, 2), dtype=torch.long, device=model.get_input_embeddings().weight.device)
        with torch.inference_mode():
            _run(model, token_ids, cache, 0, last_only=True)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, NotImplementedError) as cause:
        reason = " ".join(str(cause).split())
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on a key-value cache of ours: {reason}"
        ) from cause
    finally:
        for handle in handles:
            handle.remove()
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
        # A norm keeps the shape too: an MLP holds matrices.
        is_mlp = heaviest is not None and any(p.ndim > 1 for p in getattr(block, heaviest.name).parameters())
        mlp.append(heaviest if is_mlp else None)
    return Anatomy(path=path, block_outputs=outputs[0], attention=tuple(attention), mlp=tuple(mlp))


def _find_blocks(model: PreTrainedModel, num_layers: int) -> tuple[str, ...]:
    """The attribute path of the list of blocks: the outermost ModuleList as long as the configuration says."""
    paths: list[list[str]] = [
        name.split(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not paths:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {num_layers} decoder blocks, as its configuration would have it"
        )
    outermost = min(paths, key=len)
    return tuple(outermost)


def _find_rope_change(config: Any) -> RopeChange | None:
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


def _follow(model: Any, path: tuple[str, ...]) -> nn.ModuleList:
    return functools.reduce(getattr, path, model)


def _num_outputs(output: Any) -> int:
    return len(output) if isinstance(output, tuple) else 0


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
