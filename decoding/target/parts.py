"""The model, or a part of it, as a function: a shallow copy with replaced blocks.

Weights are shared, and the block list keeps its length, because families index masks and caches by it. The loaded
model is never changed, so dropping a part leaves no traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from decoding.cache.rounds_cache import RoundsCache, RoundsChunk
from decoding.errors import UnsupportedModelError
from decoding.runners.contract import Inputs, Outputs
from decoding.target.anatomy import Anatomy
from decoding.target.attention import attention_backends
from decoding.target.stand_ins import FixedShapes, Identity, PassState, Zero, shallow_copy

if TYPE_CHECKING:
    from decoding.target.lm_heads import LMHead


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
        self.text_rows = None if lm_head is None else lm_head.text_rows
        """The rows of a draft's LM head that follow the text, if there are such."""
        if lm_head is not None:
            setattr(self._module, lm_head.name, lm_head.stand_in(self._current))

    def compute(self, inputs: Inputs) -> Outputs:
        """Run one pass; see `runners.Part`."""
        current = self._current
        current.begin(inputs.token_ids.shape[1], inputs.last, inputs.states, only_best=inputs.cache.only_best)
        masks = {"attention_mask": inputs.masks[0]} if inputs.masks else {}
        try:
            with attention_backends(inputs.token_ids.device, fixed_shape=inputs.fixed_shape):
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
    ) -> Iterator[Outputs]:
        """Run rounds that begin at different positions as left-padded batches; yield the outputs of each chunk of `cache`.

        Logits are [rounds of the chunk, depth (1 if `last_only`), vocabulary].
        """
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
        return Identity(block, num_outputs=anatomy.block_outputs)
    if isinstance(block, FixedShapes):
        return block.around(without(block.block, index, anatomy, skip_attention, skip_mlp))
    sublayer = (anatomy.attention if skip_attention else anatomy.mlp)[index]
    if sublayer is None:
        kind = "attention" if skip_attention else "MLP"
        raise UnsupportedModelError(
            f"block {index} has no separate {kind} module that it runs without: only the whole block can be skipped"
        )
    partial = shallow_copy(block)
    setattr(partial, sublayer.name, Zero(getattr(block, sublayer.name), num_outputs=sublayer.num_outputs))
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


class _Blocks(nn.ModuleList):
    """A block list that returns itself as its full slice.

    Some families slice the list in every pass, which would copy it.
    """

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)
