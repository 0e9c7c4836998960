"""Modules that replace a block or sublayer at its index, and copies of modules that share all else."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from decoding.cache.kv_cache import KVCache, last_position, with_last
from decoding.runners.contract import BlockCall
from decoding.runners.masks import MaskKinds


class StandIn(nn.Module):
    """A replacement for a block that answers the block's attributes.

    Families read some in their loop, e.g. `attention_type`.
    """

    def __init__(self, block: nn.Module, **own: Any) -> None:
        """`own` become attributes. None of them is registered as a child, nor is the block: its weights belong to the model."""
        super().__init__()
        self.__dict__.update(own, block=block)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)


class Identity(StandIn):
    """Passes the residual stream through unchanged, in the form of `num_outputs` (see `Sublayer`)."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
        return _pack(hidden_states, self.num_outputs)


class Tap(StandIn):
    """Runs the block and hands its output states to `record`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.block(*args, **kwargs)
        self.record(first_of(output))
        return output


class PassState(threading.local):
    """The state that a part's stand-ins share during a pass.

    Each thread has its own, so that threads may run passes of one part at the same time.
    """

    def __init__(self) -> None:
        self.width = 1
        self.last: Tensor | None = None
        """Index of the last position that is not padding: [1], or one per sequence; None without padding."""
        self.only_best = False
        """True if of the logits only the largest need to be exact."""
        self.states: Tensor | None = None
        """[.., width or width - 1, hidden]: the states that a `Resume` resumes from."""
        self.tapped: list[Tensor] = []
        self.narrowed: dict[int, tuple[Any, Any]] = {}
        """Inputs of blocks by id, with what a `LastPosition` has made of them: made for the first block, used by all."""

    def begin(self, width: int, last: Tensor | None, states: Tensor | None, *, only_best: bool = False) -> None:
        self.width, self.last, self.states, self.only_best = width, last, states, only_best
        self.tapped.clear()
        self.narrowed.clear()

    def end(self) -> None:
        self.states = None
        self.tapped.clear()
        self.narrowed.clear()

    def tap(self, states: Tensor) -> None:
        """Record states of the pass [.., width, hidden]."""
        self.tapped.append(states)

    def narrow(self, value: Any) -> Any:
        """Return a block input other than the hidden states, narrowed to the last position."""
        if id(value) not in self.narrowed:
            self.narrowed[id(value)] = value, _last_position(value, self.width, self.last)
        return self.narrowed[id(value)][1]


class LastPosition(StandIn):
    """Runs the block on the last position of the `current` pass only."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        current = self.current
        if hidden_states.shape[-2] > 1:  # the first such block narrows the input of the others
            hidden_states = last_position(hidden_states, -2, current.last)
        others = {name: current.narrow(value) for name, value in kwargs.items()}
        return self.block(hidden_states, *map(current.narrow, args), **others)


class Resume(StandIn):
    """Runs the block on the `current` pass's known states, followed by the last incoming one if it `appends`."""

    def __init__(self, block: nn.Module, current: PassState, *, appends: bool = False) -> None:
        super().__init__(block, current=current, appends=appends)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        current = self.current
        assert current.states is not None, "a part that resumes is given the states"
        states = current.states.to(hidden_states.device)
        if self.appends:
            states = _with_last(states, last_position(hidden_states, -2, None), current.last)
        current.states = states
        return self.block(states, *args, **kwargs)


class Head(StandIn):
    """Runs an exit head on the cache's branch, separate from the stack's keys and values."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(
            *(_branch(value) for value in args), **{name: _branch(value) for name, value in kwargs.items()}
        )


class Emit(StandIn):
    """Outputs known `states` in place of its input, in the form of `num_outputs`."""

    states: Tensor

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
        return _pack(self.states, self.num_outputs)


class Zero(StandIn):
    """A sublayer whose branch adds nothing: zeros of its input's shape, in the form of `num_outputs`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        return _pack(torch.zeros_like(hidden_states), self.num_outputs)


