"""The acceptance by transformers that engines are compared with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tuner.bench.engine import acceptance_rate

PROMPTS = [(5, 6, 7, 8), (9, 3, 4)]
NUM_TOKENS = 3


def test_a_draft_that_is_the_target_is_accepted_whole_and_another_one_less(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=False)
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        written = model.generate(ids, max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0)
        texts.append(tuple(written[0, len(prompt) :].tolist()))
    assert acceptance_rate(checkpoint, PROMPTS, texts, NUM_TOKENS, dtype="float32") == 1.0
    # A token in four is another than the model's: each round accepts what precedes it.
    size = model.config.vocab_size
    broken = [tuple((token + (at % 4 == 3)) % size for at, token in enumerate(text)) for text in texts]
    assert acceptance_rate(checkpoint, PROMPTS, broken, NUM_TOKENS, dtype="float32") < 1.0
    wrong = [tuple((token + 1) % size for token in text) for text in texts]
    assert acceptance_rate(checkpoint, PROMPTS, wrong, NUM_TOKENS, dtype="float32") < 0.5
