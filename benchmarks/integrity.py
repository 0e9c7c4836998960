"""How often is a speed-up claimed where none exists, and do 95 % intervals hold?

First, searches among candidates that cannot win: plain decoding under other names (disguised), a rule that never drafts (idle), the
whole model as its own draft (whole). Trials, race, confirmation and verdict are a search's own; studies are left out, as there is
nothing to propose. Each prompt is decoded several times into a bank, and the runs draw prompts and repetitions from it. Its samples
have real noise, but all runs share them; noise that is correlated in time shows only with --fresh, which decodes in every run.

Second, coverage: random configurations are decoded on all prompts in several passes, each of all configurations, so that passes of
one are minutes apart. Usual confirmations of 24 prompts are drawn from one pass, so that noise that is correlated in time stays
together: does their interval contain the speed-up of all samples that they do not use? Prompts are drawn with replacement, as they
represent all text; one that is drawn again contributes its sample of the next pass. The true value is measured too: its noise
makes a perfect interval miss slightly more often than in 5 % of the cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from benchmarks.random_candidates import kind_of, random_candidates
from benchmarks.results import show, write
from benchmarks.task import Printed, facts_of, head_drafts, read_config, search_arguments
from decoding.draft_length import BetaThompson, Fixed, RoundCosts
from decoding.drafts import LayerSkip
from decoding.profile import Interval
from studies.contract import Candidate, TrialRecord, TrialState
from studies.measurement import Measurement, PromptSample
from tuner.config import SearchConfig
from tuner.measuring.machine import MachineWatch
from tuner.measuring.paired import Bench
from tuner.measuring.turns import Measuring, OnSample
from tuner.progress import Progress
from tuner.search.budget import Budget
from tuner.search.decision import Confirmations, blocks, confirm, objection, to_confirm
from tuner.search.race import race, shortlist, unseen_by_trials
from tuner.search.task import Task, open_bench, prepare
from tuner.stage_clock import StageClock

PROHIBITIVE = RoundCosts(draft_step=1e6, verify=(1.0, 1e6))
"""Costs at which no draft pays."""
CONFIRMED, DRAWS = 24, 5
"""Prompts in a usual confirmation, and confirmations drawn from each pass."""
MAX_CLAIMS = 0.05
"""Largest share of runs that may claim a speed-up: the error rate of 95 % intervals. Half of it is on one side."""
LEAST_COVERED = 0.9


class Family(NamedTuple):
    """Candidates that cannot be faster than plain decoding, and the candidates that are really decoded for them, by their keys."""

    truth: str
    candidates: list[Candidate]
    decoded_as: dict[str, Candidate]


def families(copies: int) -> dict[str, Family]:
    """Return the families; those of equal candidates have `copies`, so that the best of many is chosen, as in a search."""
    plain = Candidate.plain()
    disguised = [Candidate(draft=LayerSkip(), draft_length=Fixed(max_tokens=1 + n)) for n in range(copies)]
    # Another seed makes another candidate, but nothing is drawn: a rule that never drafts is the same for all seeds.
    rules = [BetaThompson(max_tokens=1, seed=seed, costs=PROHIBITIVE) for seed in range(copies)]
    idle = [Candidate(draft=LayerSkip(), draft_length=rule) for rule in rules]
    whole = [Candidate(draft=LayerSkip(), draft_length=Fixed(max_tokens=length)) for length in (1, 2, 4)]
    return {
        "disguised": Family("1 exactly", disguised, {each.key: plain for each in disguised}),
        "idle": Family("1 but for the rounds' own cost", idle, {each.key: idle[0] for each in idle}),
        "whole": Family("below 1", whole, {each.key: each for each in whole}),
    }


Bank = Mapping[str, Mapping[tuple[int, bool], Sequence[PromptSample]]]
"""Real samples by key of the decoded candidate, then by prompt and by True if plain decoding came first."""


def fill_bank(bench: Measuring, candidates: Sequence[Candidate], repetitions: int) -> Bank:
    """Decode every prompt `repetitions` times (two at least) with each candidate, with plain decoding first and second in turn."""
    num_prompts = len(bench.indices)
    bank: dict[str, dict[tuple[int, bool], list[PromptSample]]] = {each.key: {} for each in candidates}
    last = num_prompts - 1
    # The bench alternates who goes first: one more prompt at the start gives every other prompt the other order.
    in_order, shifted = [(list(range(num_prompts)), 0)], [([last, *range(last)], 1)]
    shifted.append(([0, last], 1) if last % 2 == 0 else ([last], 0))
    for repetition in range(repetitions):
        for candidate in candidates:
            for indices, num_dropped in shifted if repetition % 2 else in_order:
                for turn, sample in list(enumerate(bench.measure(candidate, indices).samples))[num_dropped:]:
                    bank[candidate.key].setdefault((sample.prompt, turn % 2 == 0), []).append(sample)
    return bank


class NullBench:
    """A bench whose prompts are drawn with replacement from a bank of samples, or put into another order and decoded anew."""

    def __init__(self, bench: Measuring, bank: Bank | None, family: Family, stream: np.random.Generator) -> None:
        self._bench, self._bank, self._family, self._stream = bench, bank, family, stream
        size = len(bench.indices)
        self._prompts: list[int] = (
            stream.permutation(size) if bank is None else stream.integers(size, size=size)
        ).tolist()
        self.indices: Sequence[int] = range(size)

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Measure the family's candidate in place of this one."""
        decoded = self._family.decoded_as[candidate.key]
        if self._bank is None:
            found = list(self._bench.measure(decoded, [self._prompts[index] for index in indices]).samples)
        else:
            found = list(self._drawn(self._bank[decoded.key], indices))
        samples = [each.model_copy(update={"prompt": index}) for each, index in zip(found, indices, strict=True)]
        for sample in samples:
            on_sample(sample)
        return Measurement(samples=tuple(samples))

    def side_by_side(
        self, candidates: Sequence[Candidate], indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> list[Measurement]:
        """Measure one after another: what is drawn depends on no other candidate."""
        return [self.measure(each, indices, on_sample) for each in candidates]

    def _drawn(
        self, pool: Mapping[tuple[int, bool], Sequence[PromptSample]], indices: Sequence[int]
    ) -> Iterator[PromptSample]:
        """Draw samples in which plain decoding and candidate have the order that a real bench would use."""
        for turn, index in enumerate(indices):
            choices = pool[self._prompts[index], turn % 2 == 0]
            yield choices[int(self._stream.integers(len(choices)))]

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate unchanged: none of the families has an adaptive rule that drafts."""
        return candidate


def search_among(family: Family, tuning: Measuring, held_out: Measuring, config: SearchConfig) -> dict[str, Any]:
    """Run trials, race, confirmation and decision, as a search does."""
    indices = tuning.indices[: config.samples_per_trial]
    records = [
        TrialRecord(
            study="null",
            number=number,
            state=TrialState.COMPLETE,
            candidate=candidate,
            measurement=tuning.measure(candidate, indices),
        )
        for number, candidate in enumerate(family.candidates)
    ]
    unseen = unseen_by_trials(tuning.indices, config.samples_per_trial)
    finalists = race(shortlist(records, ["null"], config.finalists), tuning, unseen, Progress())
    chosen = to_confirm(finalists)
    winner, *_ = confirm(chosen, held_out, Budget(None, StageClock()), Progress(), Confirmations())
    watch = MachineWatch()
    watch.look()
    noise = watch.noise(blocks(records, finalists), winner.measurement)
    busy = bool(noise.disturbances)
    refused = objection(winner.candidate, finalists[0].measurement, winner.measurement, busy=busy)
    confirmed = winner.measurement.speedup_interval()
    best = max(record.speedup or 0.0 for record in records)
    return {"best trial": best, "confirmed": confirmed.value, "ci95": confirmed.ci95, "claims": refused is None}


def check_nulls(
    name: str,
    family: Family,
    benches: Sequence[Bench],
    config: SearchConfig,
    *,
    num_runs: int,
    repetitions: int,
    fresh: bool,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run `num_runs` small searches among the family's candidates, each on newly drawn prompts; return a row, and the runs."""
    decoded = list({each.key: each for each in family.decoded_as.values()}.values())
    banks = [None if fresh else fill_bank(bench, decoded, repetitions) for bench in benches]
    stream = np.random.default_rng(config.seed)
    runs = []
    for _ in range(num_runs):
        tuning, held_out = (NullBench(bench, bank, family, stream) for bench, bank in zip(benches, banks, strict=True))
        runs.append(search_among(family, tuning, held_out, config))
    num_claims = sum(run["claims"] for run in runs)
    low, high = stats.binomtest(num_claims, num_runs).proportion_ci(confidence_level=0.95)
    row = {"candidates": name, "truth": family.truth, "number": len(family.candidates)}
    row |= {key: f"{fmean(run[key] for run in runs):.3f}" for key in ("best trial", "confirmed")}
    share = f"{num_claims / num_runs:.1%} [{low:.1%}, {high:.1%}]"
    return {**row, "runs": num_runs, "claims": num_claims, "share": share}, runs


def check_coverage(task: Task, bench: Bench, *, count: int, num_passes: int, max_tokens: int) -> list[dict[str, Any]]:
    """Measure `count` random configurations in `num_passes` passes; return a row for each with its confirmations."""
    candidates = random_candidates(task.target, count, task.config.seed, max_tokens=max_tokens, heads=head_drafts(task))
    indices = range(len(bench.prompts))
    passes = [[bench.measure(candidate, indices) for candidate in candidates] for _ in range(num_passes)]
    stream = np.random.default_rng(task.config.seed)
    rows = []
    for candidate, measured in zip(candidates, zip(*passes, strict=True), strict=True):
        drawn = confirmations(measured, min(CONFIRMED, len(indices)), stream)
        below = sum(interval.ci95[1] < truth for interval, truth in drawn)
        above = sum(interval.ci95[0] > truth for interval, truth in drawn)
        row = {"kind": kind_of(candidate.draft), "candidate": candidate.key, "intervals": len(drawn)}
        speedups = [each.speedup for each in measured]
        rows.append({**row, "too high": above, "too low": below, "speed-ups of the passes": speedups})
    return rows


def confirmations(
    passes: Sequence[Measurement], num_prompts: int, stream: np.random.Generator
) -> list[tuple[Interval, float]]:
    """Draw confirmations from each pass, each with the speed-up of its unused samples; all have the same prompts in order."""
    found = []
    for first in range(len(passes)):
        for _ in range(DRAWS):
            used = _draw(len(passes), len(passes[0].samples), num_prompts, first, stream)
            samples = tuple(passes[turn].samples[prompt] for prompt, turns in used.items() for turn in turns)
            found.append((Measurement(samples=samples).speedup_interval(), _speedup_of_unused(passes, used)))
    return found


def _draw(
    num_passes: int, num_prompts: int, count: int, first: int, stream: np.random.Generator
) -> dict[int, list[int]]:
    """Draw `count` prompts with replacement, and return the passes whose samples each uses, from `first` on.

    At least one sample of each prompt stays unused.
    """
    times = np.zeros(num_prompts, dtype=int)
    while times.sum() < count:
        prompt = int(stream.integers(num_prompts))
        times[prompt] += times[prompt] < num_passes - 1
    return {
        int(prompt): [(first + again) % num_passes for again in range(times[prompt])]
        for prompt in np.flatnonzero(times)
    }


def _speedup_of_unused(passes: Sequence[Measurement], used: Mapping[int, Sequence[int]]) -> float:
    """Return the speed-up of the unused samples; a prompt has the same weight however many of its samples are unused."""
    work = np.array(
        [
            [(s.plain_seconds, s.plain_tokens, s.draft_seconds, s.draft_tokens) for s in measured.samples]
            for measured in passes
        ]
    )  # [passes, prompts, 4]
    for prompt, turns in used.items():
        work[list(turns), prompt] = np.nan
    plain_seconds, plain_tokens, seconds, tokens = np.nanmean(work, axis=0).sum(axis=0)
    return float((plain_seconds / plain_tokens) / (seconds / tokens))


def coverage_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the shares of intervals that contain the true value, of all configurations and of each kind."""
    rows = []
    for kind in ("all", *sorted({each["kind"] for each in found})):
        chosen = [each for each in found if kind in ("all", each["kind"])]
        total, above, below = (sum(each[key] for each in chosen) for key in ("intervals", "too high", "too low"))
        logs = [np.var(np.log(each["speed-ups of the passes"]), ddof=1) for each in chosen]
        row = {"configurations": kind, "number": len(chosen), "intervals": total}
        shares = {"covered": total - above - below, "too high": above, "too low": below}
        row |= {name: f"{share / total:.1%}" for name, share in shares.items()}
        rows.append({**row, "from pass to pass": f"{float(np.sqrt(np.mean(logs))):.1%}"})
    return rows


def main() -> None:
    parser = search_arguments(__doc__)
    parser.add_argument("--family", nargs="+", choices=("disguised", "idle", "whole"), default=list(families(1)))
    parser.add_argument("--copies", type=int, default=8, help="equal candidates to choose the best of")
    parser.add_argument(
        "--runs", type=int, default=400, help="searches of each family; 40 are a day's work with --fresh"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="times that each prompt is decoded for the bank")
    parser.add_argument("--fresh", action="store_true", help="decode in every run instead of drawing from the bank")
    parser.add_argument("--configurations", type=int, default=30, help="random ones whose intervals are checked, or 0")
    parser.add_argument("--passes", type=int, default=5, help="times that all prompts are decoded with each, 3 or more")
    parser.add_argument("--max-tokens", type=int, default=8, help="longest draft")
    args = parser.parse_args()
    task = prepare(read_config(args), Printed())
    benches = [
        open_bench(task, part, "plain decoding", Printed()) for part in (task.prompts.tuning, task.prompts.held_out)
    ]
    document: dict[str, Any] = {**facts_of(task), "nulls": {}}
    nulls, device = list[dict[str, Any]](), task.target.device
    known = families(args.copies)
    for name in args.family:
        row, document["nulls"][name] = check_nulls(
            name,
            known[name],
            benches,
            task.config,
            num_runs=args.runs,
            repetitions=args.repetitions,
            fresh=args.fresh,
        )
        nulls.append(row)
        write(args.json, document, nulls, device=device)
    show(f"False claims of a speed-up (limit: {MAX_CLAIMS:.0%} of the runs)", nulls)
    if args.configurations:
        prompts = [*task.prompts.tuning, *task.prompts.held_out]
        bench = open_bench(task, prompts, "plain decoding of all prompts", Printed())
        document["coverage"] = check_coverage(
            task, bench, count=args.configurations, num_passes=args.passes, max_tokens=args.max_tokens
        )
        show(
            f"Coverage of 95 % intervals of a confirmation (at least {LEAST_COVERED:.0%} expected)",
            coverage_rows(document["coverage"]),
        )
        write(args.json, document, nulls, device=device)


if __name__ == "__main__":
    main()
