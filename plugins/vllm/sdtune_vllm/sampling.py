"""vLLM's rejection sampler on a CPU, mended in a process that drafts by this plugin.

In 0.31 and 0.32 the CPU counterpart of its kernel `expand_kernel` writes into a copy of its output. Temperature, `top_k` and
`top_p` of drafted tokens are then whatever the memory held: drafts of any method change what is sampled, or end the engine.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

EXPANDING = ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")
"""Parameters of `expand_batch_to_tokens`."""


def mend(sampler: Any) -> str | None:
    """Change the module `vllm.v1.sample.rejection_sampler`, once; return why it does not fit, or None."""
    if sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return None
    restrict = sampler.apply_top_k_top_p
    if tuple(inspect.signature(sampler.expand_batch_to_tokens).parameters) != EXPANDING:
        return "vLLM's expand_batch_to_tokens has other parameters than in the versions that this plugin was run with"

    def apply_top_k_top_p(logits: Tensor, *limits: Tensor | None) -> Tensor:
        # The largest of no values is an error: a prompt's step has no drafts.
        return restrict(logits, *limits) if len(logits) else logits

    sampler.expand_batch_to_tokens, sampler.apply_top_k_top_p = expand_batch_to_tokens, apply_top_k_top_p
    return None


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat the values of requests, [requests], for each of their tokens, [num_tokens]; `cu_num_tokens` counts these up."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
