"""Acceptance of drafted tokens by AIPerf's names and definitions, from the samples of a contender."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from decoding.documents.strict_yaml import Document
from tuner.bench.sample import TextSample


class AcceptanceRecord(Document):
    """AIPerf's `SpecDecodeAcceptanceRecord`, pooled over samples; a step is a pass of the target after the prefill.

    Passes that verify no draft count as steps too.
    """

    mean_acceptance_length: float
    """1 + accepted drafted tokens per step; AIPerf's token-weighted acceptance length."""
    draft_acceptance_rate: float | None
    """Accepted over drafted tokens; None if nothing was drafted, or the contender keeps no records."""
    num_spec_steps: int
    num_draft_tokens: int | None
    num_accepted_draft_tokens: int
    acceptance_histogram: dict[int, int]
    """Number of steps by the number of accepted tokens; numbers without a step are left out."""

    @classmethod
    def of(cls, samples: Iterable[TextSample]) -> AcceptanceRecord:
        """Pool the samples."""
        histogram: Counter[int] = Counter()
        drafted: int | None = 0
        for sample in samples:
            histogram.update(dict(enumerate(sample.accepted_lengths)))
            unknown = drafted is None or sample.num_draft_tokens is None
            drafted = None if unknown else (drafted or 0) + (sample.num_draft_tokens or 0)
        steps, accepted = histogram.total(), sum(length * count for length, count in histogram.items())
        return cls(
            mean_acceptance_length=1.0 + (accepted / steps if steps else 0.0),
            draft_acceptance_rate=accepted / drafted if drafted else None,
            num_spec_steps=steps,
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=accepted,
            acceptance_histogram={length: count for length, count in sorted(histogram.items()) if count},
        )
