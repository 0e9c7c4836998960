"""Predicted cost of any draft on one device, from a short measurement: thousands of skip sets are rated without running.

A prediction chooses what to measure; it is never reported as a measurement. `studies.costs.terms` defines the terms of passes,
`studies.costs.fit` fits them, and `tuner.measuring.cost_table` does the timing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from decoding.documents.strict_yaml import Document
from decoding.draft_length import RoundCosts
from decoding.drafts import BitWidth, Draft, LayerSkip
from decoding.timing.round_costs import LEAST_COST
from studies.costs.terms import BlockKinds, DraftStep, Pass, Terms, Vector, Verification

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
ByContext = tuple[Seconds, ...]


class TermSeconds(Document):
    """Seconds of each term of `studies.costs.terms.Terms`."""

    rest: tuple[ByContext, ...] = Field(
        description="by width: a pass without its blocks (embedding, norm, head, dispatch)"
    )
    frame: tuple[Seconds, ...] = Field(description="by kind: a block without its sublayers")
    attention: tuple[ByContext, ...] = Field(description="by kind: an attention sublayer over one token")
    mlp: tuple[Seconds, ...] = Field(description="by kind: an MLP sublayer over one token")
    wider: tuple[tuple[ByContext, ...], ...] = Field(
        description="by kind and by width from the second on: further seconds of a block beyond one token"
    )
    narrowed: Seconds = Field(description="further seconds of a block that processes only the last of several tokens")
    choice: Seconds = Field(description="further seconds of a draft step: choosing the token and keeping it")
    look: Seconds = Field(description="further seconds of a draft step if a rule looks at the distribution")
    quantised_rest: tuple[Seconds, ...] = Field((), description="by precision: `rest` of a quantised draft step")
    quantised_attention: tuple[tuple[Seconds, ...], ...] = Field(
        (), description="by precision and by kind: a quantised attention sublayer after the shortest context"
    )
    quantised_mlp: tuple[tuple[Seconds, ...], ...] = Field((), description="by precision and by kind: a quantised MLP")
    quantised_left_out: tuple[Seconds, ...] = Field(
        (), description="by precision: seconds that a draft step saves if it leaves the whole vocabulary out"
    )


class CostError(Document):
    """Relative errors of predictions for passes outside the fit."""

    median: Seconds
    worst: Seconds
    num_passes: int = Field(ge=1)


class CostTable(Document):
    """Fitted seconds of the parts of a model on one device; see `tuner.measuring.cost_table.measure_cost_table`.

    `context` is the number of tokens before a pass. Costs are linear between measured widths and contexts; the last line continues
    beyond the last point. A prompt lookup before a draft does not count. All methods raise ValueError for layers that the model
    does not have and for drafts that run no part of the model.
    """

    kinds: BlockKinds
    widths: tuple[int, ...] = Field(min_length=2)
    contexts: tuple[int, ...] = Field(min_length=1)
    num_tokens: int | None = Field(
        None, ge=1, description="size of the vocabulary; None if drafts choose from all of it"
    )
    bits: tuple[BitWidth, ...] = Field((), description="precisions of quantised drafts that were measured")
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
        """Return the seconds of one draft step, with the choice of its token."""
        has_head = draft.trained_head is not None
        return self._predict(DraftStep(self._skipped(draft), context, has_head=has_head))

    def verify_seconds(self, draft: Draft, num_drafted: int, *, context: float, prefix_reuse: bool) -> float:
        """Return the seconds of verifying `num_drafted` tokens.

        With `prefix_reuse`, the blocks shared with the draft process the last token only. Without drafted tokens there are no
        states to reuse. Raises ValueError also if `num_drafted` is negative.
        """
        if num_drafted < 0:
            raise ValueError(f"a round drafts 0 tokens or more, got {num_drafted}")
        skip = self._skipped(draft)
        boundary = skip.num_shared_blocks if prefix_reuse and num_drafted else 0
        return self._predict(Verification(num_drafted + 1, context, boundary))

    def plain_seconds(self, *, context: float) -> float:
        """Return the seconds of a pass of the whole model over one token: a step of plain decoding."""
        return self._predict(Verification(1, context))

    def round_costs(self, draft: Draft, max_tokens: int, *, context: float, prefix_reuse: bool) -> RoundCosts:
        """Return the costs of drafting up to `max_tokens` tokens, in plain passes: predictions of `measure_round_costs`.

        Raises ValueError also if `max_tokens` is below 1.
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

    def saved_seconds(self, skip: LayerSkip, *, context: float) -> float:
        """Return the seconds that a skip saves in a draft step, while the rest of the model runs."""
        return self.draft_seconds(LayerSkip(), context=context) - self.draft_seconds(skip, context=context)

    def covers(self, widths: Iterable[int], contexts: Iterable[int], bits: Iterable[int] = ()) -> bool:
        """Return whether all `widths` and `contexts` are within the measured range, and all `bits` were measured."""
        asked = list(contexts)
        if not set(bits) <= set(self.bits):
            return False
        return max(widths) <= self.widths[-1] and self.contexts[0] <= min(asked) and max(asked) <= self.contexts[-1]

    def describe(self) -> str:
        """Return one line for the console."""
        context, layers = self.contexts[len(self.contexts) // 2], range(self.kinds.num_layers)
        skips = {
            "a block": [LayerSkip.blocks((index,)) for index in layers],
            "attention": [LayerSkip(skip_attention=(i,)) for i in layers if self.kinds.attention[i] is not None],
            "MLP": [LayerSkip(skip_mlp=(index,)) for index in layers if self.kinds.mlp[index] is not None],
        }
        shown = {"a pass takes": self.plain_seconds(context=context)}
        for name, each in skips.items():
            if each:
                shown[name] = float(np.mean([self.saved_seconds(skip, context=context) for skip in each]))
        whole = {f"an int{bits} draft step": LayerSkip(bits=bits) for bits in self.bits}
        shown |= {name: self.draft_seconds(draft, context=context) for name, draft in whole.items()}
        times = ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in shown.items())
        error = self.error
        return (
            f"{times}, all after {context:,} tokens; predicted within {100 * error.median:.1f} % (median, worst "
            f"{100 * error.worst:.0f} %) on {error.num_passes} held-out passes"
        )

    def _skipped(self, draft: Draft) -> LayerSkip:
        """Return what a draft skips. Raises ValueError unless the model can run it."""
        skip = draft.skipped(self.kinds.num_layers)
        draft.check(self.kinds.num_layers)
        self.kinds.check(skip)
        return skip

    @cached_property
    def _terms(self) -> Terms:
        return Terms(self.kinds, self.widths, self.contexts, self.num_tokens, self.bits)

    @cached_property
    def _values(self) -> Vector:
        given = self.seconds.model_dump()
        return np.concatenate([np.ravel(np.asarray(given[name], dtype=float)) for name in self._terms.shapes])

    def _predict(self, each: Pass) -> float:
        return float(self._terms.amounts(each) @ self._values)


def _cost(seconds: float, plain: float) -> float:
    return max(seconds / plain, LEAST_COST) if plain else 1.0  # no time has passed: all costs are equal
