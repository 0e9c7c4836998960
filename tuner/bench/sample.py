"""A sample of a bench: one continuation of one prompt by one contender. Data only."""

from __future__ import annotations

from decoding.documents.strict_yaml import Document
from decoding.losslessness import Comparison
from tuner.measuring.recording import TimedBatch, counted


class TextSample(Document):
    """One continuation of one prompt by one contender. Tokens that arrive with the prefill do not count as decoded.

    In a batch, seconds are the seconds of the whole batch; everything else belongs to this sequence.
    """

    prompt: int
    """Index among the prompts of the bench; every `batch_size` consecutive prompts form a batch."""
    repeat: int
    batch_size: int = 1
    """Number of sequences in its batch."""
    prompt_tokens: int
    prefill_seconds: float
    prefill_tokens: int
    decode_seconds: float
    decode_tokens: int
    passes: int
    """Number of passes that gave the decoded tokens: AIPerf's `num_spec_steps`."""
    num_draft_tokens: int | None = None
    """Number of drafted tokens; None for code of others, which keeps no records of its rounds."""
    accepted_lengths: tuple[int, ...] = ()
    """Number of passes that accepted 0, 1, 2 ... drafted tokens; for code of others, that added 1, 2, 3 ... tokens."""
    category: str | None = None
    """Category of the prompt, if it has one."""
    identical: bool
    """True if the tokens equal plain decoding of the prompt by itself."""
    tie: bool = False
    """True if not identical, but the first differing token is a numerical tie of the target's logits."""

    @classmethod
    def of(
        cls,
        prompt: int,
        repeat: int,
        prompt_tokens: int,
        batch: TimedBatch,
        text: int,
        comparison: Comparison,
        category: str | None = None,
    ) -> TextSample:
        """Return the sample of sequence `text` of a batch."""
        decoded = batch.decoded(text)
        num_decoded = sum(len(each.tokens) for each in decoded)
        rounds = [each.round for each in decoded if each.round is not None]
        is_recorded = len(rounds) == len(decoded)
        lengths = [r.num_accepted for r in rounds] if is_recorded else [len(each.tokens) - 1 for each in decoded]
        return cls(
            prompt=prompt,
            repeat=repeat,
            batch_size=len(batch.sequences),
            prompt_tokens=prompt_tokens,
            prefill_seconds=batch.prefill_seconds,
            prefill_tokens=len(batch.sequences[text].tokens) - num_decoded,
            decode_seconds=batch.decode_seconds,
            decode_tokens=num_decoded,
            passes=len(decoded),
            num_draft_tokens=sum(each.num_drafted for each in rounds) if is_recorded else None,
            accepted_lengths=counted(lengths),
            category=category,
            identical=comparison.identical,
            tie=comparison.tie,
        )

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last token of the batch: AIPerf's request latency."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens(self) -> int:
        """Number of all new tokens."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def batch(self) -> int:
        """Index of its batch; of the prompt if `batch_size` is 1."""
        return self.prompt // self.batch_size
