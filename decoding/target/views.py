"""Views of the target: parts that draft, resume after a known prefix, or expose states."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from decoding.cache.kv_cache import KVCache
from decoding.cache.rounds_cache import RoundsCache
from decoding.runners.contract import Outputs, Written
from decoding.target.lm_heads import DraftVocabulary
from decoding.target.parts import ModelPart
from decoding.target.stand_ins import Head, LastPosition, PassState, Resume, Tap

if TYPE_CHECKING:
    from decoding.target.target import Target


class DraftView:
    """The target without some sublayers, choosing from `vocabulary` if there is one, with quantised weights if `bits` are given.

    `boundary` is the index of the first block that differs from the target's, or None; `keep_boundary` records the states before.
    Raises `UnsupportedModelError` for a vocabulary if the LM head is not a plain linear layer, and for `bits` if no layer is.
    """

    def __init__(
        self,
        target: Target,
        skip_attention: Collection[int],
        skip_mlp: Collection[int],
        *,
        keep_boundary: bool,
        vocabulary: DraftVocabulary | None = None,
        bits: int | None = None,
    ) -> None:
        skipped = {*skip_attention, *skip_mlp}
        _check_indices(skipped, target.num_layers)
        self.boundary = min(skipped, default=None) if bits is None else 0
        self._target = target
        blocks = target.draft_blocks(skip_attention, skip_mlp, bits=bits)
        self.keeps_boundary = keep_boundary and bool(self.boundary)
        current = PassState()
        if self.boundary and self.keeps_boundary:
            blocks[self.boundary - 1] = Tap(blocks[self.boundary - 1], record=current.tap)
        self._part = target.part(blocks, current, drafts=True, vocabulary=vocabulary, bits=bits)

    def follow(self, text: object, batch: object, token_ids: Sequence[int]) -> None:
        """Let a vocabulary that follows the text know `text`, now `token_ids`, which shares passes with others of its `batch`."""
        if self._part.text_rows is not None:
            self._part.text_rows.follow(text, batch, token_ids)

    def run(self, token_ids: Tensor, cache: KVCache, start: int, *, looks: bool = False) -> Outputs:
        """Run `token_ids` [1, width]; the logits [1, vocabulary] are those after the last. `looks` as in `EagerRunner.run`.

        The outputs' states are the boundary states [.., width, hidden], if they are kept.
        """
        return self._target.run(self._part, token_ids, cache, start, last_only=True, looks=looks)

    def check(self, token_ids: Tensor, cache: KVCache, start: int) -> Outputs:
        """Run `token_ids` [1, width]; the logits [width, vocabulary] are those after each."""
        return self._target.run(self._part, token_ids, cache, start)

    def write(self, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int) -> Written:
        """Draft `num_tokens` greedy tokens after `token_ids` [1, 1] at `start`, recording boundary states if kept."""
        return self._target.write_greedily(self._part, token_ids, cache, start, num_tokens)

    def alone(self, token_ids: Tensor, first: int) -> Tensor:
        """Return the logits [length - first, vocabulary] from position `first` of `token_ids` [1, length] on.

        All keys and values are the draft's own, as in a copy of the model without the sublayers; in decoding here they are the
        target's up to the round.
        """
        cache = self._target.new_cache(token_ids.shape[1])
        self._target.run(self._part, token_ids[:, :first], cache, 0, last_only=True)
        return self._target.run(self._part, token_ids[:, first:], cache, first).logits

    def rounds(self, token_ids: Tensor, cache: RoundsCache) -> Iterator[Tensor]:
        """Yield logits [rounds, depth, vocabulary] of many rounds whose drafts `token_ids` [rounds, depth] are known.

        They come for one chunk of `cache` at a time. Row r covers the positions from `cache.starts[r]` on. Its logits are
        those that the draft would compute in a round that begins there and drafts exactly these tokens.
        """
        return (outputs.logits for outputs in self._part.rounds(token_ids, cache))


class BlockView:
    """One block of the target by itself, run for many rounds at once."""

    def __init__(self, target: Target, index: int) -> None:
        _check_indices({index}, target.num_layers)
        blocks = target.stack
        around = target.passed_by(blocks)

        def by_itself(block: nn.Module, current: PassState) -> ModelPart:
            tap = Tap(block, record=current.tap)
            return target.part([*around[:index], tap, *around[index + 1 :]], current)

        given = PassState()
        self._on_given = by_itself(Resume(blocks[index], given), given)
        self._on_tokens = by_itself(blocks[index], PassState())

    def rounds(self, token_ids: Tensor, cache: RoundsCache, states: Tensor | None) -> Tensor:
        """Return the block's output [.., rounds, depth, hidden].

        `states` are its input, or None for the embeddings. `token_ids` [rounds, depth] are at the positions of
        `cache`, whose keys and values the block reads.
        """
        part = self._on_tokens if states is None else self._on_given
        return _joined_states(part.rounds(token_ids, cache, last_only=True, states=states))


class DraftStatesView:
    """The first `exit_layer` blocks of a quantised draft, run for many rounds at once."""

    def __init__(self, target: Target, exit_layer: int, *, bits: int) -> None:
        target.check_exit_layer(exit_layer)
        current, after = PassState(), range(exit_layer, target.num_layers)
        blocks = target.draft_blocks(after, after, bits=bits)
        blocks[exit_layer - 1] = Tap(blocks[exit_layer - 1], record=current.tap)
        self._part = target.part(blocks, current)

    def rounds(self, token_ids: Tensor, cache: RoundsCache) -> Tensor:
        """Return the exit's states [.., rounds, depth, hidden] of rounds whose drafts `token_ids` [rounds, depth] are known."""
        return _joined_states(self._part.rounds(token_ids, cache, last_only=True))


