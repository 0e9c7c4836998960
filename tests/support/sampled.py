"""The first tokens that a tiny model samples, their exact distribution, and a chi-square test of the two."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator

import torch
from scipy import stats
from transformers.generation import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from decoding.acceptance import Acceptance
from decoding.decode import Request
from decoding.rounds import Prefill, Round
from decoding.target import Target
from decoding.text import Ending, LogitsProcessor, Shaping
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


ALPHA = 1e-3  # with these seeds a right acceptance stays above; a wrong one falls below by many orders of magnitude
FEWEST_EXPECTED = 5.0

Outcome = tuple[int, ...]


def p_value(counts: Counter[Outcome], expected: dict[Outcome, float]) -> float:
    """Return the p-value of the chi-square test that `counts` come from `expected`; rare outcomes are pooled."""
    total = counts.total()
    assert abs(sum(expected.values()) - 1.0) < 1e-4
    impossible = [outcome for outcome in counts if expected.get(outcome, 0.0) == 0.0]
    assert not impossible, f"outcomes that the target never generates: {impossible[:3]}"
    common = [outcome for outcome, share in expected.items() if share * total >= FEWEST_EXPECTED]
    assert len(common) > 10, "too few outcomes to tell distributions apart"
    observed = [counts[outcome] for outcome in common]
    wanted = [expected[outcome] * total for outcome in common]
    rest = total - sum(wanted)
    if rest >= FEWEST_EXPECTED:
        observed.append(total - sum(observed))
        wanted.append(rest)
    scale = sum(observed) / sum(wanted)
    return float(stats.chisquare(observed, [value * scale for value in wanted]).pvalue)
