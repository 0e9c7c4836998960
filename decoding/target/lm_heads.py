"""The LM head as a target's passes call it: whole, the rows of a draft's vocabulary, quantised.

Drafts may choose from the most frequent tokens only (FR-Spec, arXiv 2502.14856, which ranks by frequency; also EAGLE-3). A
draft then computes logits for some rows of the LM head, and the other tokens get a logit so low that their probability is
zero. So everything after it works on the whole vocabulary: the most likely token has its own id, rules see the
distribution over the chosen tokens, and speculative sampling judges by the distribution that was sampled from. The
verification is the whole model's, and stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.errors import UnsupportedModelError
from decoding.runners.contract import BlockCall
from decoding.runners.eager import EagerRunner
from decoding.target.linears import QuantisedLayers, is_plain_linear, with_fast_linears
from decoding.target.stand_ins import FixedShapesLMHead, PassState, StandIn
from decoding.target.weights import Make, ModelWeights

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
    """Computes the logits of the chosen `token_ids` by `rows`; the others get `LEFT_OUT`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        chosen = self.rows(hidden_states)
        logits = chosen.new_full((*chosen.shape[:-1], self.block.out_features), LEFT_OUT)
        return logits.index_copy_(-1, self.token_ids, chosen)


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

    def stand_in(self, current: PassState) -> nn.Module:
        """Return the module in the LM head's place."""
        module = self.module if self.call is None else FixedShapesLMHead(self.module, current=current, call=self.call)
        return module if self.token_ids is None else DraftLMHead(self.own, rows=module, token_ids=self.token_ids)


def find_lm_head(model: nn.Module) -> str | None:
    """Return the attribute name of the model's own linear LM head, or None."""
    lm_head = getattr(model, "get_output_embeddings", lambda: None)()
    children = model.named_children() if type(lm_head) is nn.Linear else ()
    return next((name for name, child in children if child is lm_head), None)


class LMHeads:
    """The LM heads of one target. None stands for the model's own, called as the model does."""

    def __init__(
        self, model: PreTrainedModel, runner: EagerRunner, weights: ModelWeights, quantised: QuantisedLayers
    ) -> None:
        self._model, self._runner, self._weights, self._quantised = model, runner, weights, quantised
        # Weak: rows are copies of weights, and are not to outlive the views that draft from them.
        self._rows = WeakValueDictionary[DraftVocabulary, nn.Module]()
        self._fast_rows = WeakValueDictionary[DraftVocabulary, nn.Module]()

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
        return LMHead(name, own, with_fast_linears(own, self._weights.copied), call)

    def of_drafts(self, vocabulary: DraftVocabulary | None, bits: int | None) -> LMHead | None:
        """Return the LM head of drafts: all of it, or the rows for a vocabulary; quantised if `bits` are given."""
        if bits is not None:
            return self.quantised(vocabulary, bits)
        return self.whole if vocabulary is None else self._narrow(vocabulary)

    def quantised(self, vocabulary: DraftVocabulary | None, bits: int) -> LMHead | None:
        """Return the LM head with weights of `bits`; as it is if it is not a plain linear layer."""
        name = find_lm_head(self._model)
        if vocabulary is not None:
            rows = self.rows_for(vocabulary)
            linear: Make = partial(vocabulary.rows_of, rows.own)  # not the rows themselves, which need not stay
        elif name is not None and is_plain_linear(own := getattr(self._model, name)):
            rows, linear = LMHead(name, own, own, None), lambda: own
        else:
            return self.whole
        packed = self._quantised.layer(linear, bits, ("LM head", vocabulary))
        return replace(rows, module=packed, call=None if self.whole is None else self.whole.call)

    def _narrow(self, vocabulary: DraftVocabulary) -> LMHead:
        """Return the rows of the LM head for `vocabulary` as this target's runner calls them."""
        narrow = self.rows_for(vocabulary)
        if self.whole is None:
            return narrow
        fast = self._fast_rows.get(vocabulary)
        if fast is None:
            fast = with_fast_linears(narrow.module, self._weights.copied)
            self._fast_rows[vocabulary] = fast
        return replace(narrow, module=fast, call=self.whole.call)

    def rows_for(self, vocabulary: DraftVocabulary) -> LMHead:
        """Return the rows of the LM head for `vocabulary`; raise `UnsupportedModelError` if it has no plain rows."""
        name = find_lm_head(self._model)
        if name is None:
            raise UnsupportedModelError("drafts from fewer tokens need a model whose LM head is a plain linear layer")
        own, rows = getattr(self._model, name), self._rows.get(vocabulary)
        if rows is None:
            self._rows[vocabulary] = rows = self._weights.copied(partial(vocabulary.rows_of, own))
        return LMHead(name, own, rows, None, torch.tensor(vocabulary.token_ids, device=own.weight.device))
