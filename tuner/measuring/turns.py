"""Paired measurement of contenders: real decoding of the same prompts in turns, each result beside plain decoding's.

Searches, races, confirmations, `sdtune bench` and engines all measure by this. It knows neither what the contenders are nor what
their speeds are worth: it times, compares tokens, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from decoding.losslessness import Comparison
from decoding.memory import without_garbage_collection
from studies.contract import Candidate
from studies.measurement import BatchTexts, Measurement, PairedPrefill, PromptSample, sum_repeats
from tuner.measuring.baseline import Baseline
from tuner.measuring.contender import PLAIN, Contender, Decoded, Prompts, reason_of

WARM_UP_TOKENS = 8
"""Tokens that a contender decodes before it is timed, so that one-off work (compiling, measuring) is done."""

OnSample = Callable[[PromptSample], None]
OnTurn = Callable[[int, Mapping[str, Decoded]], None]
"""Receives the index of a batch, and what each contender decoded for it; may raise to stop."""
Texts = Mapping[str, tuple[int, ...]]
"""The sequences that the contenders decoded for one prompt in one turn, by name."""
Judge = Callable[[str, int, Texts], Comparison]
"""Compares the sequence of a contender, by name, for the prompt of a row, with that of plain decoding."""


class Measuring(Protocol):
    """Measures candidates against plain decoding on prompts, or on batches of them: what searches, races and benchmarks ask for."""

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the measurable prompts or batches."""

    def measure(self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = ...) -> Measurement:
        """Measure a candidate at these indices; `on_sample` receives each sample and may raise to stop."""

    def side_by_side(
        self, candidates: Sequence[Candidate], indices: Sequence[int], on_sample: OnSample = ...
    ) -> list[Measurement]:
        """Measure several candidates at these indices, in turns where they can run in one process."""

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate with its rule warmed up at these indices, if the rule is adaptive."""


class Interleaved:
    """Contenders that decode the same batches in turns. One that fails is dropped with the reason, if it may."""

    def __init__(self, contenders: Sequence[Contender], *, may_fail: Collection[str] = ()) -> None:
        self.running: dict[str, Contender] = {each.name: each for each in contenders}
        self.left_out: dict[str, str] = {}
        """Names of dropped contenders, with the reasons."""
        self._may_fail = may_fail

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        """Let every contender prepare for all batches."""
        for name, contender in list(self.running.items()):
            with self._leaving_out(name):
                contender.prepare(batches, max_new_tokens)

    def warm_up(self, batches: Sequence[Prompts]) -> None:
        """Let every contender decode a few tokens after these prompts, so that one-off work is done before it is timed."""
        for prompts in batches:
            for name, contender in list(self.running.items()):
                with self._leaving_out(name):
                    contender.decode(prompts, WARM_UP_TOKENS)

    def take(
        self, batches: Sequence[tuple[int, Prompts]], max_new_tokens: int, on_turn: OnTurn, *, first: int = 0
    ) -> None:
        """Let every contender decode every batch, given with its index, in an order that rotates by one from batch to batch.

        The contender number `first` goes first on the first batch. All decode a batch before the next one begins: their
        differences are differences on the same prompts at nearly the same time, and no contender always goes first. Python's
        garbage collector does not run meanwhile.
        """
        names = list(self.running)
        with without_garbage_collection():
            for turn, (index, prompts) in enumerate(batches, start=first):
                begins, done = turn % len(names), dict[str, Decoded]()
                for name in (*names[begins:], *names[:begins]):
                    if name in self.running:
                        with self._leaving_out(name):
                            done[name] = self.running[name].decode(prompts, max_new_tokens)
                on_turn(index, done)

    @contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as cause:  # code of others on a model of any family may fail in any way: the reason is shown
            if name not in self._may_fail:
                raise
            self.left_out[name] = reason_of(cause)
            del self.running[name]


class PairedBench:
    """Prompts, or batches of them, on which contenders are measured in turns with plain decoding."""

    def __init__(self, baseline: Baseline, judge: Judge) -> None:
        self.baseline = baseline
        self._judge = judge

    @property
    def indices(self) -> range:
        """Indices of the measurable prompts, or of their batches."""
        return self.baseline.indices

    @property
    def batch_size(self) -> int:
        """Number of prompts decoded in lockstep."""
        return self.baseline.batch_size

    @property
    def max_new_tokens(self) -> int:
        """Number of tokens after which a sequence ends."""
        return self.baseline.ending.max_new_tokens

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the prompts."""
        return self.baseline.prompts

    @property
    def continuations(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the plain greedy continuations; empty if they are not known."""
        return self.baseline.continuations

    def batch(self, index: int) -> Prompts:
        """Return the prompts of batch `index`."""
        return [self.prompts[row] for row in self.baseline.members(index)]

    def compete(
        self,
        turns: Interleaved,
        indices: Sequence[int],
        on_samples: Callable[[Mapping[str, PromptSample]], None] = lambda samples: None,
        *,
        repeats: int = 1,
        plain_too: bool = False,
    ) -> dict[str, Measurement]:
        """Measure contenders beside `PLAIN`, one of them, at these indices; return the measurements of those that did not fail.

        `on_samples` receives the samples of a batch as soon as they are complete, and may raise to stop. With `repeats` all
        indices are gone over as often, and the samples of an index are added up. With `plain_too` there is a measurement of
        plain decoding itself, whose speed-up is 1.
        """
        samples: dict[str, list[PromptSample]] = {name: [] for name in turns.running if plain_too or name != PLAIN}

        def keep(index: int, done: Mapping[str, Decoded]) -> None:
            found = {name: self._sample(name, index, done) for name in samples if name in done}
            for name, sample in found.items():
                samples[name].append(sample)
            on_samples(found)

        batches = [(index, self.batch(index)) for index in indices]
        for repeat in range(repeats):  # each begins with another contender
            turns.take(batches, self.max_new_tokens, keep, first=repeat)
        return {name: sum_repeats(each) for name, each in samples.items() if name in turns.running}

    def _sample(self, name: str, index: int, done: Mapping[str, Decoded]) -> PromptSample:
        plain, own = done[PLAIN], done[name]
        texts = self._compared(name, index, done)
        identical = texts.identical == texts.count
        return PromptSample(
            prompt=index,
            plain_seconds=plain.decode_seconds,
            plain_tokens=plain.decode_tokens,
            draft_seconds=own.decode_seconds,
            draft_tokens=own.decode_tokens,
            drafting_seconds=own.drafting_seconds,
            rounds=own.rounds,
            drafted=own.drafted,
            accepted=own.accepted,
            waited_seconds=None
            if plain.waited_seconds is None or own.waited_seconds is None
            else plain.waited_seconds + own.waited_seconds,
            accepted_lengths=own.accepted_lengths,
            prefill=PairedPrefill(
                plain_seconds=plain.prefill_seconds,
                plain_tokens=plain.prefill_tokens,
                draft_seconds=own.prefill_seconds,
                draft_tokens=own.prefill_tokens,
            ),
            category=self.baseline.category(index),
            identical=identical,
            tie=not identical and texts.identical + texts.ties == texts.count,
            float32_tie=0 < texts.float32_ties == texts.count - texts.identical - texts.ties,
            batch=texts if self.batch_size > 1 else None,
        )

    def _compared(self, name: str, index: int, done: Mapping[str, Decoded]) -> BatchTexts:
        found = [
            self._judge(name, row, {other: each.texts[place] for other, each in done.items()})
            for place, row in enumerate(self.baseline.members(index))
        ]
        return BatchTexts(
            count=len(found),
            identical=sum(each.identical for each in found),
            ties=sum(each.tie for each in found),
            float32_ties=sum(each.float32_tie for each in found),
        )
