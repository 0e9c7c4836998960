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
        pair = continue_both(program, plain, drafted, index, prompt.token_ids, num_tokens)
        comparison = compare(prompt.token_ids, pair.plain.tokens, pair.drafted.tokens)
        comparisons.append(comparison)
        if pair.num_decoded < FEWEST_DECODED:
            num_too_short += 1
        else:
            samples.append(pair.sample(index, comparison, prompt.category))
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


@dataclass(frozen=True)
class Pair:
    """A prompt continued plainly and with a draft."""

    plain: EngineCompletion
    drafted: EngineCompletion

    @property
    def num_decoded(self) -> int:
        """Number of tokens after the first, of the shorter text."""
        return min(self.plain.num_decoded, self.drafted.num_decoded)

    def sample(self, number: int, comparison: Comparison, category: str | None) -> PromptSample:
        """Return the pair as the sample `number`."""
        plain, drafted, counts = self.plain, self.drafted, self.drafted.counts
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
            category=category,
        )


def continue_both(
    program: EngineProgram, plain: Client, drafted: Client, number: int, prompt: Sequence[int], num_tokens: int
) -> Pair:
    """Continue a prompt with both servers, one after the other; plain decoding begins if `number` is even."""
    order = (plain, drafted) if number % 2 == 0 else (drafted, plain)
    done = {client: program.complete(client, prompt, num_tokens) for client in order}
    return Pair(done[plain], done[drafted])
