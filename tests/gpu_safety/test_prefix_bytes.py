"""Weights that a verification reads: prefix reuse saves none of them where only the last position is new.

On a GPU a pass of a few positions takes as long as reading the weights. There, running the blocks before the boundary on
one position in place of all saves nothing; leaving them out altogether does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from decoding.cache.kv_cache import KVCache
from decoding.target import ResumeView, TappedView, Target
from tests.support.tiny import tiny_target

NUM_READ, WIDTH, BOUNDARY = 9, 5, 4


def bytes_read(model: nn.Module, run: Callable[[], object]) -> int:
    """Return the bytes of the weights that `run` reads, each counted once."""
    read: dict[int, int] = {}

    def note(module: nn.Module, *_: object) -> None:
        read.update({id(each): each.nbytes for each in module.parameters(recurse=False)})

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return sum(read.values())


@pytest.fixture
def target() -> Target:
    return tiny_target()


def read_prompt(target: Target) -> tuple[torch.Tensor, KVCache, torch.Tensor]:
    """Return the tokens to verify, a cache that holds those before, and the states of all at the boundary."""
    token_ids = torch.arange(NUM_READ + WIDTH)[None] % target.config.vocab_size
    cache = target.new_cache(NUM_READ + WIDTH)
    target.forward(token_ids[:, :NUM_READ], cache, 0)
    following = token_ids[:, NUM_READ:]
    states = TappedView(target, BOUNDARY).run(following, cache, NUM_READ).states
    assert states is not None
    return following, cache, states


@torch.inference_mode()
def test_only_a_verification_whose_last_state_is_known_reads_fewer_weights(target: Target) -> None:
    following, cache, states = read_prompt(target)
    view: ResumeView = ResumeView(target, BOUNDARY)
    whole = bytes_read(target.model, lambda: target.forward(following, cache, NUM_READ))
    but_last = bytes_read(target.model, lambda: view.run(following, cache, NUM_READ, states[..., : WIDTH - 1, :]))
    known = bytes_read(target.model, lambda: view.run(following, cache, NUM_READ, states))
    of_block = sum(weight.nbytes for weight in target.blocks[0].parameters())
    assert but_last == whole
    assert known == whole - BOUNDARY * of_block
