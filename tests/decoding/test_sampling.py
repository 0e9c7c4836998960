"""Sampled output has the distribution of plain sampling: a chi-square test of the first tokens' joint distribution.

Streams are seeded, so every p-value is the same in every run. Deliberately wrong acceptances must fail the same test.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decoding.acceptance import (
    Acceptance,
    Sampling,
    accept_certain,
    accept_sampled,
)
from decoding.decode import speculative
from decoding.draft_length import AdaEdl, DraftLengthRule, Fixed
from decoding.drafters.build import build_drafter
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import Draft, LayerSkip, Lookup, SuffixDraft
from decoding.drafts.history import RequestHistory
from decoding.rounds import Prefill
from tests.support.sampled import (
    ALPHA,
    NUM_SEQUENCES,
    NUM_WITH_COPIES,
    PROMPT,
    Outcome,
    exact_distribution,
    first_tokens,
    p_value,
    request_for,
    sampling_target,
)

Judge = Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]


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
        num_accepted, token, *_ = judge(torch.tensor(drafted), torch.stack(q), torch.stack(p), generator).tolist()
        text = [*drafted[:num_accepted], token]
        if len(text) == 1:
            text.append(draw(TARGET[1][text[0]], generator))
        counts[tuple(text[:2])] += 1
    return counts


EXPECTED_PAIRS = {
    (first, second): float(TARGET[0][first] * TARGET[1][first, second])
    for first, second in itertools.product(range(SIZE), repeat=2)
}


def test_speculative_sampling_is_distributed_as_the_target() -> None:
    assert p_value(first_two_tokens(accept_sampled, 2, seed=1), EXPECTED_PAIRS) > ALPHA


def test_certain_drafts_need_no_explicit_distribution() -> None:
    """Deterministic drafts: each is the most likely token of the draft's distribution, given the preceding ones."""
    generator = torch.Generator().manual_seed(2)
    first = int(DRAFT[0].argmax())
    drafted = torch.tensor([first, int(DRAFT[1][first].argmax())])
    p = torch.stack([TARGET[0], TARGET[1][first], TARGET[2][first, drafted[1]]])
    counts: Counter[Outcome] = Counter()
    for _ in range(NUM_ROUNDS):
        num_accepted, token, *_ = accept_certain(drafted, p, generator).tolist()
        text = [*drafted[:num_accepted].tolist(), token]
        if len(text) == 1:
            text.append(draw(TARGET[1][text[0]], generator))
        counts[tuple(text[:2])] += 1
    assert p_value(counts, EXPECTED_PAIRS) > ALPHA


def verdict(num_accepted: int, token: int, drafted: Tensor) -> Tensor:
    """Return a verdict as the acceptance functions do."""
    return torch.cat([torch.tensor([num_accepted, token]), drafted])


def reject_to_target(drafted: Tensor, q: Tensor, p: Tensor, generator: torch.Generator) -> Tensor:
    """Wrong: after a rejection it samples from the target, not from the residual."""
    num_accepted = int(accept_sampled(drafted, q, p, generator)[0])
    return verdict(num_accepted, draw(p[num_accepted], generator), drafted)


def accept_by_target_alone(drafted: Tensor, q: Tensor, p: Tensor, generator: torch.Generator) -> Tensor:
    """Wrong: it accepts with the target's probability, not with its ratio to the draft's."""
    return accept_sampled(drafted, torch.ones_like(q), p, generator)


@pytest.mark.parametrize("judge", [reject_to_target, accept_by_target_alone], ids=lambda judge: judge.__name__)
def test_wrong_acceptance_fails_the_same_test(judge: Judge) -> None:
    assert p_value(first_two_tokens(judge, 2, seed=1), EXPECTED_PAIRS) < 1e-9


# --- whole sequences of a tiny model-----------------------------------------------------------------------------------------


def many_texts(processors: str, rule: DraftLengthRule, draft: Draft, acceptance: Acceptance) -> Counter[Outcome]:
    drafter = build_drafter(sampling_target(), draft)
    assert drafter is not None
    request = request_for(processors, acceptance)
    controller = rule.controller()
    num_sequences = NUM_SEQUENCES if isinstance(draft, LayerSkip) and draft.lookup is None else NUM_WITH_COPIES
    return Counter(
        first_tokens(speculative(sampling_target(), drafter, controller, request)) for _ in range(num_sequences)
    )


CASES: dict[str, tuple[str, DraftLengthRule, Draft]] = {
    "AdaEDL and processors": (
        "temperature, penalty and top-k",
        AdaEdl(max_tokens=3, initial_threshold=0.4, step=0.2, keep_last=False),
        LayerSkip(skip_attention=(0, 1)),
    ),
    "lookup, then skip and processors": (
        "temperature, penalty and top-k",
        Fixed(max_tokens=2),
        LayerSkip(skip_attention=(0, 1), lookup=Lookup(max_ngram=2, max_tokens=2)),
    ),
}


@pytest.mark.parametrize(("processors", "rule", "draft"), CASES.values(), ids=CASES)
def test_sampled_texts_are_distributed_as_the_model(processors: str, rule: DraftLengthRule, draft: Draft) -> None:
    generator = torch.Generator().manual_seed(7)
    counts = many_texts(processors, rule, draft, Sampling(generator))
    assert p_value(counts, exact_distribution(processors)) > ALPHA


class CountedHistory(RequestHistory):
    """Counts how often an answer was copied from."""

    num_copied_from = 0

    def note_use(self, answer: tuple[int, ...]) -> bool:
        self.num_copied_from += 1
        return super().note_use(answer)


def texts_of_one_tenant(draft: Draft, acceptance: Acceptance) -> tuple[Counter[Outcome], int]:
    """Return the texts of requests that may copy from the answers before them, and how often they did."""
    drafter = build_drafter(sampling_target(), draft)
    assert drafter is not None
    history = CountedHistory(max_answers=8)
    counts: Counter[Outcome] = Counter()
    for _ in range(NUM_WITH_COPIES):
        request = replace(request_for("temperature", acceptance), history=history)
        text = first_tokens(speculative(sampling_target(), drafter, Fixed(max_tokens=3).controller(), request))
        counts[text] += 1
        # The prompt's end too, so that a match is longer than any in the text itself.
        history.add([*PROMPT[-2:], *text])
    return counts, history.num_copied_from - NUM_WITH_COPIES  # adding an answer asks for it, too


WITH_HISTORY = SuffixDraft(min_token_prob=0.0)


def test_texts_that_copy_from_earlier_answers_are_distributed_as_the_model() -> None:
    counts, copied = texts_of_one_tenant(WITH_HISTORY, Sampling(torch.Generator().manual_seed(7)))
    assert copied > NUM_WITH_COPIES / 2, "so often that a wrong acceptance would show, as below"
    assert p_value(counts, exact_distribution("temperature")) > ALPHA


def test_seeded_texts_are_the_same_at_every_run() -> None:
    def text() -> list[int]:
        request = request_for("temperature", Sampling(torch.Generator().manual_seed(3)))
        drafter = LayerSkipDrafter(sampling_target(), LayerSkip.blocks((1,)))
        steps = list(speculative(sampling_target(), drafter, Fixed(max_tokens=3).controller(), request))
        return [step.token if isinstance(step, Prefill) else step.tokens for step in steps]

    assert text() == text()
