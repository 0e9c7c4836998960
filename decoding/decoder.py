"""A draft and a rule applied to a loaded target: what profiles, candidates and the command line decode with."""

from __future__ import annotations

from collections.abc import Iterator

from decoding.decode import Request, autoregressive, speculative
from decoding.draft_length import Controller, DraftLengthRule, Fixed
from decoding.drafters.build import build_drafter
from decoding.exit_head import ExitHeads
from decoding.profile import EarlyExit, LayerSkip, PlainDecoding
from decoding.rounds import Generation, Prefill, Round
from decoding.target import Target


class Decoder:
    """Decodes text after text. Each starts with a fresh controller, unless the rule is `persistent`."""

    def __init__(
        self,
        target: Target,
        draft: LayerSkip | EarlyExit | PlainDecoding,
        rule: DraftLengthRule,
        *,
        prefix_reuse: bool = True,
        heads: ExitHeads | None = None,
    ) -> None:
        self.target = target
        self._rule = rule
        self._drafter = build_drafter(target, draft, prefix_reuse=prefix_reuse, heads=heads)
        self._kept: Controller | None = rule.controller() if rule.persistent else None

    def steps(self, request: Request) -> Iterator[Prefill | Round]:
        """Write one text, yielding a record for the prefill and each round as it happens."""
        if self._drafter is None:
            return autoregressive(self.target, request)
        return speculative(self.target, self._drafter, self._kept or self._rule.controller(), request)

    def generate(self, request: Request) -> Generation:
        """Write one text to its end."""
        return Generation.collect(self.steps(request))


def plain_decoder(target: Target) -> Decoder:
    """A decoder that never drafts."""
    return Decoder(target, PlainDecoding(), Fixed())
