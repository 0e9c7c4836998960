"""Sampled output has the distribution of plain sampling: a chi-square test of the first tokens' joint distribution.

Streams are seeded, so every p-value is the same in every run. Deliberately wrong acceptances must fail the same test.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers.generation import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from decoding.acceptance import Acceptance, Sampling, accept_certain, accept_sampled
from decoding.decode import Request, autoregressive, speculative
from decoding.draft_length import AdaEdl, BetaThompson, CalibratedThompson, DraftLengthRule, Fixed, RoundCosts
from decoding.drafters.build import build_drafter
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PromptLookup
from decoding.rounds import Prefill, Round
from decoding.target import Target
from decoding.text import Ending, LogitsProcessor, Shaping
from tests.support.families import build

ALPHA = 1e-3  # with these seeds a right acceptance stays above; a wrong one falls below by many orders of magnitude
FEWEST_EXPECTED = 5.0

Judge = Callable[[Tensor, Tensor, Tensor, torch.Generator], tuple[int, int]]
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


# --- the acceptance function, on explicit distributions -----------------------------------------------------------------

SIZE = 5
NUM_ROUNDS = 4_000


def random_distributions(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(1.5 * torch.randn(*shape, generator=generator), dim=-1)


# The target's and the draft's distribution of the first, second and third token, given those before it.
TARGET = [random_distributions(*[SIZE] * (n + 1), seed=10 + n) for n in range(3)]
DRAFT = [random_distributions(*[SIZE] * (n + 1), seed=20 + n) for n in range(3)]


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(probabilities, 1, generator=generator))


def first_two_tokens(judge: Judge, num_drafted: int, seed: int) -> Counter[Outcome]:
    """Generate two tokens `NUM_ROUNDS` times: a judged draft of `num_drafted`, and plain sampling for missing tokens."""
    generator = torch.Generator().manual_seed(seed)
    counts: Counter[Outcome] = Counter()
    for _ in range(NUM_ROUNDS):
        drafted: list[int] = []
        for position in range(num_drafted):
            drafted.append(draw(DRAFT[position][tuple(drafted)], generator))
        q = [DRAFT[position][tuple(drafted[:position])] for position in range(num_drafted)]
        p = [TARGET[position][tuple(drafted[:position])] for position in range(num_drafted + 1)]
        num_accepted, token = judge(torch.tensor(drafted), torch.stack(q), torch.stack(p), generator)
        text = [*drafted[:num_accepted], token]
        if len(text) == 1:
            text.append(draw(TARGET[1][text[0]], generator))
        counts[tuple(text[:2])] += 1
    return counts


EXPECTED_PAIRS = {
    (first, second): float(TARGET[0][first] * TARGET[1][first, second])
    for first, second in itertools.product(range(SIZE), repeat=2)
}


@pytest.mark.parametrize("num_drafted", [1, 2])
def test_speculative_sampling_is_distributed_as_the_target(num_drafted: int) -> None:
    assert p_value(first_two_tokens(accept_sampled, num_drafted, seed=1), EXPECTED_PAIRS) > ALPHA


def test_certain_drafts_need_no_explicit_distribution() -> None:
    """Deterministic drafts: each is the most likely token of the draft's distribution, given the preceding ones."""
    generator = torch.Generator().manual_seed(2)
    first = int(DRAFT[0].argmax())
    drafted = torch.tensor([first, int(DRAFT[1][first].argmax())])
    p = torch.stack([TARGET[0], TARGET[1][first], TARGET[2][first, drafted[1]]])
    counts: Counter[Outcome] = Counter()
    for _ in range(NUM_ROUNDS):
        num_accepted, token = accept_certain(drafted, p, generator)
        text = [*drafted[:num_accepted].tolist(), token]
        if len(text) == 1:
            text.append(draw(TARGET[1][text[0]], generator))
        counts[tuple(text[:2])] += 1
    assert p_value(counts, EXPECTED_PAIRS) > ALPHA


