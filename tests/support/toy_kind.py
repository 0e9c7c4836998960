"""A draft kind in one file: document, drafter and predictor. `TOY` is its entry in the registry."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.decode import Request
from decoding.draft_length import Controller, DraftLengthRule
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafts import DraftDocument, DraftKind
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.contract import Outputs
from decoding.target import Target
from decoding.text import TokenSequence
from studies.prediction.predictor import Predictor
from studies.prediction.predictors import DraftPredictor, Prediction


class Cycle(DraftDocument):
    """Repeat the last `period` tokens."""

    kind: Literal["cycle"] = "cycle"
    period: int = Field(1, ge=1, le=64, description="number of tokens to repeat")

    @property
    def name(self) -> str:
        return "cycle"

    @property
    def phrase(self) -> str:
        return f"cycle of {self.period}"

    @property
    def own_columns(self) -> dict[str, Any]:
        return {"period": self.period}


def cycle(text: TokenSequence, num_tokens: int, period: int) -> list[int] | None:
    """Return the next tokens if the sequence repeats with this period, or None if it is too short."""
    last = text.token_ids[-period:]
    return [last[index % period] for index in range(num_tokens)] if len(last) == period else None


class CycleDrafter(Drafter):
    def __init__(self, target: Target, period: int) -> None:
        self._target, self._period = target, period

    def prefill(self, text: TokenSequence, cache: KVCache) -> Tensor:
        return self._target.forward(text.span(0, text.length), cache, 0, last_only=True)

    def draft(
        self, text: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        tokens = cycle(text, controller.length_of_copy(limit), self._period) if limit > 0 else None
        if tokens is None:
            return Proposal(0, None, steered=False)
        text.write_drafts(tokens)
        return Proposal(len(tokens), None, looked_up=True)

    def verify(self, text: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        token_ids = text.span(cache.length, text.length + draft.num_tokens)
        return self._target.run(self._target.whole, token_ids, cache, cache.length)


def new_drafter(target: Target, draft: Cycle, decoding: Decoding, *, heads: HeadFolder | None) -> CycleDrafter:
    return CycleDrafter(target, draft.period)


class CyclePredictor(DraftPredictor[Cycle]):
    def predict(self, draft: Cycle, rule: DraftLengthRule, known: Predictor) -> Prediction:
        return known.replay_guesses(draft, rule, partial(cycle, period=draft.period))


TOY = DraftKind(Cycle, "tests.support.toy_kind:new_drafter", "tests.support.toy_kind:CyclePredictor")
