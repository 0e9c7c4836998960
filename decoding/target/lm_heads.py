"""The LM head as a target's passes call it: whole, for greedy choices only, quantised, the rows of a draft's vocabulary.

A quantised draft may choose from the most frequent tokens only (FR-Spec, arXiv 2502.14856, which ranks by frequency). It
then computes logits for some rows of the LM head, and the other tokens get a logit so low that their probability is
zero. So everything after it works on the whole vocabulary: the most likely token has its own id, rules see the
distribution over the chosen tokens, and speculative sampling judges by the distribution that was sampled from. The
verification is the whole model's, and stays exact. The tokens of the text join the frequent ones (`TextRows`, our formulation):
what a text has said it says again, and its own names and words are the rare tokens that it needs.

An LM head of all tokens has exact logits for the likeliest ones in a quantised draft (`decoding.kernels.choice.quantised_lm_head`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.errors import UnsupportedModelError
from decoding.kernels.choice import can_choose, choosing_lm_head, quantised_linear, quantised_lm_head
from decoding.kernels.quantised import TiledLinear
from decoding.runners.contract import BlockCall
from decoding.runners.eager import EagerRunner
from decoding.target.linears import QuantisedLayers, is_plain_linear, with_fast_linears
from decoding.target.stand_ins import Emit, FixedShapesLMHead, PassState, StandIn
from decoding.target.weights import ModelWeights

LEFT_OUT = -1e4
"""The logit of other tokens: finite in every precision. If a processor forbids all chosen tokens, a distribution is left."""

TEXT_SLOTS = 1024
"""Different tokens of a text, beside the frequent ones, that drafts choose from: the latest of a longer text."""


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that drafts choose from: those with ids below `end`, most frequent in usual tokenizers, and some of the text."""

    end: int
    num_slots: int
    """Number of tokens of the text that may join them; see `TextRows`."""

    @classmethod
    def below(cls, end: int, num_tokens: int | None) -> DraftVocabulary | None:
        """Return the vocabulary; None if it has all of `num_tokens`, which are unknown where an LM head has no plain rows."""
        return cls(end, TEXT_SLOTS) if num_tokens is None or end < num_tokens else None

    def rows_of(self, lm_head: nn.Linear) -> nn.Linear:
        """Return the rows of an LM head as a layer of its own: a copy of (end + num_slots) * hidden numbers."""
        with torch.inference_mode(False), torch.no_grad():
            chosen = torch.tensor([*range(self.end), *[0] * self.num_slots], device=lm_head.weight.device)
            rows = nn.Linear(lm_head.in_features, len(chosen), bias=False, device="meta")
            rows.weight = nn.Parameter(lm_head.weight[chosen], requires_grad=False)
            if "bias" in dict(lm_head.named_parameters()):
                rows.bias = nn.Parameter(lm_head.bias[chosen], requires_grad=False)
        return rows


class DraftLMHead(StandIn):
    """Computes the logits of the chosen `token_ids` by `rows`; the others get `LEFT_OUT`.

    Rows whose token is the one after the last of the vocabulary have none.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        chosen, num_tokens = self.rows(hidden_states), self.block.out_features
        logits = chosen.new_full((*chosen.shape[:-1], num_tokens + 1), LEFT_OUT)
        return logits.index_copy_(-1, self.token_ids, chosen)[..., :num_tokens]


class TextRows:
    """The last rows of a quantised LM head, which are filled with those of the text's tokens while it is decoded.

    Passes read them where they are. Sequences that share passes share the slots; others find them empty.
    """

    def __init__(self, own: nn.Linear, rows: TiledLinear, token_ids: Tensor, vocabulary: DraftVocabulary) -> None:
        self._own, self._rows, self._token_ids = own, rows, token_ids
        self._first = vocabulary.end
        self._num_slots = vocabulary.num_slots
        self._slots: dict[int, int] = {}
        """The slot of each token that has one, the oldest first."""
        self._batch: weakref.ref[object] | None = None
        self._num_read = WeakKeyDictionary[object, int]()
        """Number of tokens of each text that have been looked at."""
        self._lock = threading.Lock()
        """Threads that decode with one view take the slots from each other, which costs accepted drafts and no more."""

    def follow(self, text: object, batch: object, token_ids: Sequence[int]) -> None:
        """Fill slots with the new tokens of `text`, which is now `token_ids`; empty them first unless `batch` filled them."""
        with self._lock:
            if self._batch is None or self._batch() is not batch:
                self._empty()
                self._batch = weakref.ref(batch)
            num_read = self._num_read.get(text, 0)
            if num_read < len(token_ids):
                self._num_read[text] = len(token_ids)
                self._fill(token_ids[num_read:])

    def _empty(self) -> None:
        self._num_read.clear()
        self._slots.clear()
        self._token_ids[self._first :] = self._own.out_features

    def _fill(self, token_ids: Sequence[int]) -> None:
        # A model may embed tokens, such as those of images, that its LM head cannot write.
        writable = (token for token in dict.fromkeys(token_ids) if token < self._own.out_features)
        unknown = [token for token in writable if token >= self._first and token not in self._slots]
        if not (new := unknown[-self._num_slots :]):
            return
        for token in new:
            is_full = len(self._slots) == self._num_slots
            self._slots[token] = self._slots.pop(next(iter(self._slots))) if is_full else len(self._slots)
        chosen, rows = torch.tensor([new, [self._slots[token] for token in new]], device=self._token_ids.device)
        bias = None if self._own.bias is None else self._own.bias[chosen]
        self._rows.replace_rows(rows + self._first, self._own.weight[chosen], bias)
        self._token_ids[rows + self._first] = chosen


@dataclass(frozen=True, slots=True)
class LMHead:
    """The LM head of a part: its name, its replacement, and how that is called on one position of a fixed-shape pass."""

    name: str
    own: nn.Linear
    """The model's own."""
    module: nn.Module
    """Its replacement, or the rows of it that a draft computes."""
    call: BlockCall | None
    """None if it is called like any module."""
    token_ids: Tensor | None = None
    """[rows]: the tokens of these rows; None if they are all."""
    text_rows: TextRows | None = None
    """Those of the rows that follow the text."""
    choosing: nn.Module | None = None
    """Takes the place of `module` where only the most likely token is read; see `decoding.kernels.choice.choosing_lm_head`."""

    def stand_in(self, current: PassState) -> nn.Module:
        """Return the module in the LM head's place."""
        module = self.module
        if self.call is not None:
            module = FixedShapesLMHead(module, current=current, call=self.call, choosing=self.choosing)
        return module if self.token_ids is None else DraftLMHead(self.own, rows=module, token_ids=self.token_ids)


