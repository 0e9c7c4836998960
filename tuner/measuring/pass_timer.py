"""Times passes along the code paths of decoding: draft steps by the drafter, verifications by the target and its views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from decoding.acceptance import Greedy
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller, Looking
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import LayerSkip
from decoding.lockstep import Lockstep
from decoding.target import DraftVocabulary, ResumeView, TappedView, Target
from decoding.text import Shaping, TokenSequence
from decoding.timing.stopwatch import ReadSeconds, Stopwatch
from studies.costs.terms import DraftStep, Pass

MOST_STEPS = 8
"""Most tokens drafted in a row. As in decoding, a step finds the processor's caches as the previous step left them."""


class PassTimer:
    """Times passes, each from the same state after a prompt of random tokens. Views and prompts are kept until `close`.

    `most_tokens`, at least 2, are the most positions of a pass. With `num_sequences` above 1 a pass runs that many sequences in
    lockstep, all after the same number of tokens. Call within `torch.inference_mode`.
    """

    def __init__(
        self, target: Target, *, most_tokens: int, seed: int, clock: ReadSeconds, num_sequences: int = 1
    ) -> None:
        self._target, self._watch = target, Stopwatch(target.device, clock)
        self._room, self._seed, self._num_texts = most_tokens, seed, num_sequences
        # Plain dictionaries: a cached method would refer to itself, and keep all this until a garbage collection.
        self._drafters: dict[tuple[LayerSkip, int | None], LayerSkipDrafter] = {}
        self._views: dict[int, ResumeView] = {}
        self._batches: dict[int, _Batch] = {}
        self._prepared = set[Pass]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the views and prompts, and with them their recordings and memory."""
        for kept in (self._drafters, self._views, self._batches, self._prepared):
            kept.clear()

    def __call__(self, each: Pass) -> float:
        """Return the seconds of one pass; for a draft step, the mean over about as many steps as last a pass of the whole model.

        Shorter timings are disturbed less often, so only timings of similar length are comparable.
        """
        if self._target.runner.block_call is not None and each not in self._prepared:
            self._prepared.add(each)
            self._time(each)  # the first pass of a fixed shape makes it ready
        return self._time(each)

    def _time(self, each: Pass) -> float:
        batch = self._batch_after(int(each.context))
        if isinstance(each, DraftStep):
            return self._draft(each, batch)
        if each.boundary and each.width > 1:
            return self._resumed(each.width, each.boundary, batch)
        return self._seconds(
            batch, lambda sequence: self._target.forward(sequence.ahead(each.width), sequence.cache, sequence.start)
        )

    def _draft(self, each: DraftStep, batch: _Batch) -> float:
        skip, num_sublayers = each.skip, 2 * self._target.num_layers
        drafter = self._drafter(skip, each.num_tokens)
        run = num_sublayers - len(skip.skip_attention) - len(skip.skip_mlp)
        steps = min(round(num_sublayers / max(run, 1)), MOST_STEPS, self._room - 1)

        def draft(sequence: _Sequence) -> None:
            controller = Looking(steps) if each.looks else Controller(steps)
            drafter.draft(sequence.text, sequence.cache, controller, Shaping(), Greedy(), steps)

        return self._seconds(batch, draft) / steps

    def _resumed(self, width: int, boundary: int, batch: _Batch) -> float:
        view = self._view(boundary)
        states = batch.states(boundary, self._room)

        def verify(sequence: _Sequence) -> None:
            view.forward(sequence.ahead(width), sequence.cache, sequence.start, states[sequence][..., : width - 1, :])

        return self._seconds(batch, verify)

    def _seconds(self, batch: _Batch, work: Callable[[_Sequence], object]) -> float:
        return self._watch.time(lambda: batch.all(work))

    def _drafter(self, skip: LayerSkip, num_tokens: int | None) -> LayerSkipDrafter:
        key = skip, num_tokens
        if key not in self._drafters:
            vocabulary = num_tokens and DraftVocabulary.of_most_frequent(num_tokens, self._target.config.vocab_size)
            self._drafters[key] = LayerSkipDrafter(self._target, skip, vocabulary=vocabulary or None)
        return self._drafters[key]

    def _view(self, boundary: int) -> ResumeView:
        if boundary not in self._views:
            self._views[boundary] = ResumeView(self._target, boundary)
        return self._views[boundary]

    def _batch_after(self, context: int) -> _Batch:
        """Return the sequences of `context` tokens, read at the first call."""
        if context not in self._batches:
            self._batches[context] = self._read(context)
        return self._batches[context]

    def _read(self, context: int) -> _Batch:
        stream, length = torch.Generator().manual_seed(self._seed), context + self._room
        texts = [
            torch.randint(self._target.config.vocab_size, (length,), generator=stream).tolist()
            for _ in range(self._num_texts)
        ]
        return _Batch(self._target, texts, context)


class _Sequence:
    """A sequence that the model has read up to its last token, the tokens that follow, and its cache."""

    def __init__(self, target: Target, token_ids: Sequence[int], following: Sequence[int], cache: KVCache) -> None:
        self.text = TokenSequence(token_ids, len(token_ids) + len(following), target.device, cache.company)
        self.text.write_drafts(following)
        self.start = len(token_ids) - 1
        self.cache = cache

    def ahead(self, width: int) -> Tensor:
        """Return the next `width` tokens, [1, width]."""
        return self.text.span(self.start, self.start + width)


class _Batch:
    """Sequences in lockstep, each with `context` tokens that the model has read."""

    def __init__(self, target: Target, texts: Sequence[Sequence[int]], context: int) -> None:
        self._target = target
        capacity = len(texts[0])
        self._lockstep = Lockstep(target, len(texts), capacity)
        self._states: dict[int, dict[_Sequence, Tensor]] = {}
        caches = [self._lockstep.new_cache(row, capacity) for row in range(len(texts))]
        self._sequences = [
            _Sequence(target, text[: context + 1], text[context + 1 :], cache)
            for text, cache in zip(texts, caches, strict=True)
        ]

        def read(sequence: _Sequence) -> None:
            target.forward(sequence.text.span(0, sequence.start), sequence.cache, 0, last_only=True)
            sequence.cache.length = sequence.start

        self.all(read)

    def all(self, work: Callable[[_Sequence], object]) -> None:
        """Do the work for every sequence, in lockstep."""
        self._lockstep.run_to_end([partial(work, sequence) for sequence in self._sequences])

    def states(self, boundary: int, width: int) -> dict[_Sequence, Tensor]:
        """Return the input of block `boundary` at the next `width` positions of each sequence, [.., width, hidden]."""
        if boundary not in self._states:
            view, states = TappedView(self._target, boundary), dict[_Sequence, Tensor]()

            def keep(sequence: _Sequence) -> None:
                _, states[sequence] = view.forward(sequence.ahead(width), sequence.cache, sequence.start)

            self.all(keep)
            self._states[boundary] = states
        return self._states[boundary]
