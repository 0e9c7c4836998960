"""Times passes on the paths that decoding runs: draft steps by the drafter, verifications by the target and its resuming views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from decoding.acceptance import Greedy
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller, Looking
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.lockstep import Lockstep
from decoding.target import Target
from decoding.text import Shaping, TokenSequence
from decoding.timing.stopwatch import Clock, Stopwatch
from studies.costs.terms import DraftStep, Pass

MOST_STEPS = 8
"""Tokens drafted in a row at most. As in decoding, a step finds in the processor's caches what the step before has left."""


class PassTimer:
    """Seconds of a pass, each from the same state behind a prompt of random tokens. Views and prompts are kept for the next time.

    `most_tokens`, at least 2, are the most positions of a pass. With `num_texts` above 1 a pass is one of so many texts in step,
    all behind as many tokens. Call within `torch.inference_mode`.
    """

    def __init__(self, target: Target, *, most_tokens: int, seed: int, clock: Clock, num_texts: int = 1) -> None:
        self._target, self._watch = target, Stopwatch(target.device, clock)
        self._room, self._seed, self._num_texts = most_tokens, seed, num_texts
        self._drafter = cache(lambda skip: LayerSkipDrafter(target, skip))
        self._resume = cache(lambda boundary: target.resume_view(boundary))
        self._behind = cache(self._read)
        self._prepared = set[Pass]()

    def __call__(self, each: Pass) -> float:
        """Seconds of one pass; of a draft step the mean over as many as take about as long as a pass of the whole model.

        Times are the more often undisturbed the shorter they are: only of equal lengths is the least of several comparable.
        """
        if self._target.runner.block_call is not None and each not in self._prepared:
            self._prepared.add(each)
            self._time(each)  # the first pass of a fixed shape makes it ready
        return self._time(each)

    def _time(self, each: Pass) -> float:
        places = self._behind(int(each.context))
        if isinstance(each, DraftStep):
            return self._draft(each, places)
        if each.boundary and each.width > 1:
            return self._resumed(each.width, each.boundary, places)
        return self._seconds(
            places, lambda place: self._target.forward(place.ahead(each.width), place.cache, place.start)
        )

    def _draft(self, each: DraftStep, places: _Places) -> float:
        skip, num_sublayers = each.skip, 2 * self._target.num_layers
        drafter = self._drafter(skip)
        run = num_sublayers - len(skip.skip_attention) - len(skip.skip_mlp)
        steps = min(round(num_sublayers / max(run, 1)), MOST_STEPS, self._room - 1)

        def draft(place: _Place) -> None:
            controller = Looking(steps) if each.looks else Controller(steps)
            drafter.draft(place.text, place.cache, controller, Shaping(), Greedy(), steps)

        return self._seconds(places, draft) / steps

    def _resumed(self, width: int, boundary: int, places: _Places) -> float:
        view, states = self._resume(boundary), places.states(boundary, self._room)

        def verify(place: _Place) -> None:
            view.forward(place.ahead(width), place.cache, place.start, states[place][..., : width - 1, :])

        return self._seconds(places, verify)

    def _seconds(self, places: _Places, work: Callable[[_Place], object]) -> float:
        return self._watch.time(lambda: places.all(work))

    def _read(self, context: int) -> _Places:
        stream, length = torch.Generator().manual_seed(self._seed), context + self._room
        texts = [
            torch.randint(self._target.config.vocab_size, (length,), generator=stream).tolist()
            for _ in range(self._num_texts)
        ]
        return _Places(self._target, texts, context)


class _Place:
    """A text whose last token the model has not read, tokens behind it, and what the model has read of it."""

    def __init__(self, target: Target, token_ids: Sequence[int], behind: Sequence[int], cache: KVCache) -> None:
        self.text = TokenSequence(token_ids, len(token_ids) + len(behind), target.device)
        self.text.write_drafts(behind)
        self.start = len(token_ids) - 1
        self.cache = cache

    def ahead(self, width: int) -> Tensor:
        """The next `width` tokens, [1, width]."""
        return self.text.span(self.start, self.start + width)


class _Places:
    """Texts in step, each with `context` tokens that the model has read."""

    def __init__(self, target: Target, texts: Sequence[Sequence[int]], context: int) -> None:
        self._target = target
        capacity = len(texts[0])
        self._lockstep = Lockstep(target, len(texts), capacity)
        self._states: dict[int, dict[_Place, Tensor]] = {}
        caches = [self._lockstep.new_cache(row, capacity) for row in range(len(texts))]
        self._places = [
            _Place(target, text[: context + 1], text[context + 1 :], cache)
            for text, cache in zip(texts, caches, strict=True)
        ]

        def read(place: _Place) -> None:
            target.forward(place.text.span(0, place.start), place.cache, 0, last_only=True)
            place.cache.length = place.start

        self.all(read)

    def all(self, work: Callable[[_Place], object]) -> None:
        """Do this with each of the texts, in step."""
        self._lockstep.run_to_end([partial(work, place) for place in self._places])

    def states(self, boundary: int, width: int) -> dict[_Place, Tensor]:
        """What stands in front of block `boundary` at the next `width` positions of each text, [.., width, hidden]."""
        if boundary not in self._states:
            view, states = self._target.tapped_view(boundary), dict[_Place, Tensor]()

            def keep(place: _Place) -> None:
                _, states[place] = view.forward(place.ahead(width), place.cache, place.start)

            self.all(keep)
            self._states[boundary] = states
        return self._states[boundary]