def find_lm_head(model: nn.Module) -> str | None:
    """Return the attribute name of the model's own linear LM head, or None."""
    lm_head = getattr(model, "get_output_embeddings", lambda: None)()
    children = model.named_children() if type(lm_head) is nn.Linear else ()
    return next((name for name, child in children if child is lm_head), None)


class LMHeads:
    """The LM heads of one target. None stands for the model's own, called as the model does."""

    def __init__(
        self,
        model: PreTrainedModel,
        runner: EagerRunner,
        weights: ModelWeights,
        quantised: QuantisedLayers,
        logits_by: Callable[[str, nn.Module], Tensor],
    ) -> None:
        """`logits_by` returns the model's logits with another LM head of that name."""
        self._model, self._runner, self._weights, self._quantised = model, runner, weights, quantised
        self._logits_by = logits_by

    @property
    def num_rows(self) -> int | None:
        """Number of rows, from which drafts may choose some; None if the LM head is not a plain linear layer."""
        name = find_lm_head(self._model)
        return None if name is None else getattr(self._model, name).out_features

    @cached_property
    def whole(self) -> LMHead | None:
        """The LM head for fixed-shape passes on a CPU. None elsewhere: on a GPU recording makes calls cheap."""
        call, name = self._runner.block_call, find_lm_head(self._model)
        if call is None or name is None or self._model.get_input_embeddings().weight.device.type != "cpu":
            return None
        own = getattr(self._model, name)
        fast = with_fast_linears(own)
        return LMHead(name, own, fast, call, choosing=self._choosing(name, own))

    def _choosing(self, name: str, own: nn.Linear) -> nn.Module | None:
        """Return the LM head for passes of which only the most likely token is read, if there is one."""
        if not is_plain_linear(own) or not can_choose(own):
            return None
        # A model that caps its logits may make different ones equal, of which the first would be chosen.
        known = torch.linspace(-1000, 1000, own.out_features, dtype=own.weight.dtype).view(1, 1, -1)
        if not torch.equal(self._logits_by(name, Emit(own, states=known, num_outputs=0)), known):
            return None
        return self._weights.copied(partial(choosing_lm_head, own))

    def of_drafts(self, vocabulary: DraftVocabulary | None, bits: int | None) -> LMHead | None:
        """Return the LM head of drafts: all of it, or, with quantised weights, the rows for a vocabulary."""
        return self.whole if bits is None else self.quantised(vocabulary, bits)

    def quantised(self, vocabulary: DraftVocabulary | None, bits: int) -> LMHead | None:
        """Return the LM head for drafts in `bits`; as it is if it is not a plain linear layer.

        Raises `UnsupportedModelError` for a vocabulary then.
        """
        name, call = find_lm_head(self._model), None if self.whole is None else self.whole.call
        if vocabulary is None:
            if name is None or not is_plain_linear(own := getattr(self._model, name)):
                return self.whole
            packed = self._quantised.layer(lambda: own, bits, ("LM head", None), quantised_lm_head)
            return LMHead(name, own, packed, call)
        if name is None:
            raise UnsupportedModelError("drafts from fewer tokens need a model whose LM head is a plain linear layer")
        own = getattr(self._model, name)
        # Rows that follow a text belong to one view.
        packed = self._quantised.layer(partial(vocabulary.rows_of, own), bits, ("LM head", object()), quantised_linear)
        rows = [*range(vocabulary.end), *[own.out_features] * vocabulary.num_slots]
        token_ids = torch.tensor(rows, device=own.weight.device)
        text_rows = TextRows(own, cast(TiledLinear, packed), token_ids, vocabulary)
        return LMHead(name, own, packed, call, token_ids, text_rows)
