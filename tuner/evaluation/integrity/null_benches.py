"""Candidates that cannot win, and the benches that measure them, for `sdtune evaluate integrity`.

The decision sees candidates that look like any others. Decoded for them is plain decoding itself, a draft that is never asked for a
token, or a draft that is the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from decoding.draft_length import BetaThompson, Fixed, RoundCosts
from decoding.drafts import LayerSkip, PlainDecoding
from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample
from tuner.measuring.contract import Measuring, OnSample

PROHIBITIVE = RoundCosts(draft_step=1e6, verify=(1.0, 1e6))
"""Costs at which no draft pays."""
WHOLE_LENGTHS = (1, 2, 4)
"""Draft lengths of the whole model."""


@dataclass(frozen=True)
class Family:
    """Candidates that cannot be faster than plain decoding."""

    name: str
    truth: str
    """Their true speed-up and the reason."""
    decoded_as: Mapping[str, Candidate] = field(repr=False)
    """The candidate that is really decoded, by the key of the candidate that the decision sees."""
    candidates: tuple[Candidate, ...]

    @classmethod
    def of(cls, name: str, truth: str, pairs: Sequence[tuple[Candidate, Candidate]]) -> Family:
        """Build a family from pairs: the candidate seen by the decision, and the candidate decoded."""
        return cls(name, truth, {seen.key: decoded for seen, decoded in pairs}, tuple(seen for seen, _ in pairs))

    @property
    def decoded(self) -> list[Candidate]:
        """The distinct candidates to decode."""
        return list({candidate.key: candidate for candidate in self.decoded_as.values()}.values())


def families(copies: int) -> dict[str, Family]:
    """Return the families by name.

    Families of equal candidates have `copies` members, so that the best of many is chosen, as in a search.
    """
    plain = Candidate(draft=PlainDecoding(), draft_length=Fixed())
    disguised = [(Candidate(draft=LayerSkip(), draft_length=Fixed(max_tokens=1 + n)), plain) for n in range(copies)]
    # Another seed makes another candidate, but nothing is drawn: a rule that never drafts is the same for all seeds.
    idle = [
        Candidate(draft=LayerSkip(), draft_length=BetaThompson(max_tokens=1, seed=seed, costs=PROHIBITIVE))
        for seed in range(copies)
    ]
    whole = [Candidate(draft=LayerSkip(), draft_length=Fixed(max_tokens=length)) for length in WHOLE_LENGTHS]
    made = (
        Family.of("disguised", "1 exactly: plain decoding under other names", disguised),
        Family.of(
            "idle", "1 but for the rounds' own cost: a rule that never drafts", [(each, idle[0]) for each in idle]
        ),
        Family.of("whole", "below 1: the whole model drafts for itself", [(each, each) for each in whole]),
    )
    return {family.name: family for family in made}


@dataclass(frozen=True)
class Bank:
    """Real samples of some candidates: every prompt several times, with plain decoding first and second in turn."""

    num_prompts: int
    samples: Mapping[str, Mapping[tuple[int, bool], Sequence[PromptSample]]]
    """Samples by key of the decoded candidate, then by prompt and by True if plain decoding came first."""

    @classmethod
    def fill(
        cls,
        bench: Measuring,
        candidates: Sequence[Candidate],
        repetitions: int,
        on_sample: Callable[[PromptSample], None] = lambda sample: None,
    ) -> Bank:
        """Decode every prompt of the bench `repetitions` times with each candidate, one whole pass after another.

        Raises ValueError for fewer than two repetitions: each of the two orders needs one.
        """
        if repetitions < 2:
            raise ValueError(f"a bank needs two repetitions at least, got {repetitions}")
        num_prompts = len(bench.indices)
        samples: dict[str, dict[tuple[int, bool], list[PromptSample]]] = {each.key: {} for each in candidates}
        for repetition in range(repetitions):
            # The bench alternates who goes first: one extra prompt at the start gives every prompt the other order.
            extra = repetition % 2
            indices = [*range(num_prompts - extra, num_prompts), *range(num_prompts)]
            for candidate in candidates:
                measured = bench.measure(candidate, indices, on_sample=on_sample)
                for turn, sample in list(enumerate(measured.samples))[extra:]:
                    samples[candidate.key].setdefault((sample.prompt, turn % 2 == 0), []).append(sample)
        return cls(num_prompts, samples)

    def all_of(self, candidate: Candidate) -> Measurement:
        """Return every sample of a decoded candidate."""
        return Measurement(samples=tuple(s for samples in self.samples[candidate.key].values() for s in samples))


class ResampledBench:
    """A bench whose prompts are drawn from a bank with replacement; each measurement draws one of the repetitions.

    Drawing mixes times that belong together in reality, such as a period in which the machine is slow.
    """

    def __init__(self, bank: Bank, family: Family, num_prompts: int, stream: np.random.Generator) -> None:
        self._bank, self._family, self._stream = bank, family, stream
        self.prompts: list[int] = stream.integers(bank.num_prompts, size=num_prompts).tolist()
        self.indices = range(num_prompts)

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Draw samples in which plain decoding and candidate have the order that a real bench would use."""
        pool = self._bank.samples[self._family.decoded_as[candidate.key].key]
        samples = []
        for turn, index in enumerate(indices):
            choices = pool[self.prompts[index], turn % 2 == 0]
            drawn = choices[int(self._stream.integers(len(choices)))]
            samples.append(drawn.model_copy(update={"prompt": index}))
            on_sample(samples[-1])
        return Measurement(samples=tuple(samples))

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate unchanged: none of the families has an adaptive rule that drafts."""
        return candidate


class FreshBench:
    """A bench whose prompts are drawn with replacement and decoded anew for every measurement."""

    def __init__(self, bench: Measuring, family: Family, num_prompts: int, stream: np.random.Generator) -> None:
        self._bench, self._family = bench, family
        self.prompts: list[int] = stream.integers(len(bench.indices), size=num_prompts).tolist()
        self.indices = range(num_prompts)

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Decode with the family's candidate in place of this one."""
        decoded = self._family.decoded_as[candidate.key]
        measured = self._bench.measure(decoded, [self.prompts[index] for index in indices])
        samples = [s.model_copy(update={"prompt": index}) for s, index in zip(measured.samples, indices, strict=True)]
        for sample in samples:
            on_sample(sample)
        return Measurement(samples=tuple(samples))

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate unchanged: none of the families has an adaptive rule that drafts."""
        return candidate
