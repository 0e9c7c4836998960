"""What any draft would cost on one device, foretold from a short measurement: thousands of skip sets are rated without running.

A prediction chooses what to measure; it is never reported as a measurement. The passes and their terms are those of
`studies.costs.terms`, the fit is `studies.costs.fit`'s, and `tuner.measuring.cost_table` does the timing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from decoding.documents.strict_yaml import Document
from decoding.draft_length import RoundCosts
from decoding.drafts import Draft, LayerSkip
from decoding.timing.round_costs import LEAST_COST
from studies.costs.terms import BlockKinds, DraftStep, Pass, Terms, Vector, Verification

SublayerKind = Literal["attention", "mlp"]
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
ByContext = tuple[Seconds, ...]


class TermSeconds(Document):
    """Seconds of each term of `studies.costs.terms.Terms`."""

    rest: tuple[ByContext, ...] = Field(
        description="by width: a pass but for its blocks (embedding, norm, head, dispatch)"
    )
    frame: tuple[Seconds, ...] = Field(description="by kind: what a block costs while any part of it runs")
    attention: tuple[ByContext, ...] = Field(description="by kind: an attention sublayer over one token")
    mlp: tuple[Seconds, ...] = Field(description="by kind: an MLP sublayer over one token")
    wider: tuple[tuple[ByContext, ...], ...] = Field(
        description="by kind and by width from the second on: what a block costs beyond one token"
    )
    narrowed: Seconds = Field(description="what a block costs beyond one token's if it takes the last of several")
    choice: Seconds = Field(description="what a draft step costs beyond its pass: choosing the token, and keeping it")
    look: Seconds = Field(description="what it costs beyond that if a rule looks at the distribution")


class CostError(Document):
    """Relative errors of predicting passes that the fit has not seen."""

    median: Seconds
    worst: Seconds
    num_passes: int = Field(ge=1)


class CostTable(Document):
    """Fitted seconds of the parts of a model on one device; see `tuner.measuring.cost_table.measure_cost_table`.

    `context` is the number of tokens in front of a pass. Costs between measured widths and contexts lie on straight lines, and
    the last of these goes on beyond the last point. A prompt lookup in front of a draft is left out of account. All methods
    raise ValueError for layers that the model does not have and for drafts that run no part of the model.
    """

    kinds: BlockKinds
    widths: tuple[int, ...] = Field(min_length=2)
    contexts: tuple[int, ...] = Field(min_length=1)
    seconds: TermSeconds
    error: CostError

    @model_validator(mode="after")
    def _shapes_agree(self) -> CostTable:
        for name, points in {"widths": self.widths, "contexts": self.contexts}.items():
            if list(points) != sorted(set(points)) or points[0] < 1:
                raise ValueError(f"{name} must ascend from 1 or more, got {points}")
        if self.widths[0] != 1:
            raise ValueError(f"the first width must be 1, got {self.widths[0]}")
        given = self.seconds.model_dump()
        for name, shape in self._terms.shapes.items():
            if 0 not in shape and np.shape(given[name]) != shape:
                raise ValueError(f"seconds of {name} must have the shape {shape}, got {np.shape(given[name])}")
        return self

    def draft_seconds(self, draft: Draft, *, context: float) -> float:
        """Seconds of one draft step, the choice of its token included."""
        return self._predict(DraftStep(self._skipped(draft), context, has_head=draft.has_head))

    def verify_seconds(self, draft: Draft, num_drafted: int, *, context: float, prefix_reuse: bool) -> float:
        """Seconds of verifying `num_drafted` tokens. With `prefix_reuse` the blocks in front of the first that the draft computes
        otherwise take the last token alone, unless nothing was drafted, so that no states are known."""
        if num_drafted < 0:
            raise ValueError(f"a round drafts 0 tokens or more, got {num_drafted}")
        skip = self._skipped(draft)
        boundary = (skip.first_skipped or 0) if prefix_reuse and num_drafted else 0
        return self._predict(Verification(num_drafted + 1, context, boundary))

    def plain_seconds(self, *, context: float) -> float:
        """Seconds of a pass of the whole model over one token: what plain decoding takes for each."""
        return self._predict(Verification(1, context))

    def round_costs(self, draft: Draft, max_tokens: int, *, context: float, prefix_reuse: bool) -> RoundCosts:
        """Costs of drafting up to `max_tokens` tokens, in plain passes: what `measure_round_costs` would find.

        ValueError also if `max_tokens` is below 1.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        plain = self.plain_seconds(context=context)
        verify = (
            self.verify_seconds(draft, num_drafted, context=context, prefix_reuse=prefix_reuse)
            for num_drafted in range(max_tokens + 1)
        )
        return RoundCosts(
            draft_step=_cost(self.draft_seconds(draft, context=context), plain),
            look=self.seconds.look / plain if plain else 0.0,
            verify=tuple(_cost(seconds, plain) for seconds in verify),
        )

    def sublayer_seconds(self, index: int, kind: SublayerKind, *, context: float) -> float:
        """Seconds that leaving out this sublayer takes off a draft step while the other one of its block still runs.

        ValueError for a block without such a module.
        """
        one = LayerSkip(skip_attention=(index,)) if kind == "attention" else LayerSkip(skip_mlp=(index,))
        return self.draft_seconds(LayerSkip(), context=context) - self.draft_seconds(one, context=context)

    def block_seconds(self, index: int, *, context: float) -> float:
        """Seconds that leaving out this block takes off a draft step: its sublayers and what frames them."""
        skipped = self.draft_seconds(LayerSkip.blocks((index,)), context=context)
        return self.draft_seconds(LayerSkip(), context=context) - skipped

    def covers(self, widths: Iterable[int], contexts: Iterable[int]) -> bool:
        """Whether all of these lie within what was measured."""
        asked = list(contexts)
        return max(widths) <= self.widths[-1] and self.contexts[0] <= min(asked) and max(asked) <= self.contexts[-1]

    def describe(self) -> str:
        """One line for the console."""
        context = self.contexts[len(self.contexts) // 2]
        shown = {"a pass takes": self.plain_seconds(context=context), "a block": self._mean_block_seconds(context)}
        parts: tuple[tuple[str, SublayerKind, tuple[int | None, ...]], ...] = (
            ("attention", "attention", self.kinds.attention),
            ("MLP", "mlp", self.kinds.mlp),
        )
        for name, kind, kinds in parts:
            places = [index for index, number in enumerate(kinds) if number is not None]
            if places:
                each = [self.sublayer_seconds(index, kind, context=context) for index in places]
                shown[name] = float(np.mean(each))
        times = ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in shown.items())
        error = self.error
        return (
            f"{times}; predicted within {100 * error.median:.1f} % (median, worst {100 * error.worst:.0f} %) on "
            f"{error.num_passes} held-out passes"
        )

    def _skipped(self, draft: Draft) -> LayerSkip:
        """Return what a draft skips. Raises ValueError unless the model can run it."""
        skip = draft.skipped(self.kinds.num_layers)
        draft.check(self.kinds.num_layers)
        self.kinds.check(skip)
        return skip

    def _mean_block_seconds(self, context: float) -> float:
        layers = range(self.kinds.num_layers)
        return float(np.mean([self.block_seconds(index, context=context) for index in layers]))

    @cached_property
    def _terms(self) -> Terms:
        return Terms(self.kinds, self.widths, self.contexts)

    @cached_property
    def _values(self) -> Vector:
        given = self.seconds.model_dump()
        return np.concatenate([np.ravel(np.asarray(given[name], dtype=float)) for name in self._terms.shapes])

    def _predict(self, each: Pass) -> float:
        return float(self._terms.amounts(each) @ self._values)


def _cost(seconds: float, plain: float) -> float:
    return max(seconds / plain, LEAST_COST) if plain else 1.0  # a clock that stands still tells nothing apart
