"""A loaded causal language model and the ways to run it, whole or in part."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.cache.kv_cache import KVCache
from decoding.errors import ProfileWarning, UnsupportedModelError, UnsupportedRequestError, UnsupportedRunnerError
from decoding.runners import PLAIN_RUNNER, build_runner
from decoding.runners.compilation import PREPARING, call_block
from decoding.runners.contract import Outputs, Part, PassRequest, Runner, RunnerFactory, Written
from decoding.runners.eager import EagerRunner
from decoding.runners.features import SpeedFeatures
from decoding.runners.greedy_chain import write_by
from decoding.runners.masks import MaskKinds
from decoding.target.anatomy import Anatomy, examine, find_mask_kinds, find_rope_change, follow, refuse_recurrent_state
from decoding.target.attention import repeats_of, with_grouped_attention
from decoding.target.draft_vocabulary import DraftVocabulary
from decoding.target.equivalence import check_runner, find_shared_pass_difference, find_tree_difference
from decoding.target.exit_head import ExitHead
from decoding.target.feature_head import FeatureBlock, FeatureHead
from decoding.target.feature_view import FeatureView, unrolled
from decoding.target.fused import tied_addresses, with_fused_projections
from decoding.target.kernel_attention import with_kernel_attention
from decoding.target.parts import (
    LMHead,
    ModelPart,
    find_lm_head,
    run_whole,
    shallow_copy,
    with_blocks,
    with_fast_linears,
    without,
)
from decoding.target.quantised import QuantisedLayers, is_plain_linear
from decoding.target.soundness import check_cache, check_skips, counts_padding, find_resume_difference, separable
from decoding.target.stand_ins import Emit, FixedShapes, Head, Identity, PassState, Tap, first_of
from decoding.target.varlen import find_kernel, with_varlen_attention
from decoding.target.views import BlockView, DraftStatesView, DraftView, ExitView, ResumeView, TappedView
from decoding.target.weights import Make, ModelWeights

_TARGETS: WeakKeyDictionary[nn.Module, WeakSet[Target]] = WeakKeyDictionary()
"""The targets of each model: fusing moves the weights of all of them."""


class Target:
    """A loaded causal language model, run whole or in part, one sequence at a time.

    `runner` is a name in `decoding.runners.RUNNERS` or a factory. `exact_width` turns on bit-exact mode: after the
    prompt every pass of the whole model runs on exactly that many positions, padded, so that a token's logits have
    the same bits whatever else is in the pass, and drafted output equals this mode's plain output bit for bit (the
    idea of LLM-42, arXiv 2601.17768).

    Raises `UnsupportedModelError` if no stack of blocks is found or a block keeps state outside the KV cache, and
    `UnsupportedRunnerError` if the runner or the mode cannot run the model.
    """

    def __init__(
        self, model: PreTrainedModel, runner: str | RunnerFactory = PLAIN_RUNNER, *, exact_width: int | None = None
    ) -> None:
        if runner != PLAIN_RUNNER:
            _refuse_several_devices(model)
        self.model = model.eval()
        self.config: Any = model.config.get_text_config()
        refuse_recurrent_state(model, self.config)
        # A copy: two tokens are not worth the compilation of a model that the user has compiled.
        self.anatomy = separable(model, examine(shallow_copy(model), self.config))
        self._rope_change = find_rope_change(self.config)
        self._mask_kinds, self._unbatchable_reason = _mask_kinds_of(self.config, self.dtype, self.anatomy)
        self.runner: Runner = self._build_runner(runner, exact_width)
        # Only where it is needed: weights that are not in memory have no address.
        self._tied = tied_addresses(model) if self.runner.features.fused_projections else frozenset()
        # Weak: rows are copies of weights, and are not to outlive the views that draft from them.
        self._lm_head_rows = WeakValueDictionary[DraftVocabulary, nn.Module]()
        self._fast_lm_head_rows = WeakValueDictionary[DraftVocabulary, nn.Module]()
        self._weights = ModelWeights(model, frequencies_change=self._rope_change is not None)
        self._quantised = QuantisedLayers(_router_sizes(self.config), self._weights.copied)
        self._cache_is_sound = False
        self._resumes: dict[int, bool] = {}
        self._packs = self.runner.block_call is not None
        self.stack = [self.prepare_block(block, index) for index, block in enumerate(self.blocks)]
        self.whole = self.part(self.stack, is_whole=True)
        self._weights.note()
        _TARGETS.setdefault(model, WeakSet()).add(self)
        if self.runner.block_call is not None:
            check_runner(self, Target(model, self._eager_runner))

    def _build_runner(self, runner: str | RunnerFactory, exact_width: int | None) -> Runner:
        if runner == PLAIN_RUNNER and exact_width is None:
            return EagerRunner(self._mask_kinds)
        if self._mask_kinds is None:
            raise UnsupportedRunnerError(str(self._unbatchable_reason))
        if isinstance(runner, str):
            return build_runner(runner, self._mask_kinds, self.device, exact_width)
        return runner(self._mask_kinds, self.device)

    def follow_weights(self) -> bool:
        """Drop recordings and renew copies of weights if weights have moved or changed; return whether they have.

        Called before each sequence; see `decoding.target.weights` for what is noticed. Raises `UnsupportedModelError` if modules
        were replaced or weights have another precision, device or shape: the model then needs a new target.
        """
        if self._weights.are_as_noted(values=self._packs):
            return False
        with PREPARING:
            if self._weights.are_as_noted(values=self._packs):
                return False  # another thread was faster
            self.runner.drop_recordings()
            self._weights.renew()
            if self.runner.features.fused_projections:
                self._drop_recordings_of_others()
            self._weights.note()
        return True

    def _drop_recordings_of_others(self) -> None:
        """Let the model's other targets record again, also in the middle of a sequence: fusing has moved weights that they read."""
        for other in _TARGETS.get(self.model, ()):
            if other is not self:
                other.runner.drop_recordings()

    def _eager_runner(self, mask_kinds: MaskKinds, device: torch.device) -> Runner:
        """Return the runner with which this target's passes are compared; it drafts from the same vocabulary."""
        own = self.runner.features
        features = SpeedFeatures(draft_vocabulary=own.draft_vocabulary, token_counts=own.token_counts)
        return EagerRunner(mask_kinds, features=features)

    def part(
        self,
        blocks: Sequence[nn.Module],
        current: PassState | None = None,
        *,
        is_whole: bool = False,
        verifies: bool = False,
        drafts: bool = False,
        vocabulary: DraftVocabulary | None = None,
        bits: int | None = None,
    ) -> ModelPart:
        """Return the model with `blocks` in place of its own, whose stand-ins share `current`.

        One that `drafts` chooses from `vocabulary`, or else from the runner's draft vocabulary, if there is one, and by an LM
        head with weights of `bits`, if they are given. Raises `UnsupportedModelError` for a vocabulary if the LM head is not a
        plain linear layer.
        """
        return ModelPart(
            self.model,
            self.anatomy.path,
            blocks,
            current,
            lm_head=self._lm_head_of(vocabulary, bits) if drafts else self._lm_head,
            is_whole=is_whole,
            verifies=verifies,
        )

    @cached_property
    def _lm_head(self) -> LMHead | None:
        """The LM head for fixed-shape passes on a CPU; None elsewhere.

        On a GPU recording makes calls cheap, and nothing is packed.
        """
        call, name = self.runner.block_call, find_lm_head(self.model)
        if call is None or name is None or self.device.type != "cpu":
            return None
        own = getattr(self.model, name)
        return LMHead(name, own, with_fast_linears(own, self._weights.copied), call)

    @cached_property
    def _draft_vocabulary(self) -> DraftVocabulary | None:
        """The runner's draft vocabulary; None if it has none, or if the LM head is not a plain linear layer."""
        features, num_rows = self.runner.features, self.num_lm_head_rows
        if features.draft_vocabulary is None or num_rows is None:
            return None
        return DraftVocabulary.of_most_frequent(features.draft_vocabulary, num_rows, features.token_counts)

    def _lm_head_of(self, vocabulary: DraftVocabulary | None, bits: int | None) -> LMHead | None:
        """Return the LM head of drafts: all of it, or the rows for a vocabulary; quantised if `bits` are given."""
        vocabulary = vocabulary or self._draft_vocabulary
        if bits is not None:
            return self._quantised_lm_head(vocabulary, bits)
        return self._lm_head if vocabulary is None else self._narrow_lm_head(vocabulary)

    def _quantised_lm_head(self, vocabulary: DraftVocabulary | None, bits: int) -> LMHead | None:
        """Return the LM head with weights of `bits`; as it is if it is not a plain linear layer."""
        name = find_lm_head(self.model)
        if vocabulary is not None:
            rows = self._rows_of_lm_head(vocabulary)
            linear: Make = partial(vocabulary.rows_of, rows.own)  # not the rows themselves, which need not stay
        elif name is not None and is_plain_linear(own := getattr(self.model, name)):
            rows, linear = LMHead(name, own, own, None), lambda: own
        else:
            return self._lm_head
        packed = self._quantised.layer(linear, bits, ("LM head", vocabulary))
        return replace(rows, module=packed, call=None if self._lm_head is None else self._lm_head.call)

    def _narrow_lm_head(self, vocabulary: DraftVocabulary) -> LMHead:
        """Return the rows of the LM head for `vocabulary` as this target's runner calls them."""
        narrow = self._rows_of_lm_head(vocabulary)
        if self._lm_head is None:
            return narrow
        fast = self._fast_lm_head_rows.get(vocabulary)
        if fast is None:
            fast = with_fast_linears(narrow.module, self._weights.copied)
            self._fast_lm_head_rows[vocabulary] = fast
        return replace(narrow, module=fast, call=self._lm_head.call)

    def _rows_of_lm_head(self, vocabulary: DraftVocabulary) -> LMHead:
        """Return the rows of the LM head for `vocabulary`; raise `UnsupportedModelError` if it has no plain rows."""
        name = find_lm_head(self.model)
        if name is None:
            raise UnsupportedModelError("drafts from fewer tokens need a model whose LM head is a plain linear layer")
        own, rows = getattr(self.model, name), self._lm_head_rows.get(vocabulary)
        if rows is None:
            self._lm_head_rows[vocabulary] = rows = self._weights.copied(partial(vocabulary.rows_of, own))
        return LMHead(name, own, rows, None, torch.tensor(vocabulary.token_ids, device=own.weight.device))

    def draft_blocks(
        self, skip_attention: Collection[int] = (), skip_mlp: Collection[int] = (), *, bits: int | None = None
    ) -> list[nn.Module]:
        """Return the blocks of a draft without these sublayers, as this target's runner calls them.

        With `bits` their plain linear layers have quantised weights, which all drafts share. Raises `UnsupportedModelError` for a
        sublayer that is no module of its own, and for `bits` if there is no layer to quantise.
        """
        if bits is not None:
            self._quantised.check(self.blocks)

        def draft_block(index: int) -> nn.Module:
            skips = index in skip_attention, index in skip_mlp
            if bits is None or all(skips):
                return without(self.stack[index], index, self.anatomy, *skips)
            return self.prepare_block(without(self.blocks[index], index, self.anatomy, *skips), index, bits=bits)

        return [draft_block(index) for index in range(self.num_layers)]

    def prepare_block(
        self,
        block: nn.Module,
        index: int,
        *,
        bits: int | None = None,
        around: Callable[[nn.Module], nn.Module] | None = None,
    ) -> nn.Module:
        """Return `block` at the model's block index `index`, as this target's runner calls it; quantised if `bits` are given.

        `around` puts it into the module that is called in its place.
        """
        attention = self.anatomy.attention[index]
        block = self._with_attention(block, index)
        repeats = repeats_of(block, attention)
        block = block if around is None else around(block)
        block = self._with_fast_weights(block) if bits is None else self._quantised.within(block, bits)
        if self._mask_kinds is None:
            return block
        call = self.runner.block_call or call_block
        own_masks = self.runner.features.varlen_attention or self.runner.attends_by_position
        return FixedShapes(block, index, self._mask_kinds, call, repeats=repeats, own_masks=own_masks)

    def _with_fast_weights(self, block: nn.Module) -> nn.Module:
        """Return a copy of `block` whose linear layers are computed as this target's runner does, on the model's weights."""
        if self.runner.features.fused_projections:
            block = with_fused_projections(block, self._tied, self._weights.copied)
            self._drop_recordings_of_others()
        return with_fast_linears(block, self._weights.copied) if self._packs else block

    def _with_attention(self, block: nn.Module, index: int) -> nn.Module:
        """Return a copy of `block` with the attention of this target's passes, or `block` if nothing changes."""
        attention = self.anatomy.attention[index]
        if self.runner.attends_by_position and self._mask_kinds is not None:
            return with_kernel_attention(block, attention, self._mask_kinds.windows[index])
        if not self.runner.features.varlen_attention or self._mask_kinds is None:
            return with_grouped_attention(block, attention)
        kernel = find_kernel(self.device, self.dtype)
        return with_varlen_attention(block, attention, self._mask_kinds.windows[index], kernel)

    def run(
        self,
        part: Part,
        token_ids: Tensor,
        cache: KVCache,
        start: int,
        *,
        last_only: bool = False,
        states: Tensor | None = None,
        looks: bool = False,
    ) -> Outputs:
        """Run a pass; see `Runner.run`. A sequence in lockstep waits for the others' passes (`decoding.lockstep`)."""
        if cache.company is not None:
            return cache.company.run(part, PassRequest(token_ids, cache, start, last_only, states, looks))
        return self.runner.run(part, token_ids, cache, start, last_only=last_only, states=states, looks=looks)

    def run_tree(self, part: Part, token_ids: Tensor, cache: KVCache, start: int, positions: Sequence[int]) -> Outputs:
        """Run a chain and its side leaves; see `Runner.run_tree`. The sequence must not be in lockstep."""
        return self.runner.run_tree(part, token_ids, cache, start, positions)

    @property
    def takes_trees(self) -> bool:
        """True if side leaves can be verified; see `check_trees`."""
        return self._treeless_reason is None

    def check_trees(self) -> None:
        """Raise `UnsupportedModelError` if this model or its runner cannot verify side leaves.

        Tested on a few tokens at the first call.
        """
        if self._treeless_reason is not None:
            raise UnsupportedModelError(f"{type(self.model).__name__} takes no candidate tree: {self._treeless_reason}")

    @cached_property
    def _treeless_reason(self) -> str | None:
        """Why side leaves cannot be verified, or None."""
        if self._mask_kinds is None:
            return str(self._unbatchable_reason)
        if self.runner.exact_width is not None:
            return "bit-exact passes verify chains only"
        if self.runner.features.varlen_attention:
            return "variable-length attention cannot leave out slots: turn the feature varlen_attention off"
        return find_tree_difference(self)

    def check_cache(self) -> None:
        """Raise `UnsupportedModelError` unless passes over a cache, also after a rollback, compute what one pass does.

        Tested on a few tokens at the first call.
        """
        if not self._cache_is_sound:
            check_cache(self._plain)
            self._cache_is_sound = True

    def check_skips(self, skip_attention: Sequence[int], skip_mlp: Sequence[int]) -> None:
        """Raise `UnsupportedModelError` unless a few tokens run without these sublayers."""
        check_skips(self._plain, skip_attention, skip_mlp)

    def check_padding(self) -> None:
        """Raise `UnsupportedRequestError` if the model's output depends on padding on the left, tested at the first call.

        Sequences are decoded without their padding.
        """
        if self._counts_padding:
            raise UnsupportedRequestError(
                f"{type(self.model).__name__} counts padding as positions, and its output depends on it: give prompts of different "
                "lengths one by one, without padding"
            )

    @cached_property
    def _counts_padding(self) -> bool:
        return counts_padding(self._plain)

    def resumes_at(self, boundary: int) -> bool:
        """Return True if a verification may resume at block `boundary`; one that may not runs the whole model, with a warning.

        Tested on a few tokens at the first call for each boundary.
        """
        if boundary not in self._resumes:
            difference = find_resume_difference(self._plain, boundary)
            self._resumes[boundary] = difference is None
            if difference is not None:
                warnings.warn(f"{difference}: each verification runs the whole model", ProfileWarning, stacklevel=2)
        return self._resumes[boundary]

    @cached_property
    def _plain(self) -> Target:
        """The model with the plain runner, for checks that no other runner need prepare for."""
        return self if type(self.runner) is EagerRunner else Target(self.model)

    def write_greedily(
        self, part: Part, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int, *, looks: bool = False
    ) -> Written:
        """Draft greedily; see `Runner.write_greedily`. Sequences in lockstep draft together, as far as each wants to."""
        if (company := cache.company) is None:
            return self.runner.write_greedily(part, token_ids, cache, start, num_tokens, looks=looks)

        def piece(token_ids: Tensor, index: int) -> Written:
            request = PassRequest(token_ids, cache, start + index, last_only=True, states=None, looks=looks)
            written: Written = company.write(part, request, num_tokens - index)
            return written

        return write_by(piece, token_ids, num_tokens)

    @cached_property
    def unbatchable_reason(self) -> str | None:
        """Why sequences of this model cannot share passes, or None.

        Tested on a few tokens at the first access.
        """
        if self._unbatchable_reason is not None:
            return self._unbatchable_reason
        if self._rope_change is not None:
            return "its rotary embedding depends on the sequence length, which differs between sequences"
        if self.runner.exact_width is not None:
            return "a bit-exact pass covers one sequence only"
        return self.unmaskable_reason

    @cached_property
    def unmaskable_reason(self) -> str | None:
        """Why passes under given attention masks do not compute what the model computes, or None.

        Tested on a few tokens at the first access.
        """
        return self._unbatchable_reason or find_shared_pass_difference(self)

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's own decoder blocks."""
        return follow(self.model, self.anatomy.path)

    @property
    def num_layers(self) -> int:
        """Number of decoder blocks."""
        return len(self.blocks)

    @property
    def num_lm_head_rows(self) -> int | None:
        """Number of rows of the LM head, from which drafts may choose some; None if it is not a plain linear layer."""
        name = find_lm_head(self.model)
        return None if name is None else getattr(self.model, name).out_features

    @property
    def can_be_quantised(self) -> bool:
        """True if a draft of this model may be quantised: some layer of its blocks is a plain linear one."""
        return self._quantised.finds_any(self.blocks)

    @property
    def device(self) -> torch.device:
        """Device of the token ids."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.model.dtype

    @property
    def context_length(self) -> int | None:
        """Maximum number of positions in the model's configuration, or None."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def max_drafted(self) -> int | None:
        """Maximum number of drafts per verification: `exact_width - 1` in bit-exact mode, else None (unlimited)."""
        exact_width = self.runner.exact_width
        return None if exact_width is None else exact_width - 1

    def widest_pass(self, start: int) -> int | None:
        """Return the maximum width of a pass from `start`, or None if unlimited.

        A wider pass would not compute what one-token passes do. In bit-exact mode all passes have one width, and
        narrower ones are padded to it. A `longrope` or `dynamic` rotary embedding picks the frequencies of a whole
        pass by its last position: a pass must not straddle the position where they change, and after that position
        the frequencies of a dynamic embedding change with every token.
        """
        widest = [self.runner.exact_width] if self.runner.exact_width is not None else []
        if (change := self._rope_change) is not None:
            if start < change.position:
                widest.append(change.position - start)
            elif not change.once:
                widest.append(1)
        return min(widest, default=None)

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache for one sequence of at most `capacity` tokens. Follows the weights first."""
        self.follow_weights()
        return self.runner.new_cache(self.num_layers, capacity)

    def forward(self, token_ids: Tensor, cache: KVCache, start: int, *, last_only: bool = False) -> Tensor:
        """Run the whole model on `token_ids` [1, width] at positions from `start`.

        Return logits [width (1 if `last_only`), vocabulary].
        """
        return self.run(self.whole, token_ids, cache, start, last_only=last_only).logits

    def draft_view(
        self,
        skip_attention: Sequence[int],
        skip_mlp: Sequence[int],
        *,
        keep_boundary: bool,
        vocabulary: DraftVocabulary | None = None,
        bits: int | None = None,
    ) -> DraftView:
        """Return the model without these sublayers, choosing from `vocabulary` if there is one, quantised if `bits` are given.

        `keep_boundary` records the states before the first block with a skip. Raises `UnsupportedModelError` for a vocabulary if
        the LM head is not a plain linear layer, and for `bits` if no layer of the blocks is.
        """
        skips = frozenset(skip_attention), frozenset(skip_mlp)
        return DraftView(self, *skips, keep_boundary=keep_boundary, vocabulary=vocabulary, bits=bits)

    def resume_view(self, boundary: int) -> ResumeView:
        """Return the model from block `boundary` on, for known input states of that block."""
        return ResumeView(self, boundary)

    def block_view(self, index: int) -> BlockView:
        """Return block `index` by itself."""
        return BlockView(self, index)

    def tapped_view(self, boundary: int) -> TappedView:
        """Return the whole model, which also outputs the states before block `boundary`."""
        return TappedView(self, boundary)

    def exit_view(self, exit_layer: int, head: ExitHead, *, bits: int | None = None) -> ExitView:
        """Return the first `exit_layer` blocks, `head`, and the model's own final norm and LM head; quantised if `bits` are given.

        Raises `UnsupportedModelError` if the head has a vocabulary of its own and the LM head is not a plain linear layer.
        """
        return ExitView(self, exit_layer, head, bits=bits)

    def draft_states_view(self, exit_layer: int, *, bits: int) -> DraftStatesView:
        """Return the first `exit_layer` blocks of a quantised draft, whose states its exit head reads."""
        return DraftStatesView(self, exit_layer, bits=bits)

    def new_exit_head(self, vocabulary: DraftVocabulary | None = None) -> ExitHead:
        """Return a copy of the last block as a new exit head that drafts from `vocabulary`, or from all tokens.

        It is on the block's device and in its precision.
        """
        block = copy.deepcopy(self.blocks[-1])
        return ExitHead(block.requires_grad_(True).eval(), vocabulary)

    def feature_view(self, head: FeatureHead) -> FeatureView:
        """Return `head` with the model's embeddings, final norm and LM head.

        Raises `UnsupportedModelError` if the head has a vocabulary of its own and the LM head is not a plain linear layer.
        """
        return FeatureView(self, head)

    def new_feature_head(self, vocabulary: DraftVocabulary | None = None) -> FeatureHead:
        """Return a new feature head around a copy of the last block, which drafts from `vocabulary`, or from all tokens.

        It is on the block's device and in its precision.
        """
        block = copy.deepcopy(self.blocks[-1])
        like = next(block.parameters())
        joining = FeatureBlock(block, self.config.hidden_size).to(like.device, like.dtype)
        return FeatureHead(joining.requires_grad_(True).eval(), vocabulary)

    def last_states(self, token_ids: Tensor, *, first: int = 0) -> tuple[Tensor, Tensor]:
        """Run `token_ids` [batch, length] once; return the states [.., batch, length, hidden] after all blocks, and logits.

        The logits and the padding are as in `exit_states`.
        """
        states, logits = self._states_after(token_ids, [self.num_layers], first)
        return states[self.num_layers], logits

    def unrolled_feature_head(
        self, token_ids: Tensor, states: Tensor, head: FeatureHead, num_steps: int, *, first: int = 0
    ) -> Iterator[Tensor]:
        """Yield the logits [batch, length - first, vocabulary] of each step of a feature head; see `unrolled`.

        Raises `UnsupportedModelError` for a model with an `unmaskable_reason`.
        """
        if self._mask_kinds is None or self.unmaskable_reason is not None:
            raise UnsupportedModelError(f"no steps of a feature head can be unrolled: {self.unmaskable_reason}")
        lm_head = None if head.vocabulary is None else self._rows_of_lm_head(head.vocabulary)
        return unrolled(self, head, lm_head, self._mask_kinds, token_ids, states, num_steps, first)

    def exit_states(
        self, token_ids: Tensor, exit_layers: Sequence[int], *, first: int = 0
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Run `token_ids` [batch, length] once without a cache and return exit states and logits.

        The states [batch, length, hidden] are those after the first N blocks, for each N of `exit_layers`. The logits
        [batch, length - first, vocabulary] start at position `first`. Shorter sequences are padded on the right:
        causal attention ignores later positions. Raises `ValueError` for an impossible exit layer.
        """
        for exit_layer in exit_layers:
            self.check_exit_layer(exit_layer)
        return self._states_after(token_ids, exit_layers, first)

    def _states_after(
        self, token_ids: Tensor, exit_layers: Sequence[int], first: int
    ) -> tuple[dict[int, Tensor], Tensor]:
        states: dict[int, list[Tensor]] = {exit_layer: [] for exit_layer in exit_layers}
        blocks = [
            Tap(block, states[index + 1].append) if index + 1 in states else block
            for index, block in enumerate(self.blocks)
        ]
        view = with_blocks(self.model, self.anatomy.path, blocks)
        logits = run_whole(view, token_ids, first)
        return {exit_layer: kept[0] for exit_layer, kept in states.items()}, logits

    def exit_logits(
        self, token_ids: Tensor, states: Tensor, head: ExitHead | None, *, first: int = 0, bits: int | None = None
    ) -> Tensor:
        """Return logits [batch, length - first, vocabulary] of an exit, from position `first` on.

        `states` [batch, length, hidden] are the exit's states of `token_ids` [batch, length]. The block of `head` receives
        gradients; without a head the states are used as they are. Tokens outside the head's vocabulary get `LEFT_OUT`. With
        `bits` head and LM head have quantised weights, and nothing receives gradients.
        """
        emit = Emit(self.blocks[0], self.anatomy.block_outputs)
        emit.states = states
        blocks = [emit, *(Identity(block, self.anatomy.block_outputs) for block in list(self.blocks)[1:])]
        vocabulary = None if head is None else head.vocabulary
        if head is not None:
            blocks[-1] = Head(head.block if bits is None else self._quantised.within(head.block, bits))
        view = with_blocks(self.model, self.anatomy.path, blocks)
        if bits is not None:
            lm_head = self._quantised_lm_head(vocabulary, bits)
        else:
            lm_head = None if vocabulary is None else self._rows_of_lm_head(vocabulary)
        if lm_head is not None:
            setattr(view, lm_head.name, lm_head.stand_in(PassState()))
        return run_whole(view, token_ids, first)

    def check_exit_layer(self, exit_layer: int) -> None:
        """Raise ValueError unless the model can exit after its first `exit_layer` blocks."""
        if not 0 < exit_layer < self.num_layers:
            raise ValueError(f"draft exits at layer {exit_layer}, but it must be 1 to {self.num_layers - 1}")

    def sublayer_outputs(self, token_ids: Tensor, *, before: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return attention and MLP outputs of every block, each [width, hidden], before the residual add.

        One eager pass over `token_ids` [1, width] after the keys and values of `before` [1, n]. The cache is not kept.
        Raises `UnsupportedModelError` if a block has no separate module for one of them.
        """
        outputs: list[dict[str, Tensor]] = [{} for _ in self.blocks]
        runner, whole = EagerRunner(), self.part(list(self.blocks))
        cache = self._cache_after(before, token_ids.shape[1])
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
            runner.run(whole, token_ids, cache, cache.length, last_only=True)
        finally:
            for handle in handles:
                handle.remove()
        return [(out["attention"][0], out["mlp"][0]) for out in outputs]

    def logit_lens(self, token_ids: Tensor, *, before: Tensor | None = None) -> Iterator[Tensor]:
        """Yield logits [width, vocabulary] after each block, through the model's own final norm and LM head.

        Eager passes over `token_ids` [1, width] after the keys and values of `before` [1, n]. The cache is not kept.
        """
        states: list[Tensor] = []
        runner, cache = EagerRunner(), self._cache_after(before, token_ids.shape[1])
        tapped, start = self.part([Tap(block, states.append) for block in self.blocks]), cache.length
        runner.run(tapped, token_ids, cache, start, last_only=True)
        emit = Emit(self.blocks[0], self.anatomy.block_outputs)
        rest = [Identity(block, self.anatomy.block_outputs) for block in list(self.blocks)[1:]]
        view = self.part([emit, *rest])
        for state in states:
            emit.states = state
            yield runner.run(view, token_ids, cache, start).logits

    def _cache_after(self, before: Tensor | None, width: int) -> KVCache:
        """Return a cache that holds `before` [1, n], computed by an eager pass, with room for `width` more positions."""
        num_before = 0 if before is None else before.shape[1]
        cache = KVCache(self.num_layers, num_before + width)
        if before is not None:
            EagerRunner().run(self.part(list(self.blocks)), before, cache, 0, last_only=True)
            cache.length = num_before
        return cache


def _record_output(outputs: dict[str, Tensor], kind: str, module: nn.Module, args: Any, output: Any) -> None:
    outputs[kind] = first_of(output)


def _refuse_several_devices(model: PreTrainedModel) -> None:
    devices = list(dict.fromkeys(str(parameter.device) for parameter in model.parameters()))
    if len(devices) > 1:
        raise UnsupportedRunnerError(
            f"the weights are on {' and '.join(devices)}, and only the runner {PLAIN_RUNNER!r} runs on several devices"
        )


def _mask_kinds_of(config: Any, dtype: torch.dtype, anatomy: Anatomy) -> tuple[MaskKinds | None, str | None]:
    """Return the layers' mask kinds, or None and the reason why they are unknown.

    Passes in which the model builds its own masks do not need them.
    """
    try:
        return replace(find_mask_kinds(config, dtype), attends_plainly=all(anatomy.attends_plainly)), None
    except UnsupportedRunnerError as cause:
        return None, str(cause)


def _router_sizes(config: Any) -> frozenset[int]:
    """Return the numbers of outputs that tell the routers of a mixture of experts from its other layers."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    sizes = {getattr(config, name, None) for name in names}
    return frozenset({size for size in sizes if isinstance(size, int)} | ({1} if sizes - {None} else set()))
