"""The tokens that heads draft from.

The LM head of a small model takes a good part of a draft: a fifth of a pass with 49,152 tokens and 135 million weights. FR-Spec
(arXiv 2502.14856) and EAGLE-3 draft from a quarter of the tokens, the most frequent ones, and verify with all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from decoding.errors import DistillationError
from decoding.target import DraftVocabulary, Target
from tuner.config import DistillSettings
from tuner.heads.texts import GeneratedText

LARGE = 32_768
"""Vocabularies of at least this size are reduced by default; FR-Spec reduces 128k tokens to 32k."""
SHARE = 4


def draft_vocabulary_size(target: Target, settings: DistillSettings) -> int | None:
    """Return the number of tokens that heads draft from, or None for all.

    Raises `DistillationError` if a number is asked for and the LM head has no plain rows to choose from.
    """
    rows, wanted = target.lm_heads.num_rows, settings.draft_vocabulary
    if wanted is None:
        return rows // SHARE if rows is not None and rows >= LARGE else None
    if rows is None:
        raise DistillationError(
            "heads of this model draft from all tokens, as its LM head is not a plain linear layer: leave out draft_vocabulary"
        )
    return wanted if wanted < rows else None


def choose_vocabulary(
    target: Target, texts: Sequence[GeneratedText], settings: DistillSettings
) -> DraftVocabulary | None:
    """Return the most frequent tokens of the responses and their prompts, end tokens included; None for all tokens.

    Ties, such as tokens that never occur, go to the lower id: byte-pair encoders number frequent tokens first.
    """
    size = draft_vocabulary_size(target, settings)
    if size is None or target.lm_heads.num_rows is None:
        return None
    counts = Counter(token for text in texts for token in (*text.prompt, *text.response))
    ends = target.model.generation_config.eos_token_id
    counts.update(dict.fromkeys([] if ends is None else ends if isinstance(ends, list) else [ends], len(texts)))
    ranked = [counts[token] for token in range(target.lm_heads.num_rows)]
    return DraftVocabulary.of_most_frequent(size, target.lm_heads.num_rows, ranked)
