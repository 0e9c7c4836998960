"""The first tokens that a tiny model samples, and their exact distribution."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from transformers.generation import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from decoding.acceptance import Acceptance
from decoding.decode import Request
from decoding.rounds import Prefill, Round
from decoding.target import Target
from decoding.text import Ending, LogitsProcessor, Shaping
from tests.support.chi_square import Outcome
from tests.support.families import build

VOCABULARY = 8
PROMPT = [3, 1, 4, 0, 5, 2, 6, 7]
"""Every token of the vocabulary once, so that each is found by a lookup: most drafts can be copies."""
NUM_SEQUENCES = 350
"""Where the model drafts: planted wrong acceptances fall below 1e-7 with three seeds of three."""
NUM_WITH_COPIES = 700
"""Where drafts are copied: planted wrong acceptances fall below 1e-10 with three seeds of three, but not with 350 sequences."""
NUM_TOKENS = 3

PLAIN: tuple[LogitsProcessor, ...] = (TemperatureLogitsWarper(2.0),)
PROCESSORS = {
    "temperature": PLAIN,
    "temperature, penalty and top-k": (
        TemperatureLogitsWarper(2.0),
        RepetitionPenaltyLogitsProcessor(1.4),
        TopKLogitsWarper(5),
    ),
}


@functools.cache
def sampling_target() -> Target:
    """Build a Llama of two layers with a vocabulary of 8 tokens."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return Target(build("llama", **sizes))


@functools.cache
def exact_distribution(processors: str) -> dict[Outcome, float]:
    """Return the distribution of the first tokens, from one pass over every possible beginning."""
    target = sampling_target()
    expected = {}
    for outcome in itertools.product(range(VOCABULARY), repeat=NUM_TOKENS):
        ids = torch.tensor([[*PROMPT, *outcome]])
        with torch.inference_mode():
            logits = target.model(ids).logits[:, len(PROMPT) - 1 : -1].float()
        share = 1.0
        for position, token in enumerate(outcome):
            scores = logits[:, position].clone()
            for process in PROCESSORS[processors]:
                scores = process(ids[:, : len(PROMPT) + position], scores)
            share *= float(scores.softmax(dim=-1)[0, token])
        expected[outcome] = share
    return expected


def first_tokens(steps: Iterator[Prefill | Round]) -> Outcome:
    """Return the first tokens of a sequence, which is generated no further than needed."""
    tokens: list[int] = []
    for step in steps:
        tokens += [step.token] if isinstance(step, Prefill) else step.tokens
        if len(tokens) >= NUM_TOKENS:
            break
    return tuple(tokens[:NUM_TOKENS])


def request_for(processors: str, acceptance: Acceptance) -> Request:
    """Return a request for a few more tokens than the outcome needs."""
    return Request(PROMPT, Ending(NUM_TOKENS + 4), acceptance, Shaping(PROCESSORS[processors]))
