"""Plain and speculative generations of the test families, with a check of the facts of every round, and a random rule."""

from __future__ import annotations

import functools
import random

from decoding.decode import Request, autoregressive, speculative
from decoding.draft_length import Controller, Decision, DraftDistribution, DraftLengthRule
from decoding.drafters.build import build_drafter
from decoding.drafts import Draft, EarlyExit, LayerSkip
from decoding.profile import Decoding
from decoding.rounds import Generation
from decoding.target import Target
from decoding.text import Ending
from tests.support.families import target_of
from tests.support.grid import PROMPTS

NUM_NEW_TOKENS = 12


@functools.cache
def plain_text(family: str, prompt: str) -> tuple[int, ...]:
    """Return the `NUM_NEW_TOKENS` tokens of plain decoding after a prompt of the grid."""
    return write_plainly(target_of(family), Request(PROMPTS[prompt], Ending(NUM_NEW_TOKENS))).tokens


def write_plainly(target: Target, request: Request) -> Generation:
    """Decode the request without drafts."""
    return Generation.collect(autoregressive(target, request))


def write(
    target: Target, draft: Draft, rule: DraftLengthRule | Controller, request: Request, *, prefix_reuse: bool = True
) -> Generation:
    """Decode speculatively, and check that the facts of every round add up."""
    drafter = build_drafter(target, draft, Decoding(prefix_reuse=prefix_reuse))
    assert drafter is not None
    controller = rule.controller() if isinstance(rule, DraftLengthRule) else rule
    generation = Generation.collect(speculative(target, drafter, controller, request))
    lookup = draft.lookup if isinstance(draft, LayerSkip | EarlyExit) else None
    check_facts(generation, request, max(controller.max_tokens, lookup.max_tokens if lookup else 0))
    return generation


def check_facts(generation: Generation, request: Request, max_drafted: int) -> None:
    """Check the number of drafted, accepted and generated tokens of every round."""
    num_tokens = 1
    for index, step in enumerate(generation.rounds):
        remaining = request.ending.max_new_tokens - num_tokens
        assert 0 <= step.num_accepted <= step.num_drafted <= min(max_drafted, remaining - 1)
        if index < len(generation.rounds) - 1:
            assert len(step.tokens) == step.num_accepted + 1
        else:
            assert 1 <= len(step.tokens) <= step.num_accepted + 1
        num_tokens += len(step.tokens)
    assert num_tokens == len(generation.tokens) == generation.num_decoded + 1
    assert num_tokens <= request.ending.max_new_tokens


class AnyLength(Controller):
    """Draft a random number of tokens, possibly none, and drop some of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(max_tokens=4)
        self._random = random.Random(seed)

    def limit(self) -> int:
        return self._random.choice([0, 0, 1, 2, 4])

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        return self._random.choice([Decision.CONTINUE, Decision.CONTINUE, Decision.LAST, Decision.STOP])
