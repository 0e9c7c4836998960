"""Candidate trees: how many side leaves each shape takes, and what else there is to them than the grid of `test_lossless` shows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from decoding.cache.kv_cache import KVCache
from decoding.decode import Request, speculative
from decoding.decoder import Decoder
from decoding.draft_length import Controller, Fixed
from decoding.drafters.build import check_draft
from decoding.drafts import (
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
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from tests.support.families import build, some_tokens, target_of
from tests.support.generations import write_plainly
from tests.support.grid import PROMPTS
from tests.support.heads import write_heads

NUM_NEW_TOKENS = 16


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
        assert decoder.drafter is not None
        caches.append(target.new_cache(100))
        steps = list(speculative(target, decoder.drafter, Controller(3), request, lambda _: caches[-1]))
        num_rounds.append(len(steps))
        tokens = [token for step in steps if isinstance(step, Round) for token in step.tokens]
        assert tokens == list(write_plainly(target, request).tokens[1:])
    assert num_rounds[1] < num_rounds[0], "leaves are accepted"
    read = min(each.branch.length for each in caches)
    for name in ("keys", "values"):
        chain, tree = (getattr(each.branch.layers[-1], name)[:, :, :read] for each in caches)
        torch.testing.assert_close(tree, chain, atol=1e-4, rtol=1e-4)


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
