"""Account of a profile's decode time: model passes against everything else, and measured against expected costs of rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.documents.strict_yaml import Document
from decoding.draft_length import RoundCosts
from decoding.drafts import Draft, LayerSkip
from decoding.garbage_collection import without_garbage_collection
from decoding.profile import Decoding
from decoding.rounds import Generation, Round
from decoding.runners.contract import Runner
from decoding.text import Ending
from decoding.timing.stopwatch import ReadSeconds
from studies.costs.table import CostTable

COPYING = 1e-4
"""Assumed cost of a copied token in plain passes: one look into a dictionary."""


class Account(Document):
    """Times of decoding with the profile and plainly, prompt by prompt in turn, and the expected cost of the same rounds."""

    plain_seconds: float
    plain_tokens: int
    profile_seconds: float
    profile_tokens: int
    pass_seconds: float
    """Part of `profile_seconds` spent in passes of the model or of its parts."""
    expected_passes: float
    """Cost of the profile's rounds according to the cost table, in plain passes."""

    @property
    def bookkeeping(self) -> float:
        """Share of the profile's decode time outside the model's passes."""
        return 1 - self.pass_seconds / self.profile_seconds

    @property
    def speedup(self) -> float:
        """Plain seconds per token divided by the profile's, over all prompts."""
        return (self.plain_seconds / self.plain_tokens) / (self.profile_seconds / self.profile_tokens)

    @property
    def expected_speedup(self) -> float:
        """Speed-up that the cost table predicts for the accepted lengths."""
        return self.profile_tokens / self.expected_passes


class Meter:
    """Stopwatch of a runner's passes, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_running = False


@contextmanager
def metered(runner: Runner, clock: ReadSeconds = time.perf_counter) -> Iterator[Meter]:
    """Count the seconds of the runner's passes inside the context.

    Passes on an accelerator return before they are done, so the count is meaningful on the CPU only.
    """
    meter = Meter()

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_timed(*args: Any, **settings: Any) -> Any:
            if meter.is_running:  # one way of running calls another
                return run(*args, **settings)
            meter.is_running, start = True, clock()
            try:
                return run(*args, **settings)
            finally:
                meter.seconds += clock() - start
                meter.is_running = False

        return run_timed

    runner.run, runner.write_greedily = timed(runner.run), timed(runner.write_greedily)  # type: ignore[method-assign]
    try:
        yield meter
    finally:
        del runner.run, runner.write_greedily


def take_account(
    decoder: Decoder,
    draft: Draft,
    decoding: Decoding,
    table: CostTable,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
    on_text: Callable[[], None] = lambda: None,
) -> Account:
    """Decode `prompts` plainly and with `decoder`, and account for the time. CPU only.

    `draft` and `decoding` must be the decoder's. The table must cover the lengths of the drafts and of the sequences.
    `on_text` is called after each prompt.
    """
    plain = plain_decoder(decoder.target)
    looks = decoder.rule.controller().looks_at_drafts
    texts: list[tuple[Generation, Generation]] = []
    pass_seconds, expected = 0.0, 0.0
    with without_garbage_collection():
        for prompt in prompts:
            request = Request(prompt, Ending(max_new_tokens, eos_token_ids))
            reference = plain.generate(request)
            with metered(decoder.target.runner) as meter:
                steps = decoder.steps(request)
                prefill = next(steps)
                meter.seconds = 0.0
                drafted = Generation.collect([prefill, *steps])
            pass_seconds += meter.seconds
            costs = _Costs(draft, decoding, table, context=len(prompt) + len(drafted.tokens) / 2, looks=looks)
            expected += sum(costs.of(step) for step in drafted.rounds)
            texts.append((reference, drafted))
            on_text()
    return Account(
        plain_seconds=sum(reference.decode_seconds for reference, _ in texts),
        plain_tokens=sum(reference.num_decoded for reference, _ in texts),
        profile_seconds=sum(drafted.decode_seconds for _, drafted in texts),
        profile_tokens=sum(drafted.num_decoded for _, drafted in texts),
        pass_seconds=pass_seconds,
        expected_passes=expected,
    )


class _Costs:
    """Cost of rounds in plain passes, at one length of the sequence."""

    def __init__(self, draft: Draft, decoding: Decoding, table: CostTable, *, context: float, looks: bool) -> None:
        longest = table.widths[-1] - 1
        verify = table.round_costs(LayerSkip(), longest, context=context, prefix_reuse=False).verify
        self._copied = RoundCosts(draft_step=COPYING, verify=verify)
        self._draft, self._decoding, self._table, self._context, self._looks = draft, decoding, table, context, looks
        self._longest = longest

    def of(self, step: Round) -> float:
        costs = self._copied if step.looked_up or not self._draft.runs_model else self._drafted
        return costs.of(step.num_drafted)

    @cached_property
    def _drafted(self) -> RoundCosts:
        # Bit-exact mode verifies from the first block.
        reuses = self._decoding.prefix_reuse and self._decoding.exact_width is None
        costs = self._table.round_costs(self._draft, self._longest, context=self._context, prefix_reuse=reuses)
        return costs.looking() if self._looks else costs


def longest_draft(draft: Draft, max_tokens: int) -> int:
    """Return the most tokens that a round drafts, by the rule or by the prompt lookup before it."""
    if not draft.drafts:
        return 1
    return max(max_tokens, draft.longest_unsteered)
