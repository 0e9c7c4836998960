"""Drafts of a profile by the target's own modules, on the target's own blocks of keys and values (model runner V1).

Draft step j writes the keys and values of the token at position p + j into the slots where verification writes its own: nothing is
copied or rolled back. An exit head has keys and values of its own, written after each pass from the states at the exit. Drafts are
greedy, and are verified as those of vLLM's n-grams are: sampling keeps the target's distribution.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import set_forward_context
from vllm.v1.sample import rejection_sampler

from decoding.draft_length import DraftDistribution
from sdtune_vllm import problem
from sdtune_vllm.blocks import Step, load_head, run, steps_of
from sdtune_vllm.passes import Passes, recorded_sizes
from sdtune_vllm.requests import DraftingRequests, Turn
from sdtune_vllm.sampling import mend
from sdtune_vllm.settings import UnsupportedError, check, profile_of

logger = logging.getLogger("vllm.sdtune")

PLAIN_EVERY, PLAIN_STEPS = 300, 4
"""Of that many steps, the number that draft nothing, in a row: they tell what plain decoding takes (`pace`)."""

MOST_UNIFORM = 128
"""Most tokens of a batch whose drafts are padded to one length: 104 cost nothing at 8B sizes on an H100; more were not measured."""


class SelfDraft:
    """The proposer of `--speculative-config '{"method": "custom_class", "model": "sdtune_vllm.proposer.SelfDraft", ...}'`."""

    def __init__(self, vllm_config: Any) -> None:
        if (reason := problem()) is not None:
            raise UnsupportedError(reason)
        if vllm_config.device_config.device_type == "cpu" and (reason := mend(rejection_sampler)) is not None:
            raise UnsupportedError(reason)
        self._config = vllm_config
        self._profile, folder = profile_of(vllm_config)
        check(vllm_config, self._profile, folder)
        self._draft, head = self._profile.draft, self._profile.draft.trained_head
        self._head_file = None if head is None else folder / head.file
        self._most = vllm_config.speculative_config.num_speculative_tokens
        if self._most < self._profile.longest_draft:
            logger.warning("num_speculative_tokens cuts the drafts of %s to %d tokens", self._profile.name, self._most)
        self._requests = DraftingRequests(self._draft, self._profile.draft_length)
        self._looks = self._profile.draft_length.controller().looks_at_drafts
        self._recorded: dict[int, Passes] = {}
        self._num_steps = 0
        self.reads_states = head is not None
        if self.reads_states:
            # The runner reads here which states to keep.
            hf_config = vllm_config.speculative_config.draft_model_config.hf_config
            hf_config.eagle_aux_hidden_state_layer_ids = [self._draft.exit_layer]  # type: ignore[attr-defined]

    def load_model(self, target: nn.Module) -> None:
        """Refer to the target's modules. Nothing is loaded but the head."""
        self._target = target
        self._head: nn.Module | None = None
        self._steps: list[Step] = steps_of(target, self._draft) if self._draft.runs_model else []
        if self._head_file is not None:
            self._head, self._head_name = load_head(target, self._config, self._head_file)
        logger.info("sdtune drafts by %s: %s", self._profile.name, self._draft.describe())

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Not called: `draft` is, by the changed runner."""
        raise UnsupportedError("this model runner of vLLM does not hand over what a draft needs")

    @torch.inference_mode()
    def draft(
        self,
        runner: Any,
        scheduled: Any,
        sampled: Sequence[list[int]],
        states: list[Tensor] | None,
        slots: Mapping[str, Tensor],
    ) -> list[list[int]]:
        """Return the drafts of each row of the batch; lists differ in length, and may be empty.

        `slots` of the last pass are by attention layer: layers of different groups have blocks of their own.
        """
        self._requests.end(scheduled.finished_req_ids)
        if self._head is not None:
            assert states is not None, "asked for when the runner was made"
            self._fill_head(runner, scheduled.total_num_scheduled_tokens, states[0], slots)
        batch, turns, rooms = runner.input_batch, list[Turn](), [self._most]
        asked = getattr(scheduled, "num_spec_tokens_to_schedule", None)  # less than usual by a schedule of batch sizes
        most = self._most if asked is None else min(self._most, asked)
        self._num_steps += 1
        if self._num_steps % PLAIN_EVERY >= PLAIN_EVERY - PLAIN_STEPS:
            most = 0
        for row, tokens in enumerate(sampled):
            if not tokens:  # a part of a prompt
                continue
            name, length = batch.req_ids[row], int(batch.num_tokens_no_spec[row])
            verified = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            room = min(most, self._config.model_config.max_model_len - length - 1)
            rooms.append(room)
            text = batch.token_ids_cpu[row, :length]
            turns.append(self._requests.begin(name, row, text, verified, len(tokens) - 1, room))
        self._write(runner, [turn for turn in turns if len(turn.tokens) < turn.most])
        is_uniform = self._prefers_uniform(len(turns)) and len(turns) == len(sampled) and min(rooms) == self._most
        drafts = self._requests.drafts(turns, self._most if is_uniform else None)
        return [drafts.get(row, []) for row in range(len(sampled))]

    def _prefers_uniform(self, num_requests: int) -> bool:
        """Return True if vLLM runs a batch of this many requests in one CUDA graph once all drafts have the longest length.

        It runs other batches in pieces, and the GPU waits for the host in between.
        """
        compilation = self._config.compilation_config
        size = num_requests * (1 + self._most)
        return (
            self._config.device_config.device_type == "cuda"
            and compilation.cudagraph_mode.has_full_cudagraphs()
            and size <= min(MOST_UNIFORM, compilation.max_cudagraph_capture_size)
        )

    def record(self, runner: Any) -> None:
        """Record the draft's passes, after vLLM has recorded its own: nothing on a CPU."""
        if not self._steps or not (sizes := recorded_sizes(runner, self._config)):
            return
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for size in sizes:
                self._recorded[size] = self._new_passes(runner, size)
                self._recorded[size].record(pool, self._target)
        logger.info("sdtune recorded draft passes of %s requests", ", ".join(map(str, reversed(sizes))))

    def _new_passes(self, runner: Any, size: int) -> Passes:
        forward = partial(run, self._target, self._steps, self._head)
        return Passes(size, runner, self._config, forward, looks=self._looks)

    def _write(self, runner: Any, turns: list[Turn]) -> None:
        """Draft with the model until each turn has ended; the batch shrinks as they do."""
        passes, held = None, 0
        while turns:
            if passes is None or len(turns) != held:
                size = min((size for size in self._recorded if size >= len(turns)), default=0)
                passes, held = self._recorded.get(size) or self._new_passes(runner, len(turns)), len(turns)
                passes.begin(turns)
            # A rule that does not look at drafts says how long they are before they begin: nothing waits until then.
            count = 1 if self._looks else min(turn.most - len(turn.tokens) for turn in turns)
            turns = [
                turn
                for turn, row in zip(turns, passes.run(count), strict=False)
                if all(turn.take(token, DraftDistribution.of(top, uncertainty)) for token, top, uncertainty in row)
            ]

    def _fill_head(self, runner: Any, size: int, states: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Write the head's keys and values at the positions of the last pass: without metadata, attention does no more."""
        head: Any = self._head
        own = {self._head_name: slots[self._head_name][:size]}
        with set_forward_context(None, self._config, num_tokens=size, slot_mapping=own):
            given = head.input_layernorm(states[:size].contiguous())
            head.self_attn(positions=runner._get_positions(size), hidden_states=given)
