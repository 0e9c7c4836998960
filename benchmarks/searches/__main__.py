"""Compare searches: the same problem, the same budget, several seeds.

A search is a study of ours, a sampler of Optuna on the same space (`tpe`, `random`, `optuna:GPSampler`) or a published search for
skip sets: swift, draft_verify, skip_sets_tpe, skip_sets_random, odd_layers. A seed orders the tuning prompts and seeds the search.
A search selects by its own measurements, which overrate the selected candidate: so the best of each run is decoded once more on
held-out prompts, all side by side. Only these figures are compared. Preparation before the first trial counts. The order of the
searches rotates, so that none always has the cold machine.

    python -m benchmarks.searches joint swift draft_verify --config configs/demo.yaml --seconds 60 --json searches.json
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import fmean

import numpy as np
import optuna

from benchmarks.results import show, write
from benchmarks.searches.rivals import RIVALS
from benchmarks.searches.trials import Limits, Trial, run_search
from benchmarks.task import Printed, facts_of, read_config, search_arguments
from studies.contract import Candidate
from studies.measurement import Measurement
from studies.ratios import Work, speed_ratio
from tuner.measuring.paired import Bench
from tuner.search.task import open_bench, prepare

CHUNK = 8
"""Candidates that share one plain decoding per held-out prompt; all of them are in memory together."""
Run = tuple[str, int, list[Trial]]
"""Search, seed, trials."""


def main() -> None:
    """Run the searches, measure what they found, print and write."""
    parser = search_arguments(__doc__)
    parser.add_argument(
        "searches", nargs="+", metavar="SEARCH", help="searches; the others are compared with the first"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="time of each run; default: 120, unless another limit is given")
    parser.add_argument("--tokens", type=int, help="tokens that each run may decode")
    parser.add_argument("--trials", type=int)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    limits = Limits(args.seconds, args.tokens, args.trials)
    if limits == Limits():
        limits = Limits(seconds=120.0)
    progress = Printed()
    names = list(dict.fromkeys(args.searches))
    ours = [name for name in names if name not in RIVALS]
    task = prepare(read_config(args, **({"study": tuple(ours)} if ours else {})), progress)
    tuning = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
    runs: list[Run] = []
    for turn in range(args.seeds):
        seed = task.config.seed + turn
        order = np.random.default_rng(seed).permutation(len(tuning.prompts))
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            bench = tuning.reordered([int(index) for index in order])
            trials = list(run_search(name, task, bench, seed, limits))
            runs.append((name, seed, trials))
            progress.say(f"{name}, seed {seed}: {len(trials)} trials in {trials[-1].seconds if trials else 0:.1f} s")
    held_out = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
    warm_up = range(min(task.config.prompts_per_trial, len(tuning.prompts)))
    wanted = {best.key: best for _, _, trials in runs if (best := best_of(trials)) is not None}
    progress.stage(f"measuring {len(wanted)} candidates on the held-out prompts")
    warmed_up = iter([tuning.warm_up_rule(each, warm_up) for each in wanted.values()])
    measured = list[Measurement]()
    while chunk := list(islice(warmed_up, CHUNK)):
        measured += held_out.side_by_side(chunk, held_out.indices)
    of = dict(zip(wanted, measured, strict=True))
    works = {name: pooled([run for run in runs if run[0] == name], of, held_out) for name in names}
    rows = []
    for name in names:
        own = [trials for search, _, trials in runs if search == name]
        found = {best.key for trials in own if (best := best_of(trials)) is not None}
        row = {"search": name, "trials": fmean(map(len, own)), "held-out speed-up": f"{speed_ratio(*works[name])}"}
        row[f"over {names[0]}"] = "" if name == names[0] else f"{speed_ratio(works[names[0]][1], works[name][1])}"
        rows.append({**row, "not identical": sum(not of[key].is_lossless for key in found)})
    show(f"Searches, {args.seeds} seeds, each within {limits}; speed-ups on held-out prompts, 95 % intervals", rows)
    lines = [
        {
            "search": name,
            "seed": seed,
            "trial": number,
            "seconds": trial.seconds,
            "tokens": trial.tokens,
            "tuning_speedup": trial.speedup,
            "candidate": trial.candidate.describe(parameters=True),
        }
        for name, seed, trials in runs
        for number, trial in enumerate(trials, 1)
    ]
    samples = {key: each.model_dump(mode="json")["samples"] for key, each in of.items()}
    facts = {**facts_of(task), "limits": vars(limits), "table": rows, "samples": samples}
    write(args.json, facts, lines, device=task.target.device)


def best_of(trials: Sequence[Trial]) -> Candidate | None:
    """Return the candidate of the fastest trial, or None if none was faster than plain decoding."""
    best = max(trials, key=lambda trial: trial.speedup or 0.0, default=None)
    return None if best is None or (best.speedup or 0.0) <= 1.0 else best.candidate


def pooled(runs: Sequence[Run], of: dict[str, Measurement], held_out: Bench) -> tuple[Work, Work]:
    """Return the work of plain decoding and of each run's best candidate by prompt, added up over the runs.

    Seconds are in mean plain ones of a token, as not all candidates are measured at the same time. A run that ended with plain
    decoding has a second for each of as many tokens.
    """
    works = list[tuple[Work, Work]]()
    for _, _, trials in runs:
        if (best := best_of(trials)) is not None:
            measured = of[best.key]
            pair, rate = (measured.plain_decode, measured.draft_decode), measured.plain_tokens_per_second
            works.append((Work(pair[0].seconds * rate, pair[0].tokens), Work(pair[1].seconds * rate, pair[1].tokens)))
        else:
            ones = np.ones(len(held_out.indices))
            works.append((Work(ones, ones),) * 2)
    plain, draft = zip(*works, strict=True)
    return _sum(plain), _sum(draft)


def _sum(works: Sequence[Work]) -> Work:
    return Work(np.sum([each.seconds for each in works], axis=0), np.sum([each.tokens for each in works], axis=0))


if __name__ == "__main__":
    main()
