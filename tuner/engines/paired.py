"""A draft in an engine, measured prompt by prompt in turns with the same engine's plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from studies.measurement import Measurement, PairedPrefill, PromptSample
from tuner.errors import DatasetError
from tuner.measuring.baseline import FEWEST_DECODED

if TYPE_CHECKING:
    from decoding.losslessness import Comparison
    from tuner.engines.contract import EngineCompletion, EngineProgram
    from tuner.engines.loopback import Client
    from tuner.inputs.reading import Prompt

Compare = Callable[[Sequence[int], Sequence[int], Sequence[int]], "Comparison"]
"""Compares prompt, plain tokens and a draft's tokens."""


@dataclass(frozen=True)
class PairedTexts:
    """All pairs of one draft."""

    measurement: Measurement
    """Samples of the texts that are long enough."""
    num_too_short: int
    """Pairs left out of the rates; their texts are compared all the same."""
    num_texts: int
    num_identical: int
    num_ties: int

    @property
    def num_different(self) -> int:
        """Number of texts that differ from plain decoding's, ties apart."""
        return self.num_texts - self.num_identical - self.num_ties


def measure_pairs(
    program: EngineProgram,
    plain: Client,
    drafted: Client,
    prompts: Sequence[Prompt],
    *,
    num_tokens: int,
    compare: Compare,
    on_pair: Callable[[], None],
) -> PairedTexts:
    """Continue every prompt with both servers in turns; which of them begins alternates. Neither is busy while the other runs.

    Both continue the first prompt once before, unmeasured. Raises `DatasetError` if fewer than two texts are long enough.
    """
    for client in (plain, drafted):
        program.complete(client, prompts[0].token_ids, num_tokens)
    samples, comparisons, num_too_short = [], [], 0
    for index, prompt in enumerate(prompts):
        order = (plain, drafted) if index % 2 == 0 else (drafted, plain)
        done = {client: program.complete(client, prompt.token_ids, num_tokens) for client in order}
        comparison = compare(prompt.token_ids, done[plain].tokens, done[drafted].tokens)
        comparisons.append(comparison)
        if min(each.num_decoded for each in done.values()) < FEWEST_DECODED:
            num_too_short += 1
        else:
            samples.append(_sample(index, prompt, done[plain], done[drafted], comparison))
        on_pair()
    if len(samples) < 2:
        raise DatasetError(
            f"only {len(samples)} texts have {FEWEST_DECODED} tokens after the first: give more --max-new-tokens, or prompts that "
            "the model continues at greater length"
        )
    return PairedTexts(
        Measurement(samples=tuple(samples)),
        num_too_short,
        len(comparisons),
        sum(each.identical for each in comparisons),
        sum(each.tie for each in comparisons),
    )


def _sample(
    number: int, prompt: Prompt, plain: EngineCompletion, drafted: EngineCompletion, comparison: Comparison
) -> PromptSample:
    counts = drafted.counts
    return PromptSample(
        prompt=number,
        plain_seconds=plain.decode_seconds,
        plain_tokens=plain.num_decoded,
        draft_seconds=drafted.decode_seconds,
        draft_tokens=drafted.num_decoded,
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        identical=comparison.identical,
        tie=comparison.tie,
        prefill=PairedPrefill(
            plain_seconds=plain.prefill_seconds,
            plain_tokens=1,
            draft_seconds=drafted.prefill_seconds,
            draft_tokens=1,
        ),
        category=prompt.category,
    )
