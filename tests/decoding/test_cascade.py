"""Cascades of drafts: the text is plain decoding's, whichever stage opens a round."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from decoding.acceptance import Sampling
from decoding.decode import Request, speculative
from decoding.decoder import Decoder
from decoding.draft_length import DraftLengthRule, Fixed, TopProbability
from decoding.drafters.build import build_drafter
from decoding.drafters.cascade import CascadeDrafter, CopyStage, ModelStage
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import (
    Cascade,
    CascadeStage,
    Draft,
    EarlyExit,
    LayerSkip,
    Lookup,
    PromptLookup,
    StageChoice,
    SuffixDraft,
    SuffixLookup,
)
from decoding.rounds import Generation, Round
from decoding.text import Ending
from tests.support.chi_square import ALPHA, p_value
from tests.support.controllers import AnyLength
from tests.support.families import NUM_LAYERS, SUPPORTED, some_tokens, static_target_of, target_of
from tests.support.generations import write_plainly
from tests.support.sampled import NUM_WITH_COPIES, exact_distribution, first_tokens, request_for, sampling_target

PROMPT = (3, 9, 27, 3, 9, 44, 3, 9)
NUM_NEW = 24
CHOICE = StageChoice(prices=(0.4, 0.3), forgetting=0.6, start=1.5, margin=1.0)
"""Copies are expensive and forgotten quickly, so that short texts have every kind of round."""
LOOKUP = Lookup(max_ngram=2, max_tokens=3, choice=CHOICE)
COPIES = (
    CascadeStage(draft=PromptLookup(max_ngram=3, min_ngram=2), max_tokens=4),
    CascadeStage(draft=SuffixDraft(), max_tokens=2),
)
EXIT = CascadeStage(draft=EarlyExit(exit_layer=3), max_tokens=3, threshold=0.4)


def choosing(*prices: float) -> StageChoice:
    """Return a choice that changes its mind quickly."""
    return CHOICE.model_copy(update={"prices": prices})


DRAFTS: dict[str, Draft] = {
    "two copies, then blocks": Cascade(stages=(*COPIES, CascadeStage(draft=LayerSkip.blocks((2, 3))))),
    "copy, exit or int8": Cascade(
        stages=(COPIES[1], EXIT, CascadeStage(draft=LayerSkip(bits=8))), choice=choosing(0.0, 0.6, 0.8)
    ),
    "exit or blocks": Cascade(stages=(EXIT, CascadeStage(draft=LayerSkip.blocks((2, 3)))), choice=choosing(0.3, 0.2)),
    "chosen lookup, then blocks": LayerSkip.blocks((2, 3)).with_lookup(LOOKUP),
    "chosen lookup, then exit": EarlyExit(exit_layer=3, lookup=LOOKUP),
    "chosen automaton, then int8": LayerSkip(bits=8, lookup=SuffixLookup(max_tokens=4, choice=CHOICE)),
}
RULES: list[DraftLengthRule] = [Fixed(max_tokens=2), TopProbability(max_tokens=3, threshold=0.5)]
RUNNERS = {"eager": target_of, "static": static_target_of}


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
    generation = Decoder(RUNNERS[runner](family), DRAFTS[draft], rule).generate(Request(PROMPT, Ending(NUM_NEW)))
    assert generation.tokens == plain_text(family)


@functools.cache
def plain_text(family: str) -> tuple[int, ...]:
    return write_plainly(target_of(family), Request(PROMPT, Ending(NUM_NEW))).tokens


def test_grid_has_copies_drafts_and_plain_steps() -> None:
    rounds = [
        step
        for draft in DRAFTS.values()
        for step in Decoder(target_of("llama"), draft, RULES[0]).generate(Request(PROMPT, Ending(2 * NUM_NEW))).rounds
    ]
    assert sum(step.looked_up for step in rounds) > 3
    assert sum(bool(step.num_drafted) and not step.looked_up for step in rounds) > 3
    assert sum(not step.num_drafted for step in rounds[:-1]) > 3


def test_grid_has_rounds_of_every_stage() -> None:
    for name in ("two copies, then blocks", "copy, exit or int8", "exit or blocks"):
        draft = DRAFTS[name]
        requests = [Request(prompt, Ending(3 * NUM_NEW)) for prompt in (PROMPT, PROMPT[2:])]
        rounds = [
            step
            for request in requests
            for step in Decoder(target_of("llama"), draft, RULES[0]).generate(request).rounds
        ]
        drafted = {step.stage for step in rounds if step.num_drafted}
        assert drafted == set(range(len(Cascade.model_validate(draft.model_dump()).stages))), name


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_head_sees_every_position_whichever_stage_drafted(family: str, prefix_reuse: bool) -> None:
    """The last block as head of the last exit equals the whole model only if it has seen every position."""
    target = target_of(family)
    head = EarlyExitDrafter(target, NUM_LAYERS - 1, target.new_exit_head(), prefix_reuse=prefix_reuse)
    skip = LayerSkipDrafter(target, LayerSkip.blocks((2, 3)), prefix_reuse=prefix_reuse)
    copies = [CopyStage(PromptLookup(max_ngram=2), 3)]
    rounds = list[Round]()
    for first, second, own in ((head, skip, 1), (skip, head, 2)):
        models = [ModelStage(first, Fixed(max_tokens=2), has_head=own == 1), ModelStage(second, has_head=own == 2)]
        for seed in range(2):
            request = Request(some_tokens(9, seed), Ending(40))
            drafter = CascadeDrafter(copies, models, choosing(0.6, 0.3, 0.3))
            steps = list(speculative(target, drafter, AnyLength(seed), request))
            rounds += [step for step in steps if isinstance(step, Round)]
            assert Generation.collect(steps).tokens == write_plainly(target, request).tokens
            of_head = [step for step in Generation.collect(steps).rounds[:-1] if step.stage == own]
            assert all(step.num_accepted == step.num_drafted for step in of_head)
    assert {step.stage for step in rounds if step.num_drafted} == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": (EXIT, COPIES[0])}, "those that copy come first, and the last one runs the model"),
        ({"stages": (EXIT, CascadeStage(draft=LayerSkip(bits=8)))}, "choice: needed by several stages"),
        ({"stages": (COPIES[0], EXIT)}, "stage 2: the draft-length rule decides"),
        ({"choice": choosing(0.1, 0.1, 0.1)}, "one for each of 2 stages, got 3"),
        (
            {"stages": (COPIES[0], CascadeStage(draft=LayerSkip.blocks((2,)).with_lookup(Lookup())))},
            "stage 2: a stage has no lookup",
        ),
        ({"stages": (CascadeStage(draft=PromptLookup()), CascadeStage(draft=LayerSkip()))}, "max_tokens is missing"),
        (
            {"stages": (COPIES[0].model_copy(update={"threshold": 0.5}), CascadeStage(draft=LayerSkip()))},
            "a copy has no probability",
        ),
        (
            {"stages": [{"draft": {"kind": "none"}, "max_tokens": 2}, {"draft": {"kind": "layer_skip"}}]},
            "prompt_lookup",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_stages_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    good = {"stages": (COPIES[0], CascadeStage(draft=LayerSkip.blocks((2, 3))))}
    Cascade.model_validate(good)
    with pytest.raises(ValidationError, match=words):
        Cascade.model_validate(good | changes)


def test_rows_of_a_batch_choose_for_themselves() -> None:
    target = target_of("llama")
    requests = [Request(prompt, Ending(NUM_NEW)) for prompt in (PROMPT, (5, 6, 7), (8, 2, 8, 2, 8))]
    decoder = Decoder(target, DRAFTS["copy, exit or int8"], RULES[0])
    batch = decoder.generate_batch(requests)

    def facts(generation: Generation) -> list[tuple[bool, int, int]]:
        return [(step.looked_up, step.num_drafted, step.num_accepted) for step in generation.rounds]

    for request, row in zip(requests, batch.generations, strict=True):
        alone = decoder.generate(request)
        assert row.tokens == alone.tokens == write_plainly(target, request).tokens
        assert facts(row) == facts(alone)


def test_sampled_texts_of_a_cascade_are_distributed_as_the_model() -> None:
    draft = Cascade(
        stages=(
            CascadeStage(draft=PromptLookup(max_ngram=2), max_tokens=2),
            CascadeStage(draft=EarlyExit(exit_layer=1), max_tokens=2, threshold=0.3),
            CascadeStage(draft=LayerSkip(skip_attention=(0, 1))),
        ),
        choice=choosing(0.1, 0.5, 0.5),
    )
    drafter = build_drafter(sampling_target(), draft)
    assert drafter is not None
    request = request_for("temperature", Sampling(torch.Generator().manual_seed(11)))
    controller = Fixed(max_tokens=2).controller()
    steps = (speculative(sampling_target(), drafter, controller, request) for _ in range(NUM_WITH_COPIES))
    assert p_value(Counter(map(first_tokens, steps)), exact_distribution("temperature")) > ALPHA
