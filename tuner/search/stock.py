"""transformers' `generate` and its prompt lookup beside the winner and plain decoding, on a few held-out prompts.

Comes after the confirmation: all continue the same prompts in turns. It changes neither winner nor profile, only what a reviewer is
told: a profile that is surely slower than `generate` is not to be shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from decoding.decoder import plain_decoder
from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample
from tuner.measuring.comparison import FEWEST_SAMPLES, Compared, Phase
from tuner.measuring.contender import PLAIN, PROFILE, Contender
from tuner.measuring.generation import ONE_SEQUENCE, stock_generate, stock_prompt_lookup
from tuner.measuring.paired import Bench, OwnDecoding
from tuner.measuring.turns import Interleaved
from tuner.progress import Progress
from tuner.review.document import GENERATE, PROMPT_LOOKUP, StockComparison, StockContender
from tuner.search.budget import OutOfTimeError
from tuner.search.task import Task

LATER = "`sdtune bench` compares"


def compare_with_stock(
    task: Task,
    profile: Candidate | None,
    held_out: Bench,
    num_samples: int,
    progress: Progress,
    may_go_on: Callable[[], bool],
) -> StockComparison | str:
    """Time plain decoding, the profile's candidate (None if it decodes plainly) and stock generation on `num_samples` samples.

    A sample is a held-out prompt, or a batch of them. All decode greedily, so that the tokens can be compared. `may_go_on` is asked
    before each sample, and ends the comparison.
    """
    if num_samples < FEWEST_SAMPLES:
        return f"no time was left for it; {LATER}"
    contenders, left_out = _contenders(task, profile, held_out)
    turns = Interleaved(contenders, may_fail=(GENERATE, PROMPT_LOOKUP))
    chosen = spread(held_out.indices, num_samples)
    progress.stage("comparing with transformers' generate", num_samples)
    may_go_on()  # begins the first step, warm-up included
    turns.warm_up([min(map(held_out.batch, chosen), key=lambda batch: max(map(len, batch)))])
    taken: dict[str, list[PromptSample]] = {name: [] for name in turns.running}

    def keep(samples: Mapping[str, PromptSample]) -> None:
        for name, sample in samples.items():
            taken[name].append(sample)
        progress.advance()
        if not may_go_on():
            raise OutOfTimeError

    with suppress(OutOfTimeError):  # what was measured counts
        held_out.compete(turns, chosen, keep, plain_too=True)
    found = {name: Measurement(samples=tuple(taken[name])) for name in turns.running}
    return _outcome(found, turns, left_out)


def spread(indices: Sequence[int], count: int) -> list[int]:
    """Return `count` of the indices, evenly spread: prompts are often in the order of their categories."""
    return [indices[number * len(indices) // count] for number in range(min(count, len(indices)))]


def _contenders(task: Task, profile: Candidate | None, held_out: Bench) -> tuple[list[Contender], dict[str, str]]:
    model, eos = task.loaded.model, held_out.baseline.ending.eos_token_ids
    contenders: list[Contender] = [
        OwnDecoding(PLAIN, plain_decoder(task.target), eos, description="our own loop without drafts")
    ]
    if profile is not None:
        contenders.append(OwnDecoding(PROFILE, held_out.decoder(profile), eos, description=profile.describe()))
    contenders.append(stock_generate(GENERATE, model, eos))
    if held_out.batch_size > 1:
        return contenders, {PROMPT_LOOKUP: ONE_SEQUENCE}
    return [*contenders, stock_prompt_lookup(PROMPT_LOOKUP, model, eos)], {}


def _outcome(
    found: Mapping[str, Measurement], turns: Interleaved, left_out: Mapping[str, str]
) -> StockComparison | str:
    """Return the comparison of the contenders on the samples that all of them decoded at some length."""
    compared = Compared.of(found, needed=(PLAIN, PROFILE))
    left_out = {**left_out, **turns.left_out, **compared.left_out}
    if len(compared.counted) < FEWEST_SAMPLES:
        return f"too few prompts were decoded by all in the time that was left; {LATER}"
    if not {GENERATE, PROMPT_LOOKUP} & set(compared.measurements):
        failed = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        return f"it could not run on this model ({failed})"
    reference = PROFILE if PROFILE in compared.measurements else PLAIN
    return StockComparison(
        num_prompts=compared.measurements[PLAIN].num_prompts,
        plain_tokens_per_second=compared.rate(PLAIN),
        contenders={
            name: StockContender(
                description=turns.running[name].description,
                tokens_per_second=compared.rate(name),
                over_plain=compared.over(name),
                end_to_end_over_plain=compared.over(name, PLAIN, Phase.END_TO_END),
                profile_over_it=compared.over(reference, name),
                texts=each.num_prompts,
                identical=each.num_identical,
                ties=each.num_ties,
            )
            for name, each in compared.measurements.items()
            if name != PLAIN
        },
        left_out=left_out,
    )
