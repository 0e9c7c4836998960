"""A draft in an engine, measured at several numbers of requests side by side, in turns with the engine's plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from studies.measurement import BatchTexts, Measurement, PromptSample
from tuner.engines.together import continue_together
from tuner.errors import ConfigError
from tuner.measuring.baseline import FEWEST_DECODED

if TYPE_CHECKING:
    from decoding.losslessness import Comparison
    from tuner.engines.contract import EngineProgram
    from tuner.engines.loopback import Client
    from tuner.engines.paired import Compare
    from tuner.engines.together import RequestRound

FEWEST_ROUNDS = 2
"""Rounds that an interval needs."""
Pair = tuple["RequestRound", "RequestRound"]
"""A group continued plainly, and with a draft."""


@dataclass(frozen=True)
class LoadFigures:
    """One draft at one number of sequences."""

    sequences: int
    measurement: Measurement
    """A sample per group of prompts; its seconds are the wall clock of its rounds, prompts included."""
    num_plain_different: int
    """Texts that plain decoding itself continues otherwise at this number of sequences than alone."""

    @property
    def num_different(self) -> int:
        """Number of texts that differ from plain decoding's, ties apart."""
        measurement = self.measurement
        return measurement.num_prompts - measurement.num_identical - measurement.num_ties


def groups_of(num_prompts: int, size: int) -> list[range]:
    """Return the indices of whole groups of prompts in order; those that fill no group are left out."""
    return [range(first, first + size) for first in range(0, num_prompts - size + 1, size)]


def check_groups(sequences: Sequence[int], num_prompts: int) -> None:
    """Raise `ConfigError` if the prompts make too few rounds for an interval."""
    most = max(sequences, default=1)
    if sequences and len(groups_of(num_prompts, most)) < FEWEST_ROUNDS:
        raise ConfigError(
            f"--sequences {most} needs at least {FEWEST_ROUNDS * most} prompts, {FEWEST_ROUNDS} rounds, and there are "
            f"{num_prompts}: hold out more (--held-out-prompts), or measure fewer side by side"
        )


@dataclass(frozen=True)
class PlainTexts:
    """Prompts, token ids, and the engine's plain continuation of each alone."""

    prompts: Sequence[Sequence[int]]
    alone: Sequence[tuple[int, ...]]
    num_tokens: int
    """Most tokens of a continuation."""
    compare: Compare

    @classmethod
    def of(
        cls,
        program: EngineProgram,
        plain: Client,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        compare: Compare,
        on_text: Callable[[], None],
    ) -> PlainTexts:
        """Continue every prompt alone."""
        alone = []
        for prompt in prompts:
            alone.append(program.continuation(plain, prompt, num_tokens))
            on_text()
        return cls(prompts, alone, num_tokens, compare)

    def judge(self, index: int, same_load: tuple[int, ...], drafted: tuple[int, ...]) -> Comparison:
        """Compare a draft's text with plain decoding alone, or else at the same load: a batch may round otherwise than one row."""
        if drafted == same_load:
            return self.compare(self.prompts[index], same_load, drafted)
        return self.compare(self.prompts[index], self.alone[index], drafted)


def measure_load(
    program: EngineProgram,
    plain: Client,
    drafted: Client,
    sequences: int,
    texts: PlainTexts,
    *,
    on_round: Callable[[], None],
    repeats: int = 1,
    together: Callable[..., RequestRound] = continue_together,
) -> LoadFigures:
    """Continue groups of `sequences` prompts with both servers in turns; which of them begins alternates, also between repeats.

    Neither server is busy while the other runs. Both continue the beginning of the first group once before, unmeasured. The
    rounds of one group are one sample: repeats take noise out of it, and make no sample of their own.
    """
    groups = groups_of(len(texts.prompts), sequences)
    for client in (plain, drafted):
        together(program, client, _prompts(texts, groups[0]), min(FEWEST_DECODED, texts.num_tokens))
    pairs: list[list[Pair]] = [[] for _ in groups]
    for repeat in range(repeats):
        for number, group in enumerate(groups):
            order = (plain, drafted) if (number + repeat) % 2 == 0 else (drafted, plain)
            done = {client: together(program, client, _prompts(texts, group), texts.num_tokens) for client in order}
            pairs[number].append((done[plain], done[drafted]))
            on_round()
    samples = tuple(_sample(number, texts, group, pairs[number]) for number, group in enumerate(groups))
    num_plain_different = sum(
        text != texts.alone[index]
        for group, done in zip(groups, pairs, strict=True)
        for plainly, _ in done
        for index, text in zip(group, plainly.texts, strict=True)
    )
    return LoadFigures(sequences, Measurement(samples=samples), num_plain_different)


def _prompts(texts: PlainTexts, group: range) -> list[Sequence[int]]:
    return [texts.prompts[index] for index in group]


def _sample(number: int, texts: PlainTexts, group: range, pairs: Sequence[Pair]) -> PromptSample:
    found = [each for pair in pairs for each in _comparisons(texts, group, *pair)]
    counts = BatchTexts(
        count=len(found),
        identical=sum(each.identical for each in found),
        ties=sum(each.tie for each in found),
        float32_ties=sum(each.float32_tie for each in found),
    )
    different = [each for each in found if not each.identical]
    return PromptSample(
        prompt=number,
        plain_seconds=sum(plain.seconds for plain, _ in pairs),
        plain_tokens=sum(plain.num_tokens for plain, _ in pairs),
        draft_seconds=sum(drafted.seconds for _, drafted in pairs),
        draft_tokens=sum(drafted.num_tokens for _, drafted in pairs),
        rounds=sum(drafted.counts.rounds for _, drafted in pairs),
        drafted=sum(drafted.counts.drafted for _, drafted in pairs),
        accepted=sum(drafted.counts.accepted for _, drafted in pairs),
        identical=not different,
        tie=bool(different) and all(each.tie for each in different),
        batch=counts,
    )


def _comparisons(texts: PlainTexts, group: range, plain: RequestRound, drafted: RequestRound) -> Iterator[Comparison]:
    for index, same_load, text in zip(group, plain.texts, drafted.texts, strict=True):
        yield texts.judge(index, same_load, text)
