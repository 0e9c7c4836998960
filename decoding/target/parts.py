"""The model, or a part of it, as a function: a shallow copy with replaced blocks.

Weights are shared, and the block list keeps its length, because families index masks and caches by it. The loaded
model is never changed, so dropping a part leaves no traces.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from decoding.cache.rounds_cache import RoundsCache, RoundsChunk
from decoding.errors import UnsupportedModelError
from decoding.kernels.choice import fast_linear
from decoding.runners.contract import BlockCall, Inputs, Outputs
from decoding.target.anatomy import Anatomy
from decoding.target.backends import attention_backends
from decoding.target.draft_vocabulary import DraftLMHead
from decoding.target.stand_ins import FixedShapes, FixedShapesLMHead, Identity, PassState, Zero
from decoding.target.weights import Make


@dataclass(frozen=True, slots=True)
class LMHead:
    """The LM head of a part: its name, its replacement, and how that is called on one position of a fixed-shape pass."""

    name: str
    own: nn.Linear
    """The model's own."""
    module: nn.Module
    """Its replacement, or the rows of it that a draft computes."""
    call: BlockCall | None
    """None if it is called like any module."""
    token_ids: Tensor | None = None
    """[rows]: the tokens of these rows; None if they are all."""

    def stand_in(self, current: PassState) -> nn.Module:
        """Return the module in the LM head's place."""
        module = self.module if self.call is None else FixedShapesLMHead(self.module, current, self.call)
        return module if self.token_ids is None else DraftLMHead(self.own, module, self.token_ids)


class ModelPart:
    """A model with `blocks` in place of its own, as runners run it (`runners.Part`).

    Stand-ins among the blocks share `current`. The output states are those recorded by a tap, or those that the pass
    resumed from, including the appended last one.
    """

    def __init__(
        self,
        model: nn.Module,
        path: tuple[str, ...],
        blocks: Sequence[nn.Module],
        current: PassState | None = None,
        *,
        lm_head: LMHead | None = None,
        is_whole: bool = False,
        verifies: bool = False,
    ) -> None:
        self.is_whole = is_whole
        self.verifies = verifies or is_whole
        self._current = current or PassState()
        self._module = with_blocks(model, path, blocks)
        if lm_head is not None:
            setattr(self._module, lm_head.name, lm_head.stand_in(self._current))

    def compute(self, inputs: Inputs) -> Outputs:
        """Run one pass; see `runners.Part`."""
        current = self._current
        current.begin(inputs.token_ids.shape[1], inputs.last, inputs.states)
        masks = {"attention_mask": inputs.masks[0]} if inputs.masks else {}
        try:
            with attention_backends(inputs.token_ids.device):
                output = self._module(
                    input_ids=inputs.token_ids,
                    position_ids=inputs.positions,
                    past_key_values=inputs.cache,
                    use_cache=True,
                    logits_to_keep=inputs.logits_to_keep,
                    **masks,
                )
            states = current.tapped[-1] if current.tapped else current.states
        finally:
            current.end()
        return Outputs(_kept(output.logits, inputs.logits_to_keep), states)

    def rounds(
        self, token_ids: Tensor, cache: RoundsCache, *, last_only: bool = False, states: Tensor | None = None
    ) -> Outputs:
        """Run rounds that begin at different positions as left-padded batches, one per chunk of `cache`.

        Return logits [rounds, depth (1 if `last_only`), vocabulary].
        """
        chunks = list(self.rounds_by_chunk(token_ids, cache, last_only=last_only, states=states))
        if len(chunks) == 1:
            return chunks[0]
        tapped = [chunk.states for chunk in chunks if chunk.states is not None]
        return Outputs(torch.cat([chunk.logits for chunk in chunks]), torch.cat(tapped, dim=-3) if tapped else None)

    def rounds_by_chunk(
        self, token_ids: Tensor, cache: RoundsCache, *, last_only: bool = False, states: Tensor | None = None
    ) -> Iterator[Outputs]:
        """Yield the outputs of `rounds` for one chunk of `cache` at a time."""
        return (self._rounds_of_chunk(token_ids, chunk, last_only, states) for chunk in cache.chunks)

    def _rounds_of_chunk(
        self, token_ids: Tensor, cache: RoundsChunk, last_only: bool, states: Tensor | None
    ) -> Outputs:
        current, device = self._current, token_ids.device
        current.begin(token_ids.shape[1], None, None if states is None else states[..., cache.rows, :, :])
        try:
            with attention_backends(device):
                output = self._module(
                    input_ids=token_ids[cache.rows],
                    position_ids=cache.positions(device),
                    attention_mask=cache.attention_mask(device),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1 if last_only else 0,
                )
            return Outputs(output.logits, current.tapped[-1] if current.tapped else None)
        finally:
            current.end()