def reject_to_target(drafted: Tensor, q: Tensor, p: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Wrong: after a rejection it samples from the target, not from the residual."""
    num_accepted, _ = accept_sampled(drafted, q, p, generator)
    return num_accepted, draw(p[num_accepted], generator)


def accept_by_target_alone(drafted: Tensor, q: Tensor, p: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Wrong: it accepts with the target's probability, not with its ratio to the draft's."""
    return accept_sampled(drafted, torch.ones_like(q), p, generator)


def accept_all(drafted: Tensor, q: Tensor, p: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Wrong: it accepts every draft."""
    return len(drafted), draw(p[len(drafted)], generator)


WRONG = [reject_to_target, accept_by_target_alone, accept_all]


@pytest.mark.parametrize("judge", WRONG, ids=lambda judge: judge.__name__)
def test_wrong_acceptance_fails_the_same_test(judge: Judge) -> None:
    assert p_value(first_two_tokens(judge, 2, seed=1), EXPECTED_PAIRS) < 1e-9


# --- whole sequences of a tiny model-----------------------------------------------------------------------------------------

VOCABULARY = 8
PROMPT = [3, 1, 4, 1, 5]
NUM_TEXTS = 1_500
NUM_TOKENS = 3


@functools.cache
def tiny_target() -> Target:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return Target(build("llama", **sizes))


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
def exact_distribution(processors: str) -> dict[Outcome, float]:
    """Return the distribution of the first tokens, from one pass over every possible beginning."""
    target = tiny_target()
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
    return Request(PROMPT, Ending(NUM_TOKENS + 4), acceptance, Shaping(PROCESSORS[processors]))


def many_texts(processors: str, rule: DraftLengthRule, draft: Draft, acceptance: Acceptance) -> Counter[Outcome]:
    drafter = build_drafter(tiny_target(), draft)
    assert drafter is not None
    request = request_for(processors, acceptance)
    controller = rule.controller()
    return Counter(first_tokens(speculative(tiny_target(), drafter, controller, request)) for _ in range(NUM_TEXTS))


COSTS = RoundCosts(draft_step=0.1, verify=(1.0, 1.02))
CASES: Sequence[tuple[str, DraftLengthRule, Draft]] = [
    ("temperature", Fixed(max_tokens=3), LayerSkip.blocks((0, 1))),
    (
        "temperature, penalty and top-k",
        AdaEdl(max_tokens=3, initial_threshold=0.4, step=0.2, keep_last=False),
        LayerSkip(skip_attention=(0, 1)),
    ),
    ("temperature", BetaThompson(max_tokens=3, costs=COSTS), LayerSkip(skip_attention=(0, 1))),
    ("temperature", CalibratedThompson(max_tokens=3, costs=COSTS), LayerSkip(skip_attention=(0, 1))),
    ("temperature", Fixed(max_tokens=3), PromptLookup()),
    ("temperature", BetaThompson(max_tokens=3, costs=COSTS), PromptLookup(max_ngram=1)),
    (
        "temperature, penalty and top-k",
        Fixed(max_tokens=2),
        LayerSkip(skip_attention=(0, 1), lookup=Lookup(max_ngram=2, max_tokens=2)),
    ),
    ("temperature", Fixed(max_tokens=3), EarlyExit(exit_layer=1, lookup=Lookup(max_tokens=3))),
]


@pytest.mark.parametrize(
    ("processors", "rule", "draft"),
    CASES,
    ids=[
        "fixed",
        "AdaEDL",
        "Beta-Thompson",
        "calibrated Thompson",
        "lookup",
        "lookup and Beta-Thompson",
        "lookup, then skip",
        "lookup, then exit",
    ],
)
def test_sampled_texts_are_distributed_as_the_model(processors: str, rule: DraftLengthRule, draft: Draft) -> None:
    generator = torch.Generator().manual_seed(7)
    counts = many_texts(processors, rule, draft, Sampling(generator))
    assert p_value(counts, exact_distribution(processors)) > ALPHA


def test_plain_sampling_passes_the_same_test() -> None:
    request = request_for("temperature", Sampling(torch.Generator().manual_seed(8)))
    counts = Counter(first_tokens(autoregressive(tiny_target(), request)) for _ in range(NUM_TEXTS))
    assert p_value(counts, exact_distribution("temperature")) > ALPHA


class WrongSampling(Sampling):
    """Draws like `Sampling` and judges by one of the wrong functions."""

    def __init__(self, judge: Judge, generator: torch.Generator) -> None:
        super().__init__(generator)
        self._judge, self._stream = judge, generator

    def accept(self, drafted: Tensor, probabilities: Tensor | None, scores: Tensor) -> tuple[int, int]:
        if probabilities is None:
            return super().accept(drafted, probabilities, scores)
        return self._judge(drafted, probabilities, scores.softmax(dim=-1), self._stream)


@pytest.mark.parametrize("judge", [reject_to_target, accept_by_target_alone], ids=lambda judge: judge.__name__)
def test_texts_of_a_wrong_acceptance_fail_the_same_test(judge: Judge) -> None:
    processors, rule, draft = CASES[0]
    wrong = WrongSampling(judge, torch.Generator().manual_seed(7))
    assert p_value(many_texts(processors, rule, draft, wrong), exact_distribution(processors)) < 1e-6


class TrustingCopies(Sampling):
    """Wrong: it accepts every looked-up token."""

    def accept(self, drafted: Tensor, probabilities: Tensor | None, scores: Tensor) -> tuple[int, int]:
        return len(drafted), super().accept(drafted[:0], None, scores[-1:])[1]


class RepeatingCopies(Sampling):
    """Wrong: after a rejection it samples from the whole target, including the rejected copy."""

    def accept(self, drafted: Tensor, probabilities: Tensor | None, scores: Tensor) -> tuple[int, int]:
        num_accepted, _ = super().accept(drafted, probabilities, scores)
        return num_accepted, super().accept(drafted[:0], None, scores[num_accepted:])[1]


@pytest.mark.parametrize("wrong", [TrustingCopies, RepeatingCopies])
def test_texts_of_a_wrong_acceptance_of_copies_fail_the_same_test(wrong: type[Sampling]) -> None:
    counts = many_texts("temperature", Fixed(max_tokens=3), PromptLookup(), wrong(torch.Generator().manual_seed(7)))
    assert p_value(counts, exact_distribution("temperature")) < 1e-6


def test_seeded_texts_are_the_same_at_every_run() -> None:
    def text() -> list[int]:
        request = request_for("temperature", Sampling(torch.Generator().manual_seed(3)))
        drafter = LayerSkipDrafter(tiny_target(), LayerSkip.blocks((1,)))
        steps = list(speculative(tiny_target(), drafter, Fixed(max_tokens=3).controller(), request))
        return [step.token if isinstance(step, Prefill) else step.tokens for step in steps]

    assert text() == text()


def test_draft_that_is_the_target_has_every_token_accepted() -> None:
    request = request_for("temperature", Sampling(torch.Generator().manual_seed(5)))
    drafter = LayerSkipDrafter(tiny_target(), LayerSkip())
    for _ in range(20):
        _, *rounds = speculative(tiny_target(), drafter, Fixed(max_tokens=3).controller(), request)
        for step in rounds:
            assert isinstance(step, Round)
            assert step.num_accepted == step.num_drafted
