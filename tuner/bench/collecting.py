"""Collects the samples of a contest and compares every sequence with its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decoding.losslessness import Comparison, compare
from decoding.target import Target
from tuner.bench.contenders import PLAIN
from tuner.bench.sample import TextSample
from tuner.contest.contest import Contender, Contest, OnBatch, Prompts
from tuner.measuring.recording import TimedBatch


class InterruptedContestError(KeyboardInterrupt):
    """A contest was interrupted. `samples` by contender are those of the batches that all of them had continued."""

    def __init__(self, samples: Mapping[str, Sequence[TextSample]], left_out: Mapping[str, str]) -> None:
        super().__init__("interrupted")
        self.samples, self.left_out = samples, left_out


class SampleCollector:
    """Samples by contender, in the order of measurement.

    A sequence is compared with the first one that its reference contender wrote for the same prompt (`Contender.same_as`). For the
    others the reference is plain decoding: `plain` if given, else the first sequence of the contender `plain`.
    """

    def __init__(
        self,
        target: Target,
        prompts: Prompts,
        contenders: Mapping[str, Contender],
        *,
        batch_size: int,
        plain: Sequence[tuple[int, ...]] = (),
        categories: Sequence[str | None] = (),
    ) -> None:
        self.samples: dict[str, list[TextSample]] = {name: [] for name in contenders}
        self._target = target
        self._prompts = prompts
        self._batch_size = batch_size
        self._categories = categories or [None] * len(prompts)
        self._same_as = {name: each.same_as for name, each in contenders.items()}
        self._first_written = {(PLAIN, index): tokens for index, tokens in enumerate(plain)}

    def hold(
        self,
        contest: Contest,
        batches: Sequence[Prompts],
        *,
        max_new_tokens: int,
        repeats: int = 1,
        on_batch: OnBatch = lambda index, repeat, results: None,
    ) -> None:
        """Hold the contest on `batches` and collect its samples; `on_batch` hears of each batch after that.

        Raises `InterruptedContestError` for a `KeyboardInterrupt`.
        """

        def collect(index: int, repeat: int, results: Mapping[str, TimedBatch]) -> None:
            self.add(index, repeat, results)
            on_batch(index, repeat, results)

        try:
            contest.hold(batches, max_new_tokens=max_new_tokens, repeats=repeats, on_batch=collect)
        except KeyboardInterrupt:
            raise InterruptedContestError(self.samples, contest.left_out) from None

    def add(self, index: int, repeat: int, batches: Mapping[str, TimedBatch]) -> None:
        """Add the sequences that each contender wrote for batch `index`."""
        first = index * self._batch_size
        for name, batch in batches.items():
            for row, sequence in enumerate(batch.sequences):
                self._first_written.setdefault((name, first + row), sequence.tokens)
        for name, batch in batches.items():
            for row, sequence in enumerate(batch.sequences):
                prompt = first + row
                comparison = self._compare(name, prompt, sequence.tokens)
                length = len(self._prompts[prompt])
                category = self._categories[prompt]
                sample = TextSample.of(prompt, repeat, length, batch, row, comparison, category)
                self.samples[name].append(sample)

    def _compare(self, name: str, prompt: int, tokens: tuple[int, ...]) -> Comparison:
        if (other := self._same_as[name]) is not None:
            return Comparison(identical=self._first_written.get((other, prompt)) == tokens)
        return compare(self._target, self._prompts[prompt], self._first_written[PLAIN, prompt], tokens)
