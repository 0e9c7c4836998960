"""A loaded causal language model and the ways to run it, whole or in part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.cache.kv_cache import KVCache
from decoding.errors import UnsupportedRunnerError
from decoding.runners import PLAIN_RUNNER, build_runner
from decoding.runners.compilation import PREPARING, call_block
from decoding.runners.contract import Outputs, Part, PassRequest, Written, write_by
from decoding.runners.eager import EagerRunner, RunnerFactory
from decoding.runners.masks import MaskKinds
from decoding.target.anatomy import Anatomy, examine, find_mask_kinds, find_rope_change, follow, refuse_recurrent_state
from decoding.target.attention import repeats_of, with_grouped_attention, with_kernel_attention
from decoding.target.equivalence import check_runner, find_shared_pass_difference
from decoding.target.linears import QuantisedLayers, with_fast_linears
from decoding.target.lm_heads import DraftVocabulary, LMHeads
from decoding.target.parts import ModelPart, run_whole, with_blocks, without
from decoding.target.soundness import Checks, separable
from decoding.target.stand_ins import Emit, FixedShapes, Identity, PassState, shallow_copy
from decoding.target.weights import ModelWeights, align_to_cache_lines


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
        self.mask_kinds, self.maskless_reason = _mask_kinds_of(self.config, self.dtype, self.anatomy)
        self.runner = self._build_runner(runner, exact_width)
        self._has_fixed_shapes = self.runner.block_call is not None
        if self._has_fixed_shapes:
            align_to_cache_lines(model)
        self._weights = ModelWeights(model, frequencies_change=self._rope_change is not None)
        self.quantised = QuantisedLayers(_router_sizes(self.config), self._weights.copied)
        self.lm_heads = LMHeads(self.model, self.runner, self._weights, self.quantised, self._logits_by)
        self._known: dict[object, Any] = {}
        self.stack = [self.prepare_block(block, index) for index, block in enumerate(self.blocks)]
        self.whole = self.part(self.stack, is_whole=True)
        self._weights.note()
        if self.runner.block_call is not None:
            check_runner(self, Target(model))

    def _build_runner(self, runner: str | RunnerFactory, exact_width: int | None) -> EagerRunner:
        if runner == PLAIN_RUNNER and exact_width is None:
            return EagerRunner(self.mask_kinds)
        if self.mask_kinds is None:
            raise UnsupportedRunnerError(str(self.maskless_reason))
        if isinstance(runner, str):
            return build_runner(runner, self.mask_kinds, self.device, exact_width)
        return runner(self.mask_kinds, self.device)

    def follow_weights(self) -> bool:
        """Drop recordings and renew copies of weights if weights have moved or changed; return whether they have.

        Called before each sequence; see `decoding.target.weights` for what is noticed. Raises `UnsupportedModelError` if modules
        were replaced or weights have another precision, device or shape: the model then needs a new target.
        """
        if self._weights.are_as_noted(values=self._has_fixed_shapes):
            return False
        with PREPARING:
            if self._weights.are_as_noted(values=self._has_fixed_shapes):
                return False  # another thread was faster
            self.runner.drop_recordings()
            self._weights.renew()
            self._weights.note()
        return True

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

        One that `drafts` chooses from `vocabulary`, if there is one, and by an LM head with weights of `bits`, if they are given.
        Raises `UnsupportedModelError` for a vocabulary if the LM head is not a plain linear layer.
        """
        return ModelPart(
            self.model,
            self.anatomy.path,
            blocks,
            current,
            lm_head=self.lm_heads.of_drafts(vocabulary, bits) if drafts else self.lm_heads.whole,
            is_whole=is_whole,
            verifies=verifies,
        )

    def draft_blocks(
        self, skip_attention: Collection[int] = (), skip_mlp: Collection[int] = (), *, bits: int | None = None
    ) -> list[nn.Module]:
        """Return the blocks of a draft without these sublayers, as this target's runner calls them.

        With `bits` their plain linear layers have quantised weights, which all drafts share. Raises `UnsupportedModelError` for a
        sublayer that is no module of its own, and for `bits` if there is no layer to quantise.
        """
        if bits is not None:
            self.quantised.check(self.blocks)

        def draft_block(index: int) -> nn.Module:
            skips = index in skip_attention, index in skip_mlp
            if bits is None or all(skips):
                return without(self.stack[index], index, self.anatomy, *skips)
            return self.prepare_block(without(self.blocks[index], index, self.anatomy, *skips), index, bits=bits)

        return [draft_block(index) for index in range(self.num_layers)]

    def passed_by(self, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        """Return stand-ins that pass the residual stream by these blocks."""
        return [Identity(block, num_outputs=self.anatomy.block_outputs) for block in blocks]

    def emitting(self, states: Tensor) -> list[nn.Module]:
        """Return blocks that output `states` and run nothing: only the final norm and the LM head do."""
        first, *others = self.blocks
        return [Emit(first, states=states, num_outputs=self.anatomy.block_outputs), *self.passed_by(others)]

    @torch.no_grad()
    def _logits_by(self, name: str, lm_head: nn.Module) -> Tensor:
        """Return logits [1, 1, vocabulary] of the model without blocks, with `lm_head` in place of its own."""
        view = with_blocks(self.model, self.anatomy.path, self.passed_by(list(self.blocks)))
        setattr(view, name, lm_head)
        return run_whole(view, torch.zeros((1, 1), dtype=torch.long, device=self.device), 0)

    def prepare_block(self, block: nn.Module, index: int, *, bits: int | None = None) -> nn.Module:
        """Return `block` at the model's block index `index`, as this target's runner calls it; quantised if `bits` are given."""
        attention = self.anatomy.attention[index]
        block = self._with_attention(block, index)
        repeats = repeats_of(block, attention)
        if bits is not None:
            block = self.quantised.within(block, bits)
        elif self._has_fixed_shapes:
            block = with_fast_linears(block)
        if self.mask_kinds is None:
            return block
        call = self.runner.block_call or call_block
        own_masks = self.runner.reads_all_slots
        return FixedShapes(block, index, self.mask_kinds, call, repeats=repeats, own_masks=own_masks)

    def _with_attention(self, block: nn.Module, index: int) -> nn.Module:
        """Return a copy of `block` with the attention of this target's passes, or `block` if nothing changes."""
        attention = self.anatomy.attention[index]
        if self.runner.attends_by_position and self.mask_kinds is not None:
            return with_kernel_attention(block, attention, self.mask_kinds.windows[index])
        return with_grouped_attention(block, attention)

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
        """Run a pass; see `EagerRunner.run`. A sequence in lockstep waits for the others' passes (`decoding.lockstep`)."""
        if cache.company is not None:
            return cache.company.run(part, PassRequest(token_ids, cache, start, last_only, states, looks))
        return self.runner.run(part, token_ids, cache, start, last_only=last_only, states=states, looks=looks)

    def write_greedily(self, part: Part, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int) -> Written:
        """Draft greedily; see `EagerRunner.write_greedily`. Sequences in lockstep draft together, as far as each wants to."""
        if (company := cache.company) is None:
            return self.runner.write_greedily(part, token_ids, cache, start, num_tokens)

        def piece(token_ids: Tensor, index: int) -> Written:
            request = PassRequest(token_ids, cache, start + index, last_only=True, states=None)
            written: Written = company.write(part, request, num_tokens - index)
            return written

        return write_by(piece, token_ids, num_tokens)

    @property
    def checks(self) -> Checks:
        """What this target can do, tested when it is asked for."""
        return Checks(self, self._known)

    @cached_property
    def unbatchable_reason(self) -> str | None:
        """Why sequences of this model cannot share passes, or None.

        Tested on a few tokens at the first access.
        """
        if self.maskless_reason is not None:
            return self.maskless_reason
        if self._rope_change is not None:
            return "its rotary embedding depends on the sequence length, which differs between sequences"
        if self.runner.exact_width is not None:
            return "a bit-exact pass covers one sequence only"
        return find_shared_pass_difference(self)

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's own decoder blocks."""
        return follow(self.model, self.anatomy.path)

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def can_be_quantised(self) -> bool:
        """True if a draft of this model may be quantised: some layer of its blocks is a plain linear one."""
        return self.quantised.finds_any(self.blocks)

    @property
    def device(self) -> torch.device:
        """Device of the token ids."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def weight_bytes(self) -> int:
        return self.model.get_memory_footprint(return_buffers=False)

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

    def check_exit_layer(self, exit_layer: int) -> None:
        """Raise ValueError unless the model can exit after its first `exit_layer` blocks."""
        if not 0 < exit_layer < self.num_layers:
            raise ValueError(f"draft exits at layer {exit_layer}, but it must be 1 to {self.num_layers - 1}")


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
