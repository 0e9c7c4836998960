"""Candidate trees: side leaves change how many tokens a round takes, never which tokens are written."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from transformers.generation import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from decoding import acceptance
from decoding.acceptance import Leaves, Sampling, accept_leaf_sampled, sample_several
from decoding.cache.kv_cache import KVCache
from decoding.decode import Request, speculative
from decoding.decoder import Decoder
from decoding.draft_length import Controller, DraftLengthRule, Fixed, TopProbability
from decoding.drafters.build import build_drafter, check_draft
from decoding.drafts import (
    CandidateTree,
    Draft,
    EarlyExit,
    FixedLeaves,
    LayerSkip,
    Lookup,
    PromptLookup,
    PublishedLeaves,
    SizedLeaves,
)
from decoding.drafts.trees import SeenDepth
from decoding.errors import UnsupportedModelError
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.rounds import Round
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending, Shaping
from tests.support.chi_square import ALPHA, Outcome, p_value
from tests.support.families import SUPPORTED, build, some_tokens, target_of
from tests.support.generations import write_plainly
from tests.support.grid import PROMPTS
from tests.support.heads import write_heads
from tests.support.recorders import CountingRecorder
from tests.support.sampled import NUM_SEQUENCES, exact_distribution, first_tokens, request_for, sampling_target

NUM_NEW_TOKENS = 16
TREES: list[CandidateTree] = [
    FixedLeaves(leaves=2),
    PublishedLeaves(),
    SizedLeaves(least_gain=0.02, max_leaves=5),
    FixedLeaves(leaves=1),
]
DRAFTS: list[tuple[Draft, DraftLengthRule]] = [
    (LayerSkip.blocks((4,)), Fixed(max_tokens=3)),
    (LayerSkip.blocks((2, 3)), TopProbability(max_tokens=5, threshold=0.3)),
    (LayerSkip(skip_mlp=(1, 3), lookup=Lookup(max_ngram=2, max_tokens=2)), Fixed(max_tokens=2)),
    (EarlyExit(exit_layer=3), Fixed(max_tokens=4)),
]


NUM_ROUNDS = 2_000

T = TypeVar("T")


def given(value: T | None) -> T:
    """Return a value that is there."""
    assert value is not None
    return value


# --- greedy: the text of plain decoding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SUPPORTED)
def test_greedy_text_with_leaves_is_the_plain_text(family: str) -> None:
    """Families and trees in turn with drafts; every family meets two of each."""
    target, index = target_of(family), list(SUPPORTED).index(family)
    request = Request(PROMPTS["several tokens"], Ending(NUM_NEW_TOKENS))
    plain = write_plainly(target, request).tokens
    for number in (index, index + 1):
        draft, rule = DRAFTS[number % len(DRAFTS)]
        tree = TREES[(number + index // len(DRAFTS)) % len(TREES)]
        if family == "bloom":
            with pytest.raises(UnsupportedModelError, match="takes no candidate tree"):
                check_draft(target, draft.having(tree=tree))
            continue
        generation = Decoder(target, draft.having(tree=tree), rule).generate(request)
        assert generation.tokens == plain, f"{draft.describe()}, {tree.describe()}"
        assert any(each.num_leaves for each in generation.rounds)


@pytest.mark.parametrize(
    ("family", "records", "number"), [("llama", False, 1), ("gemma3", False, 2), ("gemma3", True, 0)]
)
def test_static_passes_verify_trees_too(family: str, records: bool, number: int) -> None:
    """By the CPU's kernel, or by masks under a recorder as on a GPU, in passes padded to few widths."""
    recorder = CountingRecorder()
    settings = {"recorder": recorder, "buckets": GPU_BUCKETS} if records else {}
    target = Target(build(family), partial(StaticRunner, compiled=False, **settings))
    request = Request(PROMPTS["several tokens"], Ending(NUM_NEW_TOKENS))
    draft, rule = DRAFTS[number]
    decoder = Decoder(target, draft.having(tree=TREES[number]), rule)
    decoder.prepare(len(request.prompt), len(request.prompt) + NUM_NEW_TOKENS)
    num_recorded = recorder.num_recorded
    assert decoder.generate(request).tokens == write_plainly(target_of(family), request).tokens
    assert recorder.num_recorded == num_recorded, "every width was rehearsed"


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_head_reads_the_states_of_an_accepted_leaf(prefix_reuse: bool, tmp_path: Path) -> None:
    """The head's keys and values after leaves are those of a chain: drafts go on as after the same tokens without leaves."""
    target = target_of("llama")
    head = write_heads(target, tmp_path, [2])[2]
    decoding, heads = Decoding(prefix_reuse=prefix_reuse), HeadFolder(target, tmp_path)
    request = Request(PROMPTS["several tokens"], Ending(60))
    caches, num_rounds = list[KVCache](), list[int]()
    for tree in (None, FixedLeaves(leaves=3)):
        decoder = Decoder(target, head.having(tree=tree), Fixed(max_tokens=3), decoding, heads=heads)
        caches.append(target.new_cache(100))
        steps = list(speculative(target, given(decoder.drafter), Controller(3), request, lambda _: caches[-1]))
        num_rounds.append(len(steps))
        tokens = [token for step in steps if isinstance(step, Round) for token in step.tokens]
        assert tokens == list(write_plainly(target, request).tokens[1:])
    assert num_rounds[1] < num_rounds[0], "leaves are accepted"
    read = min(each.branch.length for each in caches)
    for name in ("keys", "values"):
        chain, tree = (getattr(each.branch.layers[-1], name)[:, :, :read] for each in caches)
        torch.testing.assert_close(tree, chain, atol=1e-4, rtol=1e-4)


