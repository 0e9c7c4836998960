"""Draft passes of a number of requests: their buffers, attention's metadata, and on GPUs their CUDA graphs.

Launching the kernels of a pass one by one takes longer than a small model computes. A graph launches them all at once. It reads and
writes the same buffers each time, so a pass leaves its tokens and positions as the next one needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from decoding.draft_length.contract import entropy, top_probability
from sdtune_vllm.requests import Turn

LARGEST_RECORDED = 64
"""Requests. A pass of more computes for longer than its launches take, and the logits of its graph would be large."""
RECORDABLE = ("FLASH_ATTN", "TRITON_ATTN")
"""Attention backends whose metadata for a draft are the given tensors, so that a graph finds the new values in them."""

Forward = Callable[[Tensor, Tensor], Tensor]
"""Computes logits [requests, vocabulary] from tokens and positions [requests], in a forward context of vLLM."""


class Passes:
    """Greedy draft passes of up to `size` requests, each a row of the buffers.

    Rows that are not used draft at position 0 of vLLM's null block, which no request reads.
    """

    def __init__(self, size: int, runner: Any, config: Any, forward: Forward, *, looks: bool) -> None:
        """Make the buffers; `looks` is True for a rule that looks at the drafts' distributions."""
        self._runner, self._config, self._forward, self._looks = runner, config, forward, looks
        self._limit = config.model_config.max_model_len
        device = runner.device
        self._tokens = torch.zeros(size, dtype=torch.int32, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        tables = [runner.input_batch.block_table[group] for group in range(len(runner.attn_groups))]
        self._block_sizes = [table.block_size for table in tables]
        self._tables = [
            table.get_device_tensor(1).new_zeros(size, table.get_device_tensor(1).shape[1]) for table in tables
        ]
        self._facts = torch.zeros(size, 3 if looks else 1, dtype=torch.float64, device=device)
        self._longest = self._limit  # which a recording keeps
        self._graph: Any = None

    def record(self, pool: Any, target: nn.Module) -> None:
        """Record the pass as a CUDA graph, whose memory is `pool`'s."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with _own_kernels(target):
            with torch.cuda.stream(stream):
                for _ in range(2):  # kernels are compiled and chosen before the recording
                    self._pass()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._pass()
        self._graph = graph

    def begin(self, turns: Sequence[Turn]) -> None:
        """Take these requests into the first rows."""
        held = len(turns)
        starts = [len(turn.request.token_ids) - 1 + len(turn.tokens) for turn in turns]
        last = [(turn.tokens or turn.request.token_ids)[-1] for turn in turns]
        rows, positions, tokens = torch.tensor([[turn.row for turn in turns], starts, last]).to(self._positions.device)
        self._tokens[:held], self._positions[:held] = tokens, positions
        self._tokens[held:].zero_(), self._positions[held:].zero_()
        for group, own in enumerate(self._tables):
            table = self._runner.input_batch.block_table[group].get_device_tensor(self._runner.input_batch.num_reqs)
            own[:held] = table[rows]
            own[held:].zero_()
        self._longest = max(starts) + 1

    def run(self, count: int) -> list[list[tuple[int, float, float]]]:
        """Run `count` passes; return each row's tokens, with top-1 probability and entropy for a rule that looks."""
        passed = list[Tensor]()
        for _ in range(count):
            self._pass() if self._graph is None else self._graph.replay()
            self._longest += 1
            passed.append(self._facts if count == 1 else self._facts.clone())
        rows = torch.stack(passed, dim=1).tolist()  # waits, once
        return [[(int(token), *(known or (1.0, 0.0))) for token, *known in row] for row in rows]

    def _pass(self) -> None:
        metadata, slots = self._metadata()
        with set_forward_context(metadata, self._config, num_tokens=len(self._tokens), slot_mapping=slots):
            logits = self._forward(self._tokens, self._positions)
        chosen = logits.argmax(dim=-1)
        facts = [chosen]
        if self._looks:
            log_probabilities = logits.float().log_softmax(dim=-1)
            facts += [top_probability(log_probabilities), entropy(log_probabilities)]
        self._facts.copy_(torch.stack([fact.double() for fact in facts], dim=-1))
        self._tokens.copy_(chosen)
        self._positions.add_(1).clamp_(max=self._limit - 1)  # rows that are not used go on

    def _metadata(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return attention's metadata and slots by layer, for one token of each row."""
        positions, size = self._positions, len(self._positions)
        starts = torch.arange(size + 1, dtype=torch.int32)
        lengths = (positions + 1).int()
        metadata, slots = dict[str, Any](), dict[str, Any]()
        for groups, blocks, block_size in zip(self._runner.attn_groups, self._tables, self._block_sizes, strict=True):
            block = blocks.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1).long()
            slot = block * block_size + positions % block_size
            common = CommonAttentionMetadata(
                query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=positions.device),
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                num_reqs=size,
                num_actual_tokens=size,
                max_query_len=1,
                max_seq_len=self._longest,
                block_table_tensor=blocks,
                slot_mapping=slot,
                causal=True,
                seq_lens_cpu_upper_bound=torch.full((size,), self._longest, dtype=torch.int32),
            )
            for group in groups:
                built = built_for_draft(group, common)
                for name in group.layer_names:
                    metadata[name], slots[name] = built, slot
        return metadata, slots


def recorded_sizes(runner: Any, config: Any) -> list[int]:
    """Return for how many requests passes are recorded, largest first; none where vLLM or its backend rules that out."""
    compilation, speculative = config.compilation_config, config.speculative_config
    groups = [group for groups in runner.attn_groups for group in groups]
    if (
        config.device_config.device_type != "cuda"
        or not compilation.cudagraph_mode.has_full_cudagraphs()
        or speculative.enforce_eager
        or any(group.backend.get_name() not in RECORDABLE for group in groups)
        or any(getattr(group, "kernel_block_size", None) is not None for group in groups)
    ):
        return []
    most = min(LARGEST_RECORDED, config.scheduler_config.max_num_seqs)
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(1 << (sizes[-1] - 1).bit_length() - 1)
    return sizes


def built_for_draft(group: Any, common: Any) -> Any:
    """Return a group's metadata for a draft; the method is the group's own from 0.32 on."""
    if hasattr(group, "build_metadata_for_drafting"):
        return group.build_metadata_for_drafting(common, 0)
    return group.get_metadata_builder().build_for_drafting(common_attn_metadata=common, draft_index=0)


@contextmanager
def _own_kernels(target: nn.Module) -> Iterator[None]:
    """Have the target's modules call vLLM's kernels; in a model that vLLM compiles, they otherwise run PyTorch's operations."""
    from vllm.ir import ops
    from vllm.model_executor.custom_op import CustomOp

    with ExitStack() as stack:
        for module in target.modules():
            if isinstance(module, CustomOp):
                stack.callback(setattr, module, "_forward_method", module._forward_method)
                module._forward_method = module.forward_cuda
        for name in ("rms_norm", "fused_add_rms_norm"):
            if (op := getattr(ops, name, None)) is not None and "vllm_c" in op.impls:
                stack.enter_context(op.set_priority(["vllm_c", "native"]))
        yield
