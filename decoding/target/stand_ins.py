"""Modules that stand at the index of a block, or of a sublayer, and do something else in its place."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from decoding.cache.kv_cache import KVCache
from decoding.cache.last_position import last_position, with_last
from decoding.runners.contract import BlockCall
from decoding.runners.masks import MaskKinds


class StandIn(nn.Module):
    """Stands at the index of a block and answers the block's attributes (families read e.g. `attention_type` in their loop)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not registered as a child: its weights belong to the model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)


class Identity(StandIn):
    """Lets the residual stream pass."""

    def __init__(self, block: nn.Module, num_outputs: int) -> None:
        super().__init__(block)
        self.num_outputs = num_outputs

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
        return _pack(hidden_states, self.num_outputs)


class Tap(StandIn):
    """Runs the block and records what comes out of it."""

    def __init__(self, block: nn.Module, states: list[Tensor]) -> None:
        super().__init__(block)
        self.__dict__["states"] = states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.block(*args, **kwargs)
        self.states.append(first_of(output))
        return output


class PassState:
    """What the stand-ins of one part know of the pass that runs, and what they have seen of it."""

    def __init__(self) -> None:
        self.width = 1
        self.last: Tensor | None = None
        """[1], or one a text: the last position that is no padding; None if none is."""
        self.states: Tensor | None = None
        """[.., width or width - 1, hidden]: what a `Resume` resumes from."""
        self.tapped: list[Tensor] = []


class LastPosition(StandIn):
    """Runs the block on the last position only of a pass of several."""

    def __init__(self, block: nn.Module, current: PassState) -> None:
        super().__init__(block)
        self.__dict__["current"] = current

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        current = self.current
        if hidden_states.shape[-2] > 1:  # the first of them narrows what the others are handed
            hidden_states = last_position(hidden_states, -2, current.last)
        narrow = functools.partial(_last_position, width=current.width, last=current.last)
        return self.block(
            hidden_states, *(narrow(value) for value in args), **{name: narrow(value) for name, value in kwargs.items()}
        )


class Resume(StandIn):
    """Runs the block on the pass's known states, with the last of the states that come in behind them if it `appends`."""

    def __init__(self, block: nn.Module, current: PassState, *, appends: bool = False) -> None:
        super().__init__(block)
        self.appends = appends
        self.__dict__["current"] = current

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        current = self.current
        assert current.states is not None, "a part that resumes is given the states"
        states = current.states.to(hidden_states.device)
        if self.appends:
            states = _with_last(states, last_position(hidden_states, -2, None), current.last)
        current.states = states
        return self.block(states, *args, **kwargs)


class Head(StandIn):
    """Runs an exit head on the branch of the cache, where its keys and values are kept apart from the stack's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(
            *(_branch(value) for value in args), **{name: _branch(value) for name, value in kwargs.items()}
        )


class Emit(StandIn):
    """Puts known states in the place of whatever comes in."""

    def __init__(self, block: nn.Module, num_outputs: int) -> None:
        super().__init__(block)
        self.num_outputs = num_outputs
        self.states: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
        assert self.states is not None, "the states are set before the pass"
        return _pack(self.states, self.num_outputs)


class Zero(StandIn):
    """A sublayer whose branch adds nothing: zeros of the shape of its input."""

    def __init__(self, sublayer: nn.Module, num_outputs: int) -> None:
        super().__init__(sublayer)
        self.num_outputs = num_outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        return _pack(torch.zeros_like(hidden_states), self.num_outputs)


class FixedShapes(StandIn):
    """In passes of fixed shapes, calls the block by `call` with its part of the cache and the mask of its kind; else as it is."""

    def __init__(self, block: nn.Module, index: int, mask_kinds: MaskKinds, call: BlockCall) -> None:
        super().__init__(block)
        self.__dict__["call"] = call
        self.index, self.mask_kind = index, mask_kinds.kind_of(index)

    def around(self, block: nn.Module) -> FixedShapes:
        """The same for another block in this place."""
        twin = FixedShapes.__new__(FixedShapes)
        twin.__dict__.update(self.__dict__)
        twin.__dict__["block"] = block
        return twin

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, KVCache):  # families hand it over in their own ways
            cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, KVCache)), None)
        if cache is None or cache.window.slots is None:
            return self.block(hidden_states, *args, **kwargs)
        # By its index a layer would find its place in a cache that all share, and be compiled by itself for it.
        slot = cache.slot(self.index, hidden_states.shape[-2])
        args = tuple(slot if value is cache else value for value in args)
        kwargs = {name: slot if value is cache else value for name, value in kwargs.items()}
        if self.mask_kind:
            kwargs["attention_mask"] = cache.window.mask(self.mask_kind, hidden_states.shape[-2])
        return self.call(self.block, hidden_states, args, kwargs)


class FixedShapesLMHead(StandIn):
    """In passes of fixed shapes over one position, calls the LM head by `call`; else as it is."""

    def __init__(self, lm_head: nn.Module, current: PassState, call: BlockCall) -> None:
        super().__init__(lm_head)
        self.__dict__.update(current=current, call=call)

    def forward(self, hidden_states: Tensor) -> Any:
        if self.current.last is None or hidden_states.shape[:-1].numel() > 1:
            return self.block(hidden_states)
        return self.call(self.block, hidden_states, (), {})


def first_of(output: Any) -> Tensor:
    """The hidden states among what a block returns."""
    return output[0] if isinstance(output, tuple) else output


def _pack(hidden_states: Tensor, num_outputs: int) -> Any:
    """A result of the form the family expects: a bare tensor, or a tuple whose other values are None."""
    return hidden_states if num_outputs == 0 else (hidden_states, *[None] * (num_outputs - 1))


def _branch(value: Any) -> Any:
    return value.branch if isinstance(value, KVCache) else value


def _last_position(value: Any, width: int, last: Tensor | None) -> Any:
    """What a block is handed beside the hidden states, narrowed to the last of `width` positions.

    Masks [.., width, keys], rotary embeddings [.., width, size] and inputs of the layer's own have a row a position, position
    and token ids an element; families differ in the names and the order of these, and some have more dimensions in front.
    """
    if isinstance(value, tuple):
        return tuple(_last_position(item, width, last) for item in value)
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    if value.dtype in (torch.int32, torch.int64):
        return last_position(value, -1, last) if value.shape[-1] == width else value
    return last_position(value, -2, last) if value.shape[-2] == width else value


def _with_last(states: Tensor, last_state: Tensor, last: Tensor | None) -> Tensor:
    """`states` with that of the last position [.., 1, hidden] behind them, or in the place that is kept for it."""
    if last is None:
        return torch.cat([states, last_state], dim=-2)
    return with_last(states, last_state, -2, last)
