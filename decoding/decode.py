"""The two decoding loops: plain, and speculative as draft, verify, accept, roll back.

Both yield one record per round and own nothing but the sequence and its cache. They do not know where prompts come
from, nor how anything is measured or tuned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from decoding.acceptance import accept_greedy
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal, read_prompt
from decoding.rounds import Prefill, Round
from decoding.runners.contract import Outputs
from decoding.target import Target
from decoding.text import Request, TokenSequence

__all__ = ["NewCache", "ReadPrompt", "Request", "autoregressive", "capacity_for", "judge", "speculative"]


NewCache = Callable[[int], KVCache]
"""Makes an empty cache for a sequence of at most the given number of tokens."""
ReadPrompt = Callable[[TokenSequence, KVCache], Tensor]
"""Runs the model over a prompt and returns the logits [1, vocabulary] after it."""


@torch.inference_mode()
def autoregressive(
    target: Target, request: Request, new_cache: NewCache | None = None, read: ReadPrompt | None = None
) -> Iterator[Prefill | Round]:
    """Decode plainly: one token of the target per round. Yields the prefill first.

    `new_cache` makes the sequence's cache; the default is the target's own. `read` replaces the pass over the
    prompt.
    """
    read = read or partial(read_prompt, target)
    sequence, cache = _begin(target, request, new_cache)
    prefill, ended = _prefill(lambda: read(sequence, cache), request, sequence, cache)
    yield prefill
    while not ended:
        start = time.perf_counter()
        token_ids = sequence.span(cache.length, sequence.length)
        outputs = target.run(target.whole, token_ids, cache, cache.length, last_only=True)
        token = request.choose(sequence, outputs)
        sequence.write(0, token)
        cache.length = sequence.length
        tokens, ended = request.ending.append(sequence, sequence.read(token))
        yield Round(tokens, num_drafted=0, num_accepted=0, seconds=time.perf_counter() - start, draft_seconds=0.0)
    _keep(request, sequence, cache)


@torch.inference_mode()
def speculative(
    target: Target,
    drafter: Drafter,
    controller: Controller,
    request: Request,
    new_cache: NewCache | None = None,
) -> Iterator[Prefill | Round]:
    """Decode speculatively: the same tokens as `autoregressive` (or the same distribution) in fewer rounds.

    Yields the prefill first. `controller` observes every round that it steers; pass a fresh one to start without
    history.
    """
    if drafter.has_head:
        request = replace(request, known=None)
    sequence, cache = _begin(target, request, new_cache, max_drafted=controller.max_tokens)
    prefill, ended = _prefill(lambda: drafter.prefill(sequence, cache), request, sequence, cache)
    yield prefill
    while not ended:
        start = time.perf_counter()
        # The last token is always the target's: a draft for it would be discarded.
        limit = request.ending.remaining(sequence) - 1
        if (widest := target.widest_pass(cache.length)) is not None:
            limit = min(limit, widest - 1)
        draft = drafter.draft(sequence, cache, controller, request, limit)
        drafted_at = time.perf_counter()
        if draft.num_tokens == 0 and request.takes_most_likely:
            num_accepted, chosen = _settle_plain(request, sequence, cache, drafter.verify(sequence, cache, draft))
        else:
            verdict = judge(request, sequence, draft, drafter.verify(sequence, cache, draft))
            num_accepted, chosen = _settle(sequence, cache, verdict)
        tokens, ended = request.ending.append(sequence, chosen)
        if draft.steered:
            controller.observe(draft.num_tokens, num_accepted)
        yield Round(
            tokens,
            num_drafted=draft.num_tokens,
            num_accepted=len(chosen) - 1,
            seconds=time.perf_counter() - start,
            draft_seconds=drafted_at - start,
            looked_up=draft.looked_up,
        )
    _keep(request, sequence, cache)


def judge(request: Request, sequence: TokenSequence, draft: Proposal, outputs: Outputs) -> Tensor:
    """Return the verdict [2 + num_tokens] on a draft by its verification (see `decoding.acceptance`)."""
    if request.takes_most_likely and outputs.verdict is not None:
        return outputs.verdict
    drafted = sequence.written(sequence.length, sequence.length + draft.num_tokens)[0]
    if request.takes_most_likely:
        return accept_greedy(drafted, outputs.choices)
    return request.acceptance.accept(drafted, draft.probabilities, request.shaping.all(sequence, outputs.logits))


def _settle_plain(
    request: Request, sequence: TokenSequence, cache: KVCache, outputs: Outputs
) -> tuple[int, Sequence[int]]:
    """Write the most likely token of a round that drafted nothing, at the cost of a plain step: there is nothing to judge."""
    token = request.choose(sequence, outputs)
    sequence.write(0, token)
    cache.roll_back(sequence.length)
    return 0, sequence.read(token)


def _settle(sequence: TokenSequence, cache: KVCache, verdict: Tensor) -> tuple[int, Sequence[int]]:
    """Write the token after the accepted drafts; return their number, and all tokens of the round."""
    num_accepted, token, *drafted = sequence.read(verdict)
    sequence.write(num_accepted, verdict[1:2])
    cache.roll_back(sequence.length + num_accepted)
    return num_accepted, [*drafted[:num_accepted], token]


def capacity_for(target: Target, request: Request, max_drafted: int) -> int:
    """Return the number of positions that a sequence may reach, drafts included."""
    if target.runner.exact_width is not None:
        # Also for plain decoding: the number of keys read is part of a pass's shape.
        max_drafted = target.runner.exact_width
    return len(request.prompt) + request.ending.max_new_tokens + max_drafted + 1


def _begin(
    target: Target, request: Request, new_cache: NewCache | None, max_drafted: int = 0
) -> tuple[TokenSequence, KVCache]:
    capacity = capacity_for(target, request, max_drafted)
    cache = (new_cache or target.new_cache)(capacity)
    cache.only_best = request.takes_most_likely
    if request.turns is not None:
        request.turns.load(cache)
    sequence = TokenSequence(request.prompt, capacity, target.device, cache.company, request.history, request.known)
    return sequence, cache


def _keep(request: Request, sequence: TokenSequence, cache: KVCache) -> None:
    """Hand the positions of the sequence to the next turn: all but the last token's, which no pass has read."""
    if request.turns is not None:
        cache.roll_back(sequence.length - 1)
        request.turns.store(cache)


def _prefill(
    read: Callable[[], Tensor], request: Request, sequence: TokenSequence, cache: KVCache
) -> tuple[Prefill, bool]:
    known = request.known
    recalls = known is not None and known.is_read
    start = time.perf_counter()
    token = request.choose(sequence, Outputs(read(), None))
    sequence.write(0, token)
    cache.length = sequence.length
    tokens, ended = request.ending.append(sequence, sequence.read(token))
    seconds = time.perf_counter() - start
    if known is not None:
        if recalls:
            seconds += known.seconds
        else:
            known.seconds = seconds
    return Prefill(tokens[0], seconds), ended
