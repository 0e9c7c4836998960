"""A fixed draft length: the static length of Leviathan et al. (arXiv 2211.17192)."""

from __future__ import annotations

from typing import Literal

from decoding.draft_length.contract import Controller, DraftLengthRule


class Fixed(DraftLengthRule):
    """Draft exactly `max_tokens` every round."""

    rule: Literal["fixed"] = "fixed"

    @property
    def is_fixed(self) -> bool:
        return True

    def controller(self) -> Controller:
        return Controller(self.max_tokens)
