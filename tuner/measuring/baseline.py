"""The prompts of a bench and their plain continuations, against which candidates are compared token by token.

And a pulse: the rate of a model's passes, from a moment of plain decoding, enough to estimate minutes and not to compare drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from decoding.cache.known_prompt import KnownPrompt
from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.target import Target
from decoding.text import Ending
from tuner.errors import DatasetError

FEWEST_DECODED = 8
"""Decode-phase tokens of a sequence below which its decoding rate says nothing."""
PULSE_TOKENS, WARMING_TOKENS = 6, 2
"""Tokens of a decoding that is timed for a pulse, and of an uncounted one before it."""
NUM_PULSES = 2
"""Timed decodings, of which the faster counts: one slow moment of a shared machine must not refuse a search."""
MOST_KNOWN_BYTES = 2**31
"""Most bytes that what is known of the prompts of a bench may take."""


def most_known_bytes(device_type: str, weight_bytes: int) -> int:
    """Return the bytes that what is known of prompts may take: no more than the weights.

    None on a GPU, which reads a prompt in the time of a few tokens.
    """
    return min(MOST_KNOWN_BYTES, weight_bytes) if device_type == "cpu" else 0


@dataclass(frozen=True)
class Baseline:
    """Prompts that can be measured, in whole batches, with their plain greedy continuations.

    Batch `i` consists of the prompts `i * batch_size` to `(i + 1) * batch_size - 1`. Prompts that fill no batch are left out: they
    would be decoded at another speed.
    """

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt."""
    continuations: tuple[tuple[int, ...], ...]
    """Token ids that plain greedy decoding writes after each prompt, up to `ending`. Empty if they are not known: candidates are
    then compared with the plain decoding that is timed beside them."""
    rows: tuple[int, ...]
    """Index of each prompt among the prompts given."""
    ending: Ending
    batch_size: int = 1
    categories: tuple[str | None, ...] = ()
    """Category of each prompt, None for a prompt without one; empty if no prompt has one."""
    num_too_short: int = 0
    """Number of prompts left out because their continuations are shorter than `FEWEST_DECODED`."""
    num_left_over: int = 0
    """Number of prompts left out because they fill no batch."""
    known: Mapping[tuple[int, ...], KnownPrompt] = field(default_factory=dict)
    """What the target knows of prompts, so that candidates need not read them again."""

    @property
    def indices(self) -> range:
        """Indices of the batches; of the prompts if `batch_size` is 1."""
        return range(len(self.prompts) // self.batch_size)

    def members(self, index: int) -> range:
        """Return the indices of the prompts in batch `index`."""
        return range(index * self.batch_size, (index + 1) * self.batch_size)

    def category(self, index: int) -> str | None:
        """Return the category of batch `index`; None without one, and for a batch of several categories."""
        found = {self.categories[row] for row in self.members(index)} if self.categories else {None}
        return found.pop() if len(found) == 1 else None

    def reordered(self, order: Sequence[int]) -> Baseline:
        """Return the same prompts in the order given by their indices."""
        return replace(
            self,
            prompts=tuple(self.prompts[index] for index in order),
            continuations=tuple(self.continuations[index] for index in order) if self.continuations else (),
            rows=tuple(self.rows[index] for index in order),
            categories=tuple(self.categories[index] for index in order) if self.categories else (),
        )


def decode_baseline(
    target: Target,
    prompts: Sequence[Sequence[int]],
    ending: Ending,
    *,
    batch_size: int = 1,
    categories: Sequence[str | None] = (),
    most_known_bytes: int = 0,
    whole: bool = True,
    on_progress: Callable[[], None] = lambda: None,
) -> Baseline:
    """Decode the prompts plainly and greedily, and keep the ones with continuations long enough to measure.

    `categories` are those of the prompts, if they have any. What the target knows of the first prompts stays in memory, up to about
    `most_known_bytes`. Without `whole` continuations are decoded as far as tells that they are long enough, and not kept.
    `on_progress` is called after each prompt. Raises DatasetError if fewer than two batches remain.
    """
    plain, lengths = plain_decoder(target), [len(prompt) for prompt in prompts]
    if lengths:  # memory for the longest prompt comes first
        plain.prepare(min(lengths), max(lengths) + ending.max_new_tokens)
    needed = ending if whole else replace(ending, max_new_tokens=min(ending.max_new_tokens, FEWEST_DECODED + 1))
    kept: list[tuple[int, tuple[int, ...]]] = []
    known: dict[tuple[int, ...], KnownPrompt] = {}
    known_bytes = 0
    for row, prompt in enumerate(prompts):
        own = KnownPrompt() if known_bytes < most_known_bytes else None
        generation = plain.generate(Request(prompt, needed, known=own))
        on_progress()
        if generation.num_decoded < FEWEST_DECODED:
            continue
        kept.append((row, generation.tokens))
        if own is not None and tuple(prompt) not in known:
            known[tuple(prompt)] = own
            known_bytes += own.nbytes
    num_left_over = len(kept) % batch_size
    used = kept[: len(kept) - num_left_over]
    baseline = Baseline(
        prompts=tuple(tuple(prompts[row]) for row, _ in used),
        continuations=tuple(continuation for _, continuation in used) if whole else (),
        rows=tuple(row for row, _ in used),
        ending=ending,
        batch_size=batch_size,
        categories=tuple(categories[row] for row, _ in used) if any(categories) else (),
        num_too_short=len(prompts) - len(kept),
        num_left_over=num_left_over,
        known=known,
    )
    _check_enough(baseline, len(prompts))
    return baseline


def _check_enough(baseline: Baseline, num_prompts: int) -> None:
    """Raise DatasetError unless there are two batches, which an interval needs."""
    if len(baseline.indices) >= 2:
        return
    size = baseline.batch_size
    needed = "" if size == 1 else f", and {2 * size} longer ones make two batches of {size}"
    raise DatasetError(
        f"{baseline.num_too_short} of {num_prompts} prompts end within {FEWEST_DECODED} tokens of plain decoding{needed}: "
        "give prompts that the model continues at greater length"
    )


@dataclass(frozen=True)
class Pulse:
    """Measured seconds of the target's passes, over one sequence or over a batch in lockstep."""

    prefill_seconds: float
    """Seconds of reading the prompts."""
    token_seconds: float
    """Seconds of a pass over one position of each sequence."""
    num_positions: int
    """Positions of the prompts."""

    @property
    def position_seconds(self) -> float:
        """Seconds per position of a wide pass."""
        return self.prefill_seconds / self.num_positions


def measure_pulse(
    target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, num_sequences: int
) -> Pulse:
    """Decode a few tokens after the prompt of median length, or after `num_sequences` prompts about it in lockstep."""
    by_length = sorted(prompts, key=len)
    middle = len(by_length) // 2
    chosen = [by_length[min(middle + row, len(by_length) - 1)] for row in range(num_sequences)]
    plain = plain_decoder(target)
    plain.prepare(min(map(len, chosen)), max(map(len, chosen)) + max_new_tokens, num_sequences)
    timed = []
    for num_tokens in (WARMING_TOKENS, *[min(PULSE_TOKENS, max_new_tokens)] * NUM_PULSES):
        batch = plain.generate_batch([Request(prompt, Ending(num_tokens)) for prompt in chosen])
        timed.append((batch.prefill_seconds, batch.decode_seconds / max(1, batch.num_decoded // num_sequences)))
    prefills, tokens = zip(*timed[1:], strict=True)
    return Pulse(min(prefills), min(tokens), sum(map(len, chosen)))
