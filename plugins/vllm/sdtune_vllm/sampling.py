"""vLLM's rejection sampler on a CPU, mended in a process that drafts by this plugin.

In 0.31 and 0.32 the CPU counterpart of its kernel `expand_kernel` writes into a copy of its output. Temperature, `top_k` and
`top_p` of drafted tokens are then whatever the memory held: drafts of any method change what is sampled, or end the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdtune_vllm import differs

CHANGED = {
    "expand_batch_to_tokens": ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    "apply_top_k_top_p": ("logits", "k", "p"),
}
"""Functions that are replaced, and their parameters."""


def mend(sampler: Any) -> str | None:
    """Change the module `vllm.v1.sample.rejection_sampler`, once; return why it does not fit, or None."""
    for name, parameters in CHANGED.items():
        if (reason := differs(sampler, name, parameters)) is not None:
            return reason
    if sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return None
    restrict = sampler.apply_top_k_top_p

    def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
        # A step that only reads prompts has no drafts, and vLLM takes the maximum of no values there.
        return restrict(logits, k, p) if len(logits) else logits

    sampler.expand_batch_to_tokens, sampler.apply_top_k_top_p = expand_batch_to_tokens, apply_top_k_top_p
    return None


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat each request's value, [requests], for each of its tokens, [num_tokens]; `cu_num_tokens` holds cumulative counts."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