def test_a_leaf_takes_its_slot_with_it() -> None:
    """Planted: without the move of keys and values the text goes wrong."""
    target, request = target_of("llama"), Request(PROMPTS["several tokens"], Ending(60))
    decoder = Decoder(target, LayerSkip.blocks((2, 3)).having(tree=PublishedLeaves()), Fixed(max_tokens=3))
    plain = write_plainly(target, request).tokens
    assert decoder.generate(request).tokens == plain
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KVCache, "move", lambda self, source, to, leaf: None)
        assert decoder.generate(request).tokens != plain


def test_logits_processors_see_the_path_to_each_leaf() -> None:
    """A repetition penalty after a leaf depends on the tokens before it."""
    target = target_of("llama")
    shaping = Shaping((RepetitionPenaltyLogitsProcessor(1.8), NoRepeatNGramLogitsProcessor(2)))
    request = Request(PROMPTS["several tokens"], Ending(2 * NUM_NEW_TOKENS), shaping=shaping)
    draft = LayerSkip.blocks((2, 3))
    chain, tree = (
        Decoder(target, draft.having(tree=tree), Fixed(max_tokens=3)).generate(request)
        for tree in (None, PublishedLeaves())
    )
    assert tree.tokens == chain.tokens == write_plainly(target, request).tokens
    assert len(tree.rounds) < len(chain.rounds)


# --- sampled: the target's distribution ---------------------------------------------------------------------------------

Judge = Callable[[Tensor, Leaves, Tensor, Tensor, torch.Generator], Tensor]
SIZE = 5


