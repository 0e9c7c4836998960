"""How sure a distribution is: its top probability and its entropy, computed on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # draft-length rules, and with them profiles, are read without torch
    from torch import Tensor


def top_probability(log_probabilities: Tensor) -> Tensor:
    """Return the probability [..] of the most likely token, from log probabilities [.., vocabulary]."""
    return log_probabilities.amax(dim=-1).exp()


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return the Shannon entropy [..] in nats, from log probabilities [.., vocabulary]."""
    # exp(-inf) * -inf is nan where a processor has removed a token; its contribution to the entropy is 0.
    return -(log_probabilities.exp() * log_probabilities).nan_to_num(nan=0.0).sum(dim=-1)
