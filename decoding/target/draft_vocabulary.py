"""Drafting from the most frequent tokens only (FR-Spec, arXiv 2502.14856, which ranks by frequency; also EAGLE-3).

A draft computes logits for some rows of the LM head, and the other tokens get a logit so low that their probability is
zero. So everything after it works on the whole vocabulary: the most likely token has its own id, rules see the
distribution over the chosen tokens, and speculative sampling judges by the distribution that was sampled from. The
verification is the whole model's, and stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decoding.target.stand_ins import StandIn

LEFT_OUT = -1e4
"""The logit of other tokens: finite in every precision. If a processor forbids all chosen tokens, a distribution is left."""


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that drafts choose from."""

    token_ids: tuple[int, ...]
    """Ascending."""

    @classmethod
    def of_most_frequent(
        cls, size: int, num_tokens: int, counts: Sequence[int] | None = None
    ) -> DraftVocabulary | None:
        """Return the `size` most frequent of `num_tokens` tokens; None if these are all.

        `counts` are the occurrences of each token id; ids without a count have none. Ties, and all tokens if there are
        no counts, rank by id. Raises `ValueError` for more counts than tokens.
        """
        if counts is not None and len(counts) > num_tokens:
            raise ValueError(f"{len(counts)} token counts are given, but the LM head has {num_tokens} tokens")
        if size >= num_tokens:
            return None
        known = [*(counts or ()), *[0] * (num_tokens - len(counts or ()))]
        ranked = sorted(range(num_tokens), key=lambda token: -known[token])
        return cls(tuple(sorted(ranked[:size])))

    def rows_of(self, lm_head: nn.Linear) -> nn.Linear:
        """Return the rows of an LM head as a layer of its own: a copy of len(token_ids) * hidden numbers."""
        with torch.inference_mode(False), torch.no_grad():
            chosen = torch.tensor(self.token_ids, device=lm_head.weight.device)
            rows = nn.Linear(lm_head.in_features, len(self.token_ids), bias=False, device="meta")
            rows.weight = nn.Parameter(lm_head.weight[chosen], requires_grad=False)
            if "bias" in dict(lm_head.named_parameters()):
                rows.bias = nn.Parameter(lm_head.bias[chosen], requires_grad=False)
        return rows


class DraftLMHead(StandIn):
    """Computes the logits of the chosen tokens by `rows`; the others get `LEFT_OUT`."""

    def __init__(self, lm_head: nn.Linear, rows: nn.Module, token_ids: Tensor) -> None:
        super().__init__(lm_head)
        self.__dict__.update(rows=rows, token_ids=token_ids, num_tokens=lm_head.out_features)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [.., hidden] to logits [.., vocabulary]."""
        chosen = self.rows(hidden_states)
        logits = chosen.new_full((*chosen.shape[:-1], self.num_tokens), LEFT_OUT)
        return logits.index_copy_(-1, self.token_ids, chosen)
