"""An exit head in memory: a block of the model's own class, and the tokens that it drafts from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from decoding.target.draft_vocabulary import DraftVocabulary


@dataclass(frozen=True, eq=False)
class ExitHead:
    """A head between the states at an exit and the target's own final norm and LM head."""

    block: nn.Module
    """Block of the model's own class, with keys and values of its own."""
    vocabulary: DraftVocabulary | None = None
    """Tokens that it drafts from; None for all."""
