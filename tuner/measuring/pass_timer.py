"""Times passes along the code paths of decoding: draft steps by the drafter, verifications by the target and its views."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from decoding.decode import Request
from decoding.draft_length import Controller, Looking
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import LayerSkip
from decoding.target import DraftVocabulary, ResumeView, TappedView, Target
from decoding.text import Ending
from decoding.timing.passes import Prompted, PromptedBatch
from studies.costs.terms import DraftStep, Pass

MOST_STEPS = 8
"""Most tokens drafted in a row. As in decoding, a step finds the processor's caches as the previous step left them."""


class PassTimer:
    """Times passes, each from the same state after a prompt of random tokens. A context, which keeps views and prompts meanwhile.

    `most_tokens`, at least 2, are the most positions of a pass. With `num_sequences` above 1 a pass runs that many sequences in
    lockstep, all after the same number of tokens. Call within `torch.inference_mode`.
    """

    def __init__(self, target: Target, *, most_tokens: int, seed: int, num_sequences: int = 1) -> None:
        self._target, self._room, self._seed, self._num_texts = target, most_tokens, seed, num_sequences
        # Plain dictionaries: a cached method would refer to itself, and keep all this until a garbage collection.
        self._drafters: dict[tuple[LayerSkip, int | None], LayerSkipDrafter] = {}
        self._views: dict[int, ResumeView] = {}
        self._batches: dict[int, PromptedBatch] = {}
        self._states: dict[tuple[int, int], dict[Prompted, Tensor]] = {}
        self._prepared = set[Pass]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for kept in (self._drafters, self._views, self._batches, self._states, self._prepared):
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
        context = int(each.context)
        if context not in self._batches:
            self._batches[context] = self._read(context)
        batch = self._batches[context]
        if isinstance(each, DraftStep):
            return self._draft(each, batch)
        if each.boundary and each.width > 1:
            return batch.seconds(self._resumed(each.width, each.boundary, context))
        return batch.seconds(
            lambda sequence: self._target.forward(sequence.ahead(each.width), sequence.cache, sequence.cache.length)
        )

    def _read(self, context: int) -> PromptedBatch:
        stream, shape = torch.Generator().manual_seed(self._seed), (self._num_texts, context + self._room)
        texts = [
            torch.randint(self._target.config.vocab_size, shape[1:], generator=stream).tolist() for _ in range(shape[0])
        ]
        return PromptedBatch(self._target, texts, context, shape[1])

    def _draft(self, each: DraftStep, batch: PromptedBatch) -> float:
        skip, num_sublayers = each.skip, 2 * self._target.num_layers
        drafter = self._drafter(skip, each.num_tokens)
        run = num_sublayers - len(skip.skip_attention) - len(skip.skip_mlp)
        steps = min(round(num_sublayers / max(run, 1)), MOST_STEPS, self._room - 1)

        request = Request([0], Ending(steps + 1))

        def draft(sequence: Prompted) -> None:
            controller = Looking(steps) if each.looks else Controller(steps)
            drafter.draft(sequence.text, sequence.cache, controller, request, steps)

        return batch.seconds(draft) / steps

    def _drafter(self, skip: LayerSkip, num_tokens: int | None) -> LayerSkipDrafter:
        key = skip, num_tokens
        if key not in self._drafters:
            vocabulary = num_tokens and DraftVocabulary.of_most_frequent(num_tokens, self._target.config.vocab_size)
            self._drafters[key] = LayerSkipDrafter(self._target, skip, vocabulary=vocabulary or None)
        return self._drafters[key]

    def _resumed(self, width: int, boundary: int, context: int) -> Callable[[Prompted], object]:
        """Return a verification that resumes at block `boundary`."""
        view = self._views.setdefault(boundary, ResumeView(self._target, boundary))
        states = self._states_before(boundary, context)

        def verify(sequence: Prompted) -> None:
            known = states[sequence][..., : width - 1, :]
            view.run(sequence.ahead(width), sequence.cache, sequence.cache.length, known)

        return verify

    def _states_before(self, boundary: int, context: int) -> dict[Prompted, Tensor]:
        """Return the input of block `boundary` at the next positions of each sequence, [.., positions, hidden]."""
        key = boundary, context
        if key not in self._states:
            view, states = TappedView(self._target, boundary), dict[Prompted, Tensor]()

            def keep(sequence: Prompted) -> None:
                tokens = sequence.ahead(self._room)
                found = view.run(tokens, sequence.cache, sequence.cache.length).states
                assert found is not None, "the boundary is tapped"
                states[sequence] = found

            self._batches[context].all(keep)
            self._states[key] = states
        return self._states[key]
