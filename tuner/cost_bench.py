"""Times passes on the paths that decoding runs: draft steps by the drafter, verifications by the target and its resuming views."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from decoding.acceptance import Greedy
from decoding.draft_length import Controller
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.profile import LayerSkip
from decoding.round_costs import Clock
from decoding.target import ResumeView, Target
from decoding.text import Shaping, Text
from studies.cost_terms import DraftStep, Pass

MOST_STEPS = 8
"""Tokens drafted in a row at most. As in decoding, a step finds in the processor's caches what the step before has left."""


class PassTimer:
    """Seconds of a pass, each from the same state behind a prompt of random tokens. Views and prompts are kept for the next time.

    `most_tokens`, at least 2, are the most positions of a pass. Call within `torch.inference_mode`.
    """

    def __init__(self, target: Target, *, most_tokens: int, seed: int, clock: Clock) -> None:
        self._target, self._clock = target, clock
        self._room, self._seed = most_tokens, seed
        self._drafter = cache(lambda skip: LayerSkipDrafter(target, skip))
        self._resume = cache(lambda boundary: target.resume_view(boundary))
        self._behind = cache(self._read)

    def __call__(self, each: Pass) -> float:
        """Seconds of one pass; of a draft step the mean over as many as take about as long as a pass of the whole model.

        Times are the more often undisturbed the shorter they are: only of equal lengths is the least of several comparable.
        """
        place = self._behind(int(each.context))
        if isinstance(each, DraftStep):
            return self._draft(each.skip, place)
        token_ids = place.text.span(place.start, place.start + each.width)
        if each.boundary and each.width > 1:
            states = place.states(self._target, each.boundary, self._room)[..., : each.width - 1, :]
            return self._verify(self._resume(each.boundary), place, token_ids, states)
        start = self._now()
        self._target.forward(token_ids, place.cache, place.start)
        return self._now() - start

    def _draft(self, skip: LayerSkip, place: _Place) -> float:
        drafter, num_sublayers = self._drafter(skip), 2 * self._target.num_layers
        run = num_sublayers - len(skip.skip_attention) - len(skip.skip_mlp)
        steps = min(round(num_sublayers / max(run, 1)), MOST_STEPS, self._room - 1)
        start = self._now()
        drafter.draft(place.text, place.cache, Controller(steps), Shaping(), Greedy(), steps)
        return (self._now() - start) / steps

    def _verify(self, view: ResumeView, place: _Place, token_ids: Tensor, states: Tensor) -> float:
        start = self._now()
        view.forward(token_ids, place.cache, place.start, states)
        return self._now() - start

    def _read(self, context: int) -> _Place:
        stream = torch.Generator().manual_seed(self._seed)
        token_ids = torch.randint(self._target.config.vocab_size, (context + self._room,), generator=stream).tolist()
        return _Place(self._target, token_ids[: context + 1], token_ids[context + 1 :])

    def _now(self) -> float:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        return self._clock()


class _Place:
    """A text whose last token the model has not read, tokens behind it, and what the model has read of it."""

    def __init__(self, target: Target, token_ids: Sequence[int], behind: Sequence[int]) -> None:
        self.text = Text(token_ids, len(token_ids) + len(behind), target.device)
        self.text.write_drafts(behind)
        self.start = len(token_ids) - 1
        self.cache = target.new_cache(len(token_ids) + len(behind))
        target.forward(self.text.span(0, self.start), self.cache, 0, last_only=True)
        self.cache.length = self.start
        self._states: dict[int, Tensor] = {}

    def states(self, target: Target, boundary: int, width: int) -> Tensor:
        """What stands in front of block `boundary` at the next `width` positions, [.., width, hidden]."""
        if boundary not in self._states:
            token_ids = self.text.span(self.start, self.start + width)
            _, self._states[boundary] = target.tapped_view(boundary).forward(token_ids, self.cache, self.start)
        return self._states[boundary]
