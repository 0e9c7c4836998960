"""The costs that a draft-length rule weighs: given with the rule, or measured for its draft before a decoder is built."""

from __future__ import annotations

from decoding.decoder import Decoder
from decoding.draft_length import CostAwareRule, DraftLengthRule, RoundCosts
from decoding.drafters.build import build_drafter
from decoding.drafts import Draft
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.target import Target
from decoding.timing.round_costs import measure_round_costs


def measure_draft_costs(
    target: Target,
    draft: Draft,
    max_tokens: int,
    decoding: Decoding,
    *,
    heads: HeadFolder | None = None,
    num_sequences: int = 1,
) -> RoundCosts | None:
    """Measure the rounds of `draft` up to `max_tokens` tokens, in plain passes; return None for plain decoding.

    With `num_sequences` above 1, rounds of a batch of that size are measured. Raises `ExitHeadError` for a missing or wrong head.
    """
    drafter = build_drafter(target, draft, decoding, heads=heads)
    return None if drafter is None else measure_round_costs(target, drafter, max_tokens, num_sequences=num_sequences)


def measure_decoder_costs(decoder: Decoder, max_tokens: int, *, num_sequences: int = 1) -> RoundCosts | None:
    """Measure the rounds of a decoder's draft as `measure_draft_costs` does, with the passes that it decodes with."""
    drafter = decoder.drafter
    if drafter is None:
        return None
    return measure_round_costs(decoder.target, drafter, max_tokens, num_sequences=num_sequences)


def with_measured_costs(
    target: Target, draft: Draft, rule: DraftLengthRule, decoding: Decoding, *, heads: HeadFolder | None = None
) -> DraftLengthRule:
    """Return `rule` ready for a `Decoder`: with costs measured here if it weighs costs and has none."""
    if not isinstance(rule, CostAwareRule) or rule.costs is not None:
        return rule
    costs = measure_draft_costs(target, draft, rule.max_tokens, decoding, heads=heads)
    return rule if costs is None else rule.with_costs(costs)
