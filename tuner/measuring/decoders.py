"""The decoders of the drafts that were used last, so that what a runner has prepared for them is not prepared again."""

from __future__ import annotations

from collections import OrderedDict

from decoding.decoder import Decoder
from decoding.draft_length import DraftLengthRule
from decoding.drafts import Draft
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.target import Target

MOST_KEPT = 6
"""Drafts whose decoders are kept. The finalists of a race take turns: fewer than their number would keep none of them."""


class DecoderPool:
    """Decoders by draft; the draft that was used longest ago is dropped first, and its recordings with it."""

    def __init__(
        self,
        target: Target,
        decoding: Decoding = Decoding(),
        *,
        heads: HeadFolder | None = None,
        most: int = MOST_KEPT,
    ) -> None:
        self._target, self._decoding, self._heads = target, decoding, heads
        self._most = most
        self._kept: OrderedDict[Draft, Decoder] = OrderedDict()

    def get(self, draft: Draft, rule: DraftLengthRule) -> Decoder:
        """Return a decoder with a fresh controller, which runs the same parts of the model as earlier ones of this draft.

        Raises ValueError for layers that the target does not have, and `ExitHeadError` for a missing or wrong head.
        """
        kept = self._kept.get(draft)
        if kept is None:
            kept = self._kept[draft] = Decoder(self._target, draft, rule, self._decoding, heads=self._heads)
        self._kept.move_to_end(draft)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return kept.with_rule(rule)

    def clear(self) -> None:
        """Drop all decoders, to free the memory of their recordings."""
        self._kept.clear()