def random_distributions(*shape: int, seed: int) -> Tensor:
    return torch.softmax(1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


# The target's and the draft's distribution of the first, second and third token, given those before it.
TARGET = [random_distributions(*[SIZE] * (n + 1), seed=10 + n) for n in range(3)]
DRAFT = [random_distributions(*[SIZE] * (n + 1), seed=20 + n) for n in range(2)]
EXPECTED_PAIRS = {
    (first, second): float(TARGET[0][first] * TARGET[1][first, second])
    for first, second in itertools.product(range(SIZE), repeat=2)
}


def first_two_tokens(judge: Judge, counts: Sequence[int], seed: int) -> Counter[Outcome]:
    """Write two tokens many times: a chain of two drafts, with this number of leaves beside each, is judged."""
    generator = torch.Generator().manual_seed(seed)
    outcomes: Counter[Outcome] = Counter()
    for _ in range(NUM_ROUNDS):
        first = sample_several(DRAFT[0], 1 + counts[0], generator).tolist()
        second = sample_several(DRAFT[1][first[0]], 1 + counts[1], generator).tolist()
        chain, beside = [first[0], second[0]], [*first[1:], *second[1:]]
        paths = [(), (chain[0],), tuple(chain), *((x,) for x in first[1:]), *((chain[0], x) for x in second[1:])]
        q = torch.stack([DRAFT[0], DRAFT[1][chain[0]]])
        p = torch.stack([TARGET[len(path)][path] for path in paths])
        leaves = Leaves(torch.tensor(beside), counts)
        num_accepted, leaf, token, after, *_ = judge(torch.tensor(chain), leaves, q, p, generator).tolist()
        text = [*chain[:num_accepted], token, *([after] if leaf >= 0 else [])]
        if len(text) == 1:
            text.append(int(torch.multinomial(TARGET[1][text[0]], 1, generator=generator)))
        outcomes[text[0], text[1]] += 1
    return outcomes


@pytest.mark.parametrize("counts", [(2, 1), (0, 3), (4, 4)])
def test_sampled_leaves_keep_the_distribution(counts: tuple[int, int]) -> None:
    assert p_value(first_two_tokens(accept_leaf_sampled, counts, seed=1), EXPECTED_PAIRS) > ALPHA


def wrong_order(drafted: Tensor, leaves: Leaves, q: Tensor, p: Tensor, generator: torch.Generator) -> Tensor:
    """Wrong: q keeps the rejected candidates, as if leaves were drawn with replacement."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(acceptance, "_without", lambda probabilities, token_ids: probabilities)
        return accept_leaf_sampled(drafted, leaves, q, p, generator)


def wrong_residual(drafted: Tensor, leaves: Leaves, q: Tensor, p: Tensor, generator: torch.Generator) -> Tensor:
    """Wrong: a rejection leaves the target's distribution as it is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(acceptance, "_residual", lambda target, draft: target)
        return accept_leaf_sampled(drafted, leaves, q, p, generator)


@pytest.mark.parametrize("wrong", [wrong_order, wrong_residual])
def test_wrong_acceptance_of_leaves_fails_the_same_test(wrong: Judge) -> None:
    assert p_value(first_two_tokens(wrong, (2, 1), seed=1), EXPECTED_PAIRS) < 1e-6


def test_sampled_texts_with_leaves_are_distributed_as_the_model() -> None:
    target, processors = sampling_target(), "temperature, penalty and top-k"
    tree = SizedLeaves(least_gain=0.05, max_leaves=3)
    drafter = given(build_drafter(target, LayerSkip(skip_attention=(0, 1), tree=tree)))
    request = request_for(processors, Sampling(torch.Generator().manual_seed(7)))
    counts = Counter(first_tokens(speculative(target, drafter, Controller(3), request)) for _ in range(NUM_SEQUENCES))
    assert p_value(counts, exact_distribution(processors)) > ALPHA


# --- shapes of trees ----------------------------------------------------------------------------------------------------


def test_leaves_are_counted_where_they_pay() -> None:
    seen = [SeenDepth(0.5, (0.5, 0.3, 0.1, 0.01)), SeenDepth(0.96, (0.96, 0.03)), SeenDepth(0.4, (0.6, 0.4))]
    assert FixedLeaves(leaves=3).counts(seen, is_greedy=True) == [3, 3, 3]
    assert PublishedLeaves().counts(seen, is_greedy=True) == [9, 2, 7]
    assert PublishedLeaves().counts(seen, is_greedy=False) == [9, 0, 4]
    # Reached: 1, 0.5, 0.48; the last depth gains 0.48 * 0.4.
    assert SizedLeaves(least_gain=0.05).counts(seen, is_greedy=True) == [2, 0, 1]
    assert SizedLeaves(least_gain=0.05, max_leaves=2).counts(seen, is_greedy=True) == [2, 0, 0]


def test_copies_have_no_leaves_and_a_lookup_alone_takes_none() -> None:
    target, request = target_of("llama"), Request(some_tokens(4) * 4, Ending(NUM_NEW_TOKENS))
    draft = LayerSkip(skip_mlp=(1,), lookup=Lookup(max_tokens=2), tree=FixedLeaves())
    rounds = Decoder(target, draft, Fixed(max_tokens=2)).generate(request).rounds
    assert any(each.looked_up for each in rounds)
    assert all(not each.num_leaves for each in rounds if each.looked_up)
    with pytest.raises(ValueError, match="takes no tree"):
        PromptLookup().having(tree=FixedLeaves())


def test_batches_decode_chains() -> None:
    target = target_of("llama")
    decoder = Decoder(target, LayerSkip.blocks((2, 3)).having(tree=FixedLeaves()), Fixed(max_tokens=3))
    requests = [Request(some_tokens(5, seed), Ending(NUM_NEW_TOKENS)) for seed in range(2)]
    batch = decoder.generate_batch(requests).generations
    assert not any(each.num_leaves for generation in batch for each in generation.rounds)
    assert [generation.tokens for generation in batch] == [write_plainly(target, each).tokens for each in requests]


def test_bit_exact_passes_take_no_tree() -> None:
    target = Target(build("llama"), partial(StaticRunner, compiled=False, exact_width=8))
    with pytest.raises(UnsupportedModelError, match="bit-exact passes verify chains only"):
        check_draft(target, LayerSkip(tree=FixedLeaves()))
