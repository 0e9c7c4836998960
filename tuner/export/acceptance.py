"""How many tokens of an exported draft model the target accepts, by transformers, as a reference for engines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

LEAST = 0.95
"""Share of the acceptance by transformers that an engine must reach; rounding costs less than the rest."""


def acceptance_rate(
    draft: Path, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], num_tokens: int, *, dtype: str
) -> float:
    """Return accepted over drafted tokens of a folder's model that drafts `num_tokens` greedily in each round.

    `texts` are the target's own after the prompts, each with `num_tokens` more than an engine is asked for, since a round drafts
    beyond the last token.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=dtype, trust_remote_code=False)
    rounds = accepted = 0
    for prompt, text in zip(prompts, texts, strict=True):
        whole, cache, at = [*prompt, *text], DynamicCache(), len(prompt) + 1
        while at < len(whole) - num_tokens:
            if (over := cache.get_seq_length() - (at - 1)) > 0:
                cache.crop(-over)
            drafted, given = list[int](), whole[cache.get_seq_length() : at]
            with torch.inference_mode():
                for _ in range(num_tokens):
                    logits = model(torch.tensor([given]), past_key_values=cache).logits[0, -1]
                    given = [int(logits.argmax())]
                    drafted += given
            right = takewhile(lambda both: both[0] == both[1], zip(drafted, whole[at:], strict=False))
            matching = sum(1 for _ in right)
            rounds, accepted, at = rounds + 1, accepted + matching, at + matching + 1
    return accepted / (rounds * num_tokens) if rounds else 0.0