def find_lm_head(model: nn.Module) -> str | None:
    """Return the attribute name of the model's own linear LM head, or None."""
    lm_head = getattr(model, "get_output_embeddings", lambda: None)()
    children = model.named_children() if type(lm_head) is nn.Linear else ()
    return next((name for name, child in children if child is lm_head), None)


def _kept(logits: Tensor, wanted: int | Tensor) -> Tensor:
    """Return the requested logits [batch, n, vocabulary]; not every family supports `logits_to_keep`."""
    if isinstance(wanted, Tensor):
        return logits if logits.shape[1] == wanted.shape[0] else logits.index_select(1, wanted)
    return logits[:, -wanted:] if wanted else logits


def run_whole(view: nn.Module, token_ids: Tensor, first: int) -> Tensor:
    """Run whole sequences [batch, length] without a cache; return logits [batch, length - first, vocabulary]."""
    num_kept = token_ids.shape[1] - first
    logits = view(input_ids=token_ids, use_cache=False, logits_to_keep=num_kept).logits
    return logits[:, -num_kept:]


def without(block: nn.Module, index: int, anatomy: Anatomy, skip_attention: bool, skip_mlp: bool) -> nn.Module:
    """Return the block, an identity in its place, or a copy with one branch zeroed.

    Raises `UnsupportedModelError` if the block has no separate module for that branch, or does not run without it.
    """
    if not skip_attention and not skip_mlp:
        return block
    if skip_attention and skip_mlp:
        return Identity(block, anatomy.block_outputs)
    if isinstance(block, FixedShapes):
        return block.around(without(block.block, index, anatomy, skip_attention, skip_mlp))
    sublayer = (anatomy.attention if skip_attention else anatomy.mlp)[index]
    if sublayer is None:
        kind = "attention" if skip_attention else "MLP"
        raise UnsupportedModelError(
            f"block {index} has no separate {kind} module that it runs without: only the whole block can be skipped"
        )
    partial = shallow_copy(block)
    setattr(partial, sublayer.name, Zero(getattr(block, sublayer.name), sublayer.num_outputs))
    return partial


def with_blocks(model: nn.Module, path: tuple[str, ...], blocks: Sequence[nn.Module]) -> nn.Module:
    """Return a shallow copy of `model` with `blocks` as its block list.

    Containers on the path are copied; everything else is shared.
    """
    view = shallow_copy(model)
    container = view
    for name in path[:-1]:
        child = shallow_copy(getattr(container, name))
        setattr(container, name, child)
        container = child
    setattr(container, path[-1], _Blocks(blocks))
    return view


def with_fast_linears(module: nn.Module, copied: Callable[[Make], nn.Module] = operator.call) -> nn.Module:
    """Return a copy of `module` with faster linear layers for few positions on a CPU, or `module` if it has none.

    `copied` makes those that hold a copy of a weight; see `ModelWeights.copied`.
    """
    return with_replaced(module, partial(fast_linear, copied=copied))


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


class _Blocks(nn.ModuleList):
    """A block list that returns itself as its full slice.

    Some families slice the list in every pass, which would copy it.
    """

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)


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
