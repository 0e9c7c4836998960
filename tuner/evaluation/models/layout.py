"""The layout of a trained model inside a wide one: where each of its coordinates and layers is, and what is silenced."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig

from tuner.evaluation.models.widths import Widths

SILENT_OUTSIDE = frozenset({"embed_tokens", "o_proj", "down_proj"})
FINAL_NORM, TOKEN_NORM, JOIN = "norm", "token_norm", "join"
NORMS = frozenset({"input_layernorm", "post_attention_layernorm", FINAL_NORM, "state_norm", TOKEN_NORM})
PADDING_GAIN = 64.0
"""Gain of the constant dimension in the final norm."""
GAINS = {FINAL_NORM: PADDING_GAIN, TOKEN_NORM: 1.0}
"""Gain of the constant dimension by norm; 0 in all others."""
PADDING_PUSH = 2048.0
"""Logits that padding tokens lie below the mean of the others if the trained hidden states have a root mean square of 1.

The last states of the demo model reach 120. Far lower logits would be the largest of all in absolute value, and comparisons
of logits relative to the largest one would then overlook differences.
"""


@dataclass(frozen=True)
class ConstantDimension:
    """An added dimension of the hidden states with the same value at each position, for a padded vocabulary.

    The norms of the blocks have gain 0 for it, so no block sees it. Its square is a constant summand of the mean square
    in each RMSNorm, which a smaller epsilon makes up for.
    """

    index: int
    value: float
    """A power of two, so that no precision rounds it."""

    @classmethod
    def of(cls, narrow: LlamaConfig, wide: Widths) -> ConstantDimension | None:
        """Return the dimension, or None if the vocabulary is not padded.

        Its square takes at most half of what the epsilon of the source adds to the sum of squares.
        """
        if wide.vocab_size == narrow.vocab_size:
            return None
        room = narrow.rms_norm_eps * narrow.hidden_size / 2
        return cls(narrow.hidden_size, 2.0 ** math.floor(math.log2(room) / 2))


def wide_epsilon(narrow: LlamaConfig, wide: Widths) -> float:
    """Return the RMSNorm epsilon of the wide model."""
    constant = ConstantDimension.of(narrow, wide)
    taken = constant.value**2 if constant else 0.0
    return (narrow.rms_norm_eps * narrow.hidden_size - taken) / wide.hidden_size


@dataclass(frozen=True)
class LayerMap:
    """The trained layers among the layers of a deeper model, spread evenly; the added ones compute the identity."""

    num_trained: int
    num_layers: int

    def depth(self, num_trained: int) -> int:
        """Return the number of layers of the deep model that hold the first `num_trained` trained ones.

        An exit after them is as deep, relative to the whole model, as it was in the trained model.
        """
        return num_trained * self.num_layers // self.num_trained

    @property
    def trained(self) -> dict[int, int]:
        """The trained layer by layer of the deep model; added layers are missing."""
        return {self.depth(index): index for index in range(self.num_trained)}


class Layout:
    """Positions of a narrow model's coordinates in a wide one."""

    def __init__(self, narrow: LlamaConfig, wide: LlamaConfig, device: torch.device) -> None:
        source, target = Widths.of(narrow), Widths.of(wide)
        self.layers = LayerMap(source.num_hidden_layers, target.num_hidden_layers)
        self._constant = ConstantDimension.of(narrow, target)
        self._vocabulary = source.vocab_size
        self.gain = (source.hidden_size / target.hidden_size) ** 0.5
        self.query_gain = (target.head_dim / source.head_dim) ** 0.5
        heads = range(source.num_attention_heads)
        group_size = source.group_size
        query_heads = [head // group_size * target.group_size + head % group_size for head in heads]
        inside = _inside_head(source.head_dim, target.head_dim)

        def at(indices: Tensor) -> Tensor:
            return indices.to(device)

        def of_heads(indices: list[int], dims: Tensor) -> Tensor:
            return at((torch.tensor(indices)[:, None] * target.head_dim + dims).flatten())

        hidden = at(torch.arange(source.hidden_size))
        neurons = at(torch.arange(source.intermediate_size))
        vocabulary = at(torch.arange(narrow.vocab_size))
        queries = of_heads(query_heads, inside)
        keys = of_heads(list(range(source.num_key_value_heads)), inside)
        self.hidden = hidden
        self.whole_query_heads = of_heads(query_heads, torch.arange(target.head_dim))
        self._rows_and_columns = {
            "embed_tokens": (vocabulary, hidden),
            "lm_head": (vocabulary, hidden),
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (neurons, hidden),
            "up_proj": (neurons, hidden),
            "down_proj": (hidden, neurons),
        }

    def source_name(self, name: str) -> str | None:
        """Return the narrow model's name of the wide model's parameter `name`, or None in an added layer."""
        head, layers, rest = name.partition("layers.")
        if not layers:
            return name
        index, _, inside = rest.partition(".")
        trained = self.layers.trained.get(int(index))
        return None if trained is None else f"{head}layers.{trained}.{inside}"

    @torch.no_grad()
    def silence(self, name: str, wide: Tensor) -> None:
        """Make the parameter `name` part of a layer that adds nothing to the hidden states."""
        module = name.split(".")[-2]
        if module in SILENT_OUTSIDE:
            wide.zero_()
        elif module in NORMS and self._constant:
            wide[self._constant.index] = 0

    @torch.no_grad()
    def embed(self, name: str, wide: Tensor, narrow: Tensor) -> None:
        """Write the parameter `name` of the narrow model into the wide model's, which holds random values."""
        module, kind = name.split(".")[-2:]
        if module in NORMS:
            wide[self.hidden] = _like(wide, narrow.float() * self.gain)
            if self._constant:
                wide[self._constant.index] = GAINS.get(module, 0.0)
            return
        rows, columns = self._rows_and_columns[module]
        if kind == "bias":
            wide, narrow, columns = wide[:, None], narrow[:, None], columns[:1]
        if module in SILENT_OUTSIDE:
            wide.zero_()
        if module == "q_proj":
            wide[self.whole_query_heads[:, None], columns] = 0
            narrow = narrow.float() * self.query_gain
        wide[rows[:, None], columns] = _like(wide, narrow)
        if self._constant and module in ("embed_tokens", "lm_head"):
            self._pad_vocabulary(module, wide, narrow, self._constant)

    @torch.no_grad()
    def embed_join(self, wide: Tensor, narrow: Tensor, token_size: float) -> None:
        """Write the layer that joins a feature head's inputs: `wide` [H, 2 H] of the wide head, `narrow` [h, 2 h].

        `token_size` is the root mean square of the narrow model's token embeddings. The constant dimension comes out of the token's
        embedding, nearly as large as it went in: the embedding is normalised by its own size.
        """
        size = wide.shape[0]
        wide.zero_()
        wide[self.hidden[:, None], torch.cat([self.hidden, size + self.hidden])] = _like(wide, narrow)
        if self._constant:
            wide[self._constant.index, size + self._constant.index] = token_size * self.gain

    def _pad_vocabulary(self, module: str, wide: Tensor, narrow: Tensor, constant: ConstantDimension) -> None:
        """Fill the rows of padding tokens: a logit below the mean of all others, and the embeddings of trained tokens."""
        size, hidden = self._vocabulary, narrow.shape[1]
        if module == "embed_tokens":
            padding = torch.arange(size, wide.shape[0], device=wide.device) % size
            wide[size:, :hidden] = _like(wide, narrow)[padding]
            wide[:, constant.index] = constant.value
        else:
            wide[size:, :hidden] = _like(wide, narrow.float().mean(0))
            wide[:size, constant.index] = 0
            wide[size:, constant.index] = -PADDING_PUSH * self.gain / (PADDING_GAIN * constant.value)


def _inside_head(narrow: int, wide: int) -> Tensor:
    """Return the dimensions of a wide head that rotate at a narrow head's frequencies; pairs are half a head apart."""
    pairs = torch.arange(narrow // 2) * (wide // narrow)
    return torch.cat([pairs, pairs + wide // 2])


def _like(wide: Tensor, values: Tensor) -> Tensor:
    return values.to(wide.device, wide.dtype)
