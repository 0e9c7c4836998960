"""The LM head as a target's passes call it: whole, the rows of a draft's vocabulary, quantised."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from weakref import WeakValueDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from decoding.errors import UnsupportedModelError
from decoding.runners.eager import EagerRunner
from decoding.target.draft_vocabulary import DraftVocabulary
from decoding.target.parts import LMHead, find_lm_head, with_fast_linears
from decoding.target.quantised import QuantisedLayers, is_plain_linear
from decoding.target.weights import Make, ModelWeights


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

    @cached_property
    def _runners_vocabulary(self) -> DraftVocabulary | None:
        features, num_rows = self._runner.features, self.num_rows
        if features.draft_vocabulary is None or num_rows is None:
            return None
        return DraftVocabulary.of_most_frequent(features.draft_vocabulary, num_rows, features.token_counts)

    def of_drafts(self, vocabulary: DraftVocabulary | None, bits: int | None) -> LMHead | None:
        """Return the LM head of drafts: all of it, or the rows for a vocabulary; quantised if `bits` are given.

        Without a vocabulary the runner's counts, if it has one.
        """
        vocabulary = vocabulary or self._runners_vocabulary
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