class ResumeView:
    """The target from a boundary on.

    Earlier blocks compute the last position only, or nothing if that is known too.
    """

    def __init__(self, target: Target, boundary: int) -> None:
        if not 0 < boundary < target.num_layers:
            raise ValueError(f"a pass resumes at block 1 to {target.num_layers - 1}, got {boundary}")
        self._run, self.boundary = target.run, boundary
        before, first, after = target.stack[:boundary], target.stack[boundary], target.stack[boundary + 1 :]
        known, last = PassState(), PassState()
        passed_by = target.passed_by(before)
        narrowed = [LastPosition(block, current=last) for block in before]
        self._from_known = target.part([*passed_by, Resume(first, known), *after], known, verifies=True)
        self._from_last = target.part([*narrowed, Resume(first, last, appends=True), *after], last, verifies=True)

    def run(self, token_ids: Tensor, cache: KVCache, start: int, states: Tensor) -> Outputs:
        """Run `token_ids` [1, width], all of which get logits.

        `states` are the boundary states of all positions, or of all but the last. The outputs' states are those of all positions.
        Raises `ValueError` for any other number.
        """
        width, known = token_ids.shape[1], states.shape[-2]
        if known not in (width, width - 1):
            raise ValueError(
                f"boundary states are known for {known} of {width} positions; all or all but the last are needed"
            )
        part = self._from_known if known == width else self._from_last
        return self._run(part, token_ids, cache, start, states=states)


class TappedView:
    """The whole model, recording the states before a boundary."""

    def __init__(self, target: Target, boundary: int) -> None:
        self._run = target.run
        current, blocks = PassState(), list(target.stack)
        blocks[boundary - 1] = Tap(blocks[boundary - 1], record=current.tap)
        self._part = target.part(blocks, current, is_whole=True)

    def run(
        self,
        token_ids: Tensor,
        cache: KVCache,
        start: int,
        *,
        last_only: bool = False,
    ) -> Outputs:
        """Run `token_ids` [1, width] as `EagerRunner.run` does; the outputs' states [.., width, hidden] are the boundary's."""
        return self._run(self._part, token_ids, cache, start, last_only=last_only)


class ExitView:
    """The first `exit_layer` blocks and an exit head (our formulation, after the abstract of EESD, arXiv 2406.03853).

    The head's keys and values are in the cache's branch. The head has the last block index, so that it receives the
    mask and rotary embeddings of the block it was copied from. Blocks and head have quantised weights if `bits` are given.
    """

    def __init__(self, target: Target, exit_layer: int, head: nn.Module, *, bits: int | None = None) -> None:
        target.check_exit_layer(exit_layer)
        self._target = target
        block = target.prepare_block(head, target.num_layers - 1, bits=bits)
        passed_by = target.passed_by(target.stack)
        between, after = passed_by[exit_layer:-1], range(exit_layer, target.num_layers)
        before = target.draft_blocks(after, after, bits=bits)[:exit_layer]

        def first_blocks(current: PassState) -> list[nn.Module]:
            return [*before[:-1], Tap(before[-1], record=current.tap)]

        step, pending, fill = PassState(), PassState(), PassState()
        narrowed = [LastPosition(block, current=pending) for block in first_blocks(pending)]
        catch_up = Resume(Head(block), pending, appends=True)
        drafting = partial(target.part, drafts=True, bits=bits)
        self._step = drafting([*first_blocks(step), *between, Head(block)], step)
        self._from_pending = drafting([*narrowed, *between, catch_up], pending)
        self._head_only = drafting([*passed_by[:-1], Resume(Head(block), fill)], fill)

    def run(
        self, token_ids: Tensor, cache: KVCache, start: int, pending: Tensor | None, *, looks: bool = False
    ) -> Outputs:
        """Run `token_ids` [1, width]; the outputs are the logits [1, vocabulary] and the exit state [.., 1, hidden] of the last.

        The blocks run on the last token only. The head also runs on the `pending` states [.., width - 1, hidden] of the tokens
        before. `looks` as in `EagerRunner.run`.
        """
        part = self._step if pending is None else self._from_pending
        return self._target.run(part, token_ids, cache, start, last_only=True, states=pending, looks=looks)

    def write(self, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int) -> Written:
        """Draft `num_tokens` greedy tokens after `token_ids` [1, 1] at `start`.

        Also return the exit states of the passes. The head must have processed every position before `start`.
        """
        return self._target.write_greedily(self._step, token_ids, cache, start, num_tokens)

    def fill(self, token_ids: Tensor, cache: KVCache, start: int, states: Tensor) -> None:
        """Run only the head on the `states` [.., width, hidden] of `token_ids`, to fill its cache."""
        self._target.run(self._head_only, token_ids, cache, start, last_only=True, states=states)


def _joined_states(chunks: Iterator[Outputs]) -> Tensor:
    states = [chunk.states for chunk in chunks if chunk.states is not None]
    return states[0] if len(states) == 1 else torch.cat(states, dim=-3)


def _check_indices(indices: Collection[int], num_layers: int) -> None:
    wrong = sorted(index for index in indices if not 0 <= index < num_layers)
    if wrong:
        raise ValueError(f"the model has layers 0 to {num_layers - 1}, got {wrong[0]}")
