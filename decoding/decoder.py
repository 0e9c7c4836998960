"""A draft and a rule applied to a loaded target: what profiles, candidates and the command line decode with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from decoding.decode import Request, autoregressive, speculative
from decoding.draft_length import Controller, CostAwareRule, DraftLengthRule, Fixed
from decoding.drafters.build import build_drafter
from decoding.exit_head import ExitHeads
from decoding.profile import Draft, PlainDecoding
from decoding.round_costs import measure_round_costs
from decoding.rounds import Generation, Prefill, Round
from decoding.target import Target


class Decoder:
    """Decodes text after text. Each starts with a fresh controller, unless the rule is `persistent`."""

    def __init__(
        self,
        target: Target,
        draft: Draft,
        rule: DraftLengthRule,
        *,
        prefix_reuse: bool = True,
        heads: ExitHeads | None = None,
    ) -> None:
        self.target = target
        self._rule = rule
        # A prefix that the draft has computed, a token at a time, has not the bits of the wide passes of bit-exact mode.
        prefix_reuse = prefix_reuse and target.runner.exact_width is None
        self._drafter = build_drafter(target, draft, prefix_reuse=prefix_reuse, heads=heads)
        self._kept: Controller | None = None

    @cached_property
    def rule(self) -> DraftLengthRule:
        """The rule it decodes with; one that needs costs and has none gets those measured here, at its first use."""
        if self._drafter is None or not isinstance(self._rule, CostAwareRule) or self._rule.costs is not None:
            return self._rule
        return self._rule.with_costs(measure_round_costs(self.target, self._drafter, self._rule.max_tokens))

    def learnt(self) -> DraftLengthRule | None:
        """The rule with what a persistent controller has learnt so far; None if none was kept, or if there is nothing to learn."""
        return self._kept.learnt() if self._kept is not None else None

    def steps(self, request: Request) -> Iterator[Prefill | Round]:
        """Write one text, yielding a record for the prefill and each round as it happens."""
        if self._drafter is None:
            return autoregressive(self.target, request)
        return speculative(self.target, self._drafter, self._controller(), request)

    def generate(self, request: Request) -> Generation:
        """Write one text to its end."""
        return Generation.collect(self.steps(request))

    def _controller(self) -> Controller:
        if not self.rule.persistent:
            return self.rule.controller()
        if self._kept is None:
            self._kept = self.rule.controller()
        return self._kept


def plain_decoder(target: Target) -> Decoder:
    """A decoder that never drafts."""
    return Decoder(target, PlainDecoding(), Fixed())
