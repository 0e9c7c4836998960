"""Cascades of drafts: the text is plain decoding's, whichever stage opens a round."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from decoding.acceptance import Sampling
from decoding.decode import Request, speculative
from decoding.decoder import Decoder
from decoding.draft_length import DraftLengthRule, Fixed, TopProbability
from decoding.drafters.build import build_drafter
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, SuffixLookup
from decoding.drafts.choice import StageChoice
from decoding.rounds import Generation
from decoding.runners.eager import EagerRunner
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from tests.support.chi_square import ALPHA, p_value
from tests.support.families import SUPPORTED, target_of
from tests.support.generations import write_plainly
from tests.support.sampled import NUM_SEQUENCES, exact_distribution, first_tokens, request_for, sampling_target

PROMPT = (3, 9, 27, 3, 9, 44, 3, 9)
NUM_NEW = 24
CHOICE = StageChoice(prices=(0.4, 0.3), forgetting=0.6, start=1.5, margin=1.0)
"""Copies are expensive and forgotten quickly, so that short texts have every kind of round."""
LOOKUP = Lookup(max_ngram=2, max_tokens=3, choice=CHOICE)
DRAFTS: dict[str, Draft] = {
    "chosen lookup, then blocks": LayerSkip.blocks((2, 3)).with_lookup(LOOKUP),
    "chosen lookup, then exit": EarlyExit(exit_layer=3, lookup=LOOKUP),
    "chosen automaton, then int8": LayerSkip(bits=8, lookup=SuffixLookup(max_tokens=4, choice=CHOICE)),
}
RULES: list[DraftLengthRule] = [Fixed(max_tokens=2), TopProbability(max_tokens=3, threshold=0.5)]
RUNNERS = {"eager": EagerRunner, "static": partial(StaticRunner, compiled=False)}


def cases() -> list[tuple[str, str, DraftLengthRule, str]]:
    """Return each family with each draft; rules and runners alternate, so that each pair of the others occurs."""
    return [
        (
            family,
            draft,
            RULES[(row + column) % 2],
            "eager" if family == "bloom" else list(RUNNERS)[(row // 2 + column) % 2],
        )
        for row, family in enumerate(SUPPORTED)
        for column, draft in enumerate(DRAFTS)
        if not (family == "gpt2" and "int8" in draft)
    ]


@pytest.mark.parametrize(("family", "draft", "rule", "runner"), cases(), ids=str)
def test_text_of_a_cascade_is_the_plain_text(family: str, draft: str, rule: DraftLengthRule, runner: str) -> None:
    target = target_of(family) if runner == "eager" else Target(target_of(family).model, RUNNERS[runner])
    request = Request(PROMPT, Ending(NUM_NEW))
    generation = Decoder(target, DRAFTS[draft], rule).generate(request)
    assert generation.tokens == write_plainly(target_of(family), request).tokens


def test_grid_has_copies_drafts_and_plain_steps() -> None:
    rounds = [
        step
        for draft in DRAFTS.values()
        for step in Decoder(target_of("llama"), draft, RULES[0]).generate(Request(PROMPT, Ending(2 * NUM_NEW))).rounds
    ]
    assert sum(step.looked_up for step in rounds) > 3
    assert sum(bool(step.num_drafted) and not step.looked_up for step in rounds) > 3
    assert sum(not step.num_drafted for step in rounds[:-1]) > 3


def test_rows_of_a_batch_choose_for_themselves() -> None:
    target = target_of("llama")
    requests = [Request(prompt, Ending(NUM_NEW)) for prompt in (PROMPT, (5, 6, 7), (8, 2, 8, 2, 8))]
    decoder = Decoder(target, DRAFTS["chosen lookup, then exit"], RULES[0])
    batch = decoder.generate_batch(requests)

    def facts(generation: Generation) -> list[tuple[bool, int, int]]:
        return [(step.looked_up, step.num_drafted, step.num_accepted) for step in generation.rounds]

    for request, row in zip(requests, batch.generations, strict=True):
        alone = decoder.generate(request)
        assert row.tokens == alone.tokens == write_plainly(target, request).tokens
        assert facts(row) == facts(alone)


def test_sampled_texts_of_a_chosen_lookup_are_distributed_as_the_model() -> None:
    draft = LayerSkip(skip_attention=(0, 1), lookup=Lookup(max_ngram=2, max_tokens=2, choice=CHOICE))
    drafter = build_drafter(sampling_target(), draft)
    assert drafter is not None
    request = request_for("temperature", Sampling(torch.Generator().manual_seed(11)))
    controller = Fixed(max_tokens=2).controller()
    steps = (speculative(sampling_target(), drafter, controller, request) for _ in range(NUM_SEQUENCES))
    assert p_value(Counter(map(first_tokens, steps)), exact_distribution("temperature")) > ALPHA
