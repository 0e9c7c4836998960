"""transformers' `generate` and its prompt lookup beside the winner and plain decoding, on a few held-out prompts.

Comes after the confirmation: all continue the same prompts in turns. It changes neither winner nor profile, only what a reviewer is
told: a profile that is surely slower than `generate` is not to be shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from decoding.documents.strict_yaml import Document
from decoding.draft_length import Fixed
from decoding.drafts import PlainDecoding
from decoding.losslessness import compare
from studies.contract import Candidate
from studies.ratios import Ratio, Work
from tuner.contest.contest import Contender, Contest
from tuner.contest.own_decoding import OwnDecoding
from tuner.contest.stock_generation import ONE_SEQUENCE, stock_generate, stock_prompt_lookup
from tuner.measuring.baseline import FEWEST_DECODED
from tuner.measuring.clock import WallClock
from tuner.measuring.paired import Bench
from tuner.measuring.recording import TimedBatch
from tuner.progress import Progress
from tuner.review.document import StockComparison, StockContender
from tuner.search.task import Task

PROFILE, PLAIN, GENERATE, PROMPT_LOOKUP = "profile", "plain", "hf", "hf-prompt-lookup"
"""Names of the contenders, as in `sdtune bench`."""
LATER = "`sdtune bench`, then `sdtune report --bench bench/bench.json --track`, adds it"
FEWEST_UNITS = 2
"""Prompts, or batches, without which there is no interval."""


class StockOutcome(Document):
    """The comparison, or why there is none."""

    comparison: StockComparison | None = None
    reason: str | None = None


class _OutOfTimeError(Exception):
    """No time is left for another prompt."""


def compare_with_stock(
    task: Task,
    profile: Candidate | None,
    held_out: Bench,
    num_samples: int,
    progress: Progress,
    may_go_on: Callable[[], bool],
) -> StockOutcome:
    """Time plain decoding, the profile's candidate (None if it decodes plainly) and stock generation on `num_samples` samples.

    A sample is a held-out prompt, or a batch of them. All decode greedily, so that the tokens can be compared. `may_go_on` is asked
    before each sample, and ends the comparison.
    """
    if num_samples < FEWEST_UNITS:
        return StockOutcome(reason=f"no time was left for it; {LATER}")
    contenders, left_out = _contenders(task, profile, held_out)
    contest = Contest(contenders, WallClock(task.target.device), needed=(PLAIN, PROFILE))
    chosen = spread(held_out.indices, num_samples)
    prompts = {index: [held_out.prompts[row] for row in held_out.baseline.members(index)] for index in chosen}
    progress.stage("comparing with transformers' generate", num_samples)
    may_go_on()  # begins the first step, warm-up included
    contest.warm_up([min(prompts.values(), key=lambda batch: max(map(len, batch)))])
    taken: list[Mapping[str, TimedBatch]] = []

    def keep(index: int, repeat: int, batches: Mapping[str, TimedBatch]) -> None:
        taken.append(batches)
        progress.advance()
        if not may_go_on():
            raise _OutOfTimeError

    with suppress(_OutOfTimeError):  # what was measured counts
        contest.hold(list(prompts.values()), max_new_tokens=held_out.max_new_tokens, on_batch=keep)
    found = _Samples(task, held_out, contest.running, chosen[: len(taken)], taken)
    return found.outcome({**left_out, **contest.left_out})


def spread(indices: Sequence[int], count: int) -> list[int]:
    """Return `count` of the indices, evenly spread: prompts are often in the order of their categories."""
    return [indices[number * len(indices) // count] for number in range(min(count, len(indices)))]


def _contenders(task: Task, profile: Candidate | None, held_out: Bench) -> tuple[dict[str, Contender], dict[str, str]]:
    model, eos = task.loaded.model, held_out.baseline.ending.eos_token_ids
    plain = held_out.decoder(Candidate(draft=PlainDecoding(), draft_length=Fixed()))
    contenders: dict[str, Contender] = {PLAIN: OwnDecoding(plain, eos, "our own loop without drafts", {})}
    if profile is not None:
        described = f"{profile.draft.describe()}; {profile.draft_length.describe()}"
        contenders[PROFILE] = OwnDecoding(held_out.decoder(profile), eos, described, {})
    contenders[GENERATE] = stock_generate(model, eos)
    if held_out.batch_size > 1:
        return contenders, {PROMPT_LOOKUP: ONE_SEQUENCE}
    return {**contenders, PROMPT_LOOKUP: stock_prompt_lookup(model, eos)}, {}


class _Samples:
    """The timed batches of all contenders on the same samples, and the figures derived from them."""

    def __init__(
        self,
        task: Task,
        held_out: Bench,
        contenders: Mapping[str, Contender],
        indices: Sequence[int],
        taken: Sequence[Mapping[str, TimedBatch]],
    ) -> None:
        self._task, self._held_out, self._contenders = task, held_out, contenders
        self._units = list(zip(indices, taken, strict=True))

    def outcome(self, left_out: Mapping[str, str]) -> StockOutcome:
        """Return the comparison of the contenders on the samples that all of them decoded at some length."""
        left_out = dict(left_out)
        for name in (GENERATE, PROMPT_LOOKUP):
            if (
                name in self._contenders
                and sum(self._is_long(batches[name]) for _, batches in self._units) < FEWEST_UNITS
            ):
                left_out[name] = f"wrote fewer than {FEWEST_DECODED} tokens after its prefill"
        names = [name for name in self._contenders if name not in left_out]
        units = [each for each in self._units if all(self._is_long(each[1][name]) for name in names)]
        if len(units) < FEWEST_UNITS:
            return StockOutcome(reason=f"too few prompts were decoded by all in the time that was left; {LATER}")
        if not {GENERATE, PROMPT_LOOKUP} & set(names):
            failed = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            return StockOutcome(reason=f"it could not run on this model ({failed})")
        batches = [each for _, each in units]
        comparison = StockComparison(
            num_prompts=len(units) * self._held_out.batch_size,
            plain_tokens_per_second=_decode(batches, PLAIN).rate(),
            contenders={name: self._contender(name, units) for name in names if name != PLAIN},
            left_out=left_out,
        )
        return StockOutcome(comparison=comparison)

    @staticmethod
    def _is_long(batch: TimedBatch) -> bool:
        return batch.num_decoded >= FEWEST_DECODED * len(batch.sequences)

    def _contender(self, name: str, units: Sequence[tuple[int, Mapping[str, TimedBatch]]]) -> StockContender:
        batches = [each for _, each in units]
        reference = PROFILE if PROFILE in self._contenders else PLAIN
        own, plain, profile = (_decode(batches, each) for each in (name, PLAIN, reference))
        whole, plain_whole = (_whole(batches, each) for each in (name, PLAIN))
        compared = [
            compare(self._task.target, self._held_out.prompts[row], self._held_out.continuations[row], text.tokens)
            for index, each in units
            for row, text in zip(self._held_out.baseline.members(index), each[name].sequences, strict=True)
        ]
        return StockContender(
            description=self._contenders[name].describe(),
            tokens_per_second=own.rate(),
            over_plain=Ratio.of_speeds(plain, own).interval(),
            end_to_end_over_plain=Ratio.of_speeds(plain_whole, whole).interval(),
            profile_over_it=Ratio.of_speeds(own, profile).interval(),
            texts=len(compared),
            identical=sum(each.identical for each in compared),
            ties=sum(each.tie for each in compared),
        )


def _decode(batches: Sequence[Mapping[str, TimedBatch]], name: str) -> Work:
    return Work.of((each[name].decode_seconds, each[name].num_decoded) for each in batches)


def _whole(batches: Sequence[Mapping[str, TimedBatch]], name: str) -> Work:
    pairs = [each[name] for each in batches]
    return Work.of((b.prefill_seconds + b.decode_seconds, b.prefill_tokens + b.num_decoded) for b in pairs)
