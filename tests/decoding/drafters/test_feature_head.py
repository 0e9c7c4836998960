"""Feature heads write the text of plain decoding, and draft in each round what their unrolled steps say of the same tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.decode import Request, speculative
from decoding.decoder import Decoder
from decoding.draft_length import Controller, Fixed
from decoding.drafters.build import build_drafter
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.feature_head import FeatureHeadDrafter
from decoding.drafters.prompt_lookup import LookupFirst
from decoding.drafts import FixedLeaves, Lookup
from decoding.errors import ExitHeadError
from decoding.head_folder import HeadFolder
from decoding.rounds import Generation
from decoding.runners.contract import Outputs
from decoding.target import DraftVocabulary, FeatureHead, Target
from decoding.target.heads import unrolled
from decoding.target.states import last_states
from decoding.text import Ending, TokenSequence
from decoding.timing.round_costs import measure_round_costs
from tests.support.families import VOCABULARY, some_tokens, static_target_of, target_of
from tests.support.feature_heads import disturbed_feature_head, write_feature_head
from tests.support.generations import AnyLength, write_plainly

NUM_STEPS = 4
TargetOf = Callable[[str], Target]


class Watched(Drafter):
    """A drafter that notes the drafts of each round, with the number of tokens before them."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.rounds: list[tuple[int, list[int]]] = []
        self.tree = drafter.tree

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        return self._drafter.prefill(sequence, cache)

    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        proposal = self._drafter.draft(sequence, cache, controller, request, limit)
        if not proposal.looked_up:
            drafts = sequence.written(sequence.length, sequence.length + proposal.num_tokens)
            self.rounds.append((sequence.length, drafts[0].tolist()))
        return proposal

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        return self._drafter.verify(sequence, cache, draft)


@torch.inference_mode()
def unrolled_choices(target: Target, head: FeatureHead, token_ids: list[int]) -> list[list[int]]:
    """Return the likeliest token of each step after each position."""
    ids = torch.tensor([token_ids])
    states, _ = last_states(target, ids)
    steps = unrolled(target, head, ids, states, NUM_STEPS)
    return [logits[0].argmax(dim=-1).tolist() for logits in steps]


def check_rounds(
    target: Target, head: FeatureHead, token_ids: list[int], rounds: list[tuple[int, list[int]]]
) -> Counter[int]:
    """Compare drafts with the unrolled steps: all first ones, and all of the longest rounds; return numbers by step."""
    first, compared = unrolled_choices(target, head, token_ids)[0], Counter[int]()
    for length, drafts in rounds:
        if drafts:
            assert drafts[0] == first[length - 1], f"the round after {length} tokens"
            compared[1] += 1
    for length, drafts in sorted(rounds, key=lambda each: len(each[1]))[-3:]:
        steps = unrolled_choices(target, head, [*token_ids[:length], *drafts])
        for step, token in enumerate(drafts):
            assert token == steps[step][length + step - 1], f"step {step + 1} of the round after {length} tokens"
            compared[step + 1] += 1
    return compared


@pytest.mark.parametrize(
    ("family", "target_with"),
    [("llama", target_of), ("gemma3", target_of), ("gpt_neox_parallel", target_of), ("gemma3", static_target_of)],
)
def test_text_is_the_plain_text_and_drafts_are_those_of_the_unrolled_head(family: str, target_with: TargetOf) -> None:
    """The head must have read every verified position with the target's state, and its own drafts with its own."""
    target = target_with(family)
    head = disturbed_feature_head(target_of(family))
    request = Request(some_tokens(1 if family == "llama" else 9), Ending(18))
    plain = write_plainly(target_of(family), request).tokens
    watched = Watched(FeatureHeadDrafter(target, head))
    after_lookup = LookupFirst(watched, Lookup(max_tokens=3))
    for drafter, controller in ((watched, Controller(NUM_STEPS)), (after_lookup, AnyLength(1))):
        generation = Generation.collect(speculative(target, drafter, controller, request))
        assert generation.tokens == plain
    compared = check_rounds(target_of(family), head, [*request.prompt, *plain], watched.rounds)
    assert compared[1] > 6
    assert compared[3] > 1


def test_round_that_is_rolled_back_is_drafted_again_as_it_was() -> None:
    """Rounds are timed from one state; cost-aware rules have their draft measured so."""
    target = target_of("llama")
    drafter, prompt = FeatureHeadDrafter(target, disturbed_feature_head(target)), some_tokens(9)
    sequence, cache = TokenSequence(prompt, 20, target.device), target.new_cache(20)
    drafts = []
    with torch.inference_mode():
        first = drafter.prefill(sequence, cache).argmax()
        cache.length = sequence.length
        sequence.append([int(first)])
        for _ in range(3):
            proposal = drafter.draft(sequence, cache, Controller(3), Request([0], Ending(9)), 3)
            drafts.append(sequence.span(sequence.length, sequence.length + 3).tolist())
            drafter.verify(sequence, cache, proposal)
            cache.roll_back(sequence.length - 1)
    assert drafts[0] == drafts[1] == drafts[2]
    costs = measure_round_costs(target, drafter, 2, budget_seconds=0.0)
    assert len(costs.verify) == 3


def test_head_with_a_vocabulary_of_its_own_drafts_from_it() -> None:
    target, chosen = target_of("llama"), DraftVocabulary(tuple(range(0, VOCABULARY, 3)))
    head = disturbed_feature_head(target, chosen)
    watched, request = Watched(FeatureHeadDrafter(target, head)), Request(some_tokens(9), Ending(16))
    generation = Generation.collect(speculative(target, watched, Controller(3), request))
    assert generation.tokens == write_plainly(target, request).tokens
    assert {token for _, drafts in watched.rounds for token in drafts} <= set(chosen.token_ids)
    assert check_rounds(target, head, [*request.prompt, *generation.tokens], watched.rounds)[1] > 3


def test_side_leaves_leave_their_state_to_the_head() -> None:
    """After an accepted leaf the head reads the target's state of the leaf, so that the next first draft is as ever."""
    target, num_accepted = target_of("qwen3"), 0
    head = disturbed_feature_head(target)
    for seed in range(2):
        request = Request(some_tokens(5, seed), Ending(16))
        watched = Watched(FeatureHeadDrafter(target, head, tree=FixedLeaves(leaves=8)))
        generation = Generation.collect(speculative(target, watched, Controller(2), request))
        assert generation.tokens == write_plainly(target, request).tokens
        check_rounds(target, head, [*request.prompt, *generation.tokens], watched.rounds)
        num_accepted += generation.num_accepted
    assert num_accepted > 4, "some leaves are accepted"


def test_draft_document_builds_its_drafter_from_the_folder(tmp_path: Path) -> None:
    target = target_of("llama")
    draft = write_feature_head(target, tmp_path, disturbed_feature_head(target))
    heads = HeadFolder(target, tmp_path)
    assert heads.feature_draft() == draft
    request = Request(some_tokens(5), Ending(12))
    decoder = Decoder(target, draft.having(lookup=Lookup(max_tokens=2)), Fixed(max_tokens=3), heads=heads)
    assert decoder.generate(request).tokens == write_plainly(target, request).tokens
    with pytest.raises(ExitHeadError, match="needs the feature head"):
        build_drafter(target, draft)
    with pytest.raises(ExitHeadError, match="its contents differ"):
        build_drafter(target, draft.model_copy(update={"head_sha256": "0" * 64}), heads=heads)
    with pytest.raises(ExitHeadError, match="belongs to another model"):
        HeadFolder(target_of("qwen2"), tmp_path).feature_draft()