class FixedShapes(StandIn):
    """Calls the block by `call` in fixed-shape passes, with its cache slot and mask.

    In other passes the block runs as it is. `repeats` is the number of query heads that its attention stacks as
    positions; the mask is repeated for them once per pass. With `own_masks` the block gets the window's mask of its
    kind even where the model passes one on.
    """

    def __init__(
        self,
        block: nn.Module,
        index: int,
        mask_kinds: MaskKinds,
        call: BlockCall,
        *,
        repeats: int = 1,
        own_masks: bool = False,
    ) -> None:
        mask_kind = mask_kinds.kind_of(index)
        super().__init__(block, call=call, index=index, mask_kind=mask_kind, repeats=repeats, own_masks=own_masks)

    def around(self, block: nn.Module) -> FixedShapes:
        """Return the same wrapper around another block at this index."""
        twin = FixedShapes.__new__(FixedShapes)
        twin.__dict__.update(self.__dict__)
        twin.__dict__["block"] = block
        return twin

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, KVCache):  # families pass the cache in different ways
            cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, KVCache)), None)
        if cache is None or cache.window.slots is None:
            return self.block(hidden_states, *args, **kwargs)
        # A layer that looked up its own index in a shared cache would be compiled once per layer.
        slot = cache.slot(self.index, hidden_states.shape[-2])
        args = tuple(slot if value is cache else value for value in args)
        kwargs = {name: slot if value is cache else value for name, value in kwargs.items()}
        if self.mask_kind or self.own_masks or (self.repeats > 1 and "attention_mask" in kwargs):
            kwargs["attention_mask"] = cache.window.mask(self.mask_kind, hidden_states.shape[-2], self.repeats)
        return self.call(self.block, hidden_states, args, kwargs)


class FixedShapesLMHead(StandIn):
    """Calls the LM head by `call` over one position of the `current` fixed-shape pass.

    In other passes the LM head runs as it is. `choosing`, if there is one, takes its place in fixed-shape passes whose largest
    logits are enough.
    """

    def forward(self, hidden_states: Tensor) -> Any:
        current, block = self.current, self.block
        if current.last is None:
            return block(hidden_states)
        if current.only_best and self.choosing is not None:
            block = self.choosing
        return block(hidden_states) if hidden_states.shape[:-1].numel() > 1 else self.call(block, hidden_states, (), {})


def first_of(output: Any) -> Tensor:
    """Return the hidden states among a block's outputs."""
    return output[0] if isinstance(output, tuple) else output


def _pack(hidden_states: Tensor, num_outputs: int) -> Any:
    """Return the output in the family's form.

    That is a bare tensor, or a tuple whose other values are None.
    """
    return hidden_states if num_outputs == 0 else (hidden_states, *[None] * (num_outputs - 1))


def _branch(value: Any) -> Any:
    return value.branch if isinstance(value, KVCache) else value


def _last_position(value: Any, width: int, last: Tensor | None) -> Any:
    """Narrow a block input other than the hidden states to the last of `width` positions.

    Masks [.., width, keys], rotary embeddings [.., width, size] and per-layer inputs have one row per position;
    position and token ids have one element per position. Families differ in the names and order of these inputs, and
    some have more leading dimensions.
    """
    if isinstance(value, tuple):
        return tuple(_last_position(item, width, last) for item in value)
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    if value.dtype in (torch.int32, torch.int64):
        return last_position(value, -1, last) if value.shape[-1] == width else value
    return last_position(value, -2, last) if value.shape[-2] == width else value


def _with_last(states: Tensor, last_state: Tensor, last: Tensor | None) -> Tensor:
    """Return `states` with the last position's state [.., 1, hidden] appended or filled in."""
    if last is None:
        return torch.cat([states, last_state], dim=-2)
    return with_last(states, last_state, -2, last)


def with_replaced(module: nn.Module, replacement: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a copy of `module` with each module inside replaced by its `replacement`, or `module` if nothing changes.

    A module that is to stay is its own replacement. Everything that stays is shared with the original.
    """
    if (other := replacement(module)) is not module:
        return other
    children = {name: with_replaced(child, replacement) for name, child in module.named_children()}
    if all(children[name] is child for name, child in module.named_children()):
        return module
    twin = shallow_copy(module)
    for name, child in children.items():
        setattr(twin, name, child)
    return twin


def has_compiled_forward(module: nn.Module) -> bool:
    """Return True after `module.forward = torch.compile(module.forward)`."""
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module of the same class that shares everything but its table of children, and is not compiled."""
    twin = copy.copy(module)  # without what `module.compile()` made
    twin.__dict__["_modules"] = dict(module._modules)
    hooked = module.__dict__.get("forward")
    if has_compiled_forward(module):
        del twin.__dict__["forward"]  # it is bound to the module: the copy would run the module's children, not its own
    elif isinstance(hooked, functools.partial) and hooked.args[:1] == (module,):
        # accelerate replaces `forward` by a partial that holds the module (device_map): let it hold the copy instead.
        twin.__dict__["forward"] = functools.partial(hooked.func, twin, *hooked.args[1:], **hooked.keywords)
        if "_old_forward" in twin.__dict__:
            twin.__dict__["_old_forward"] = type(module).forward.__get__(twin)
    return twin
