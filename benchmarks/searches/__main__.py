"""Compare searches: the same problem, the same budget, several seeds.

A search is a study of ours, a sampler of Optuna on the same space (`tpe`, `random`, `optuna:GPSampler`) or a published search for
skip sets: swift, swift_batched (measuring after every 100 candidates only), draft_verify, skip_sets_tpe, skip_sets_random,
odd_layers. A seed orders the tuning prompts and seeds the search. A search selects by its own measurements, which overrate the
selected candidate: so each candidate that was ever the best so far is decoded once more on held-out prompts, all side by side. Only
these figures are compared. Preparation before the first trial counts. The order of the searches rotates, so that none always has
the cold machine.

    python -m benchmarks.searches joint swift draft_verify --config configs/demo.yaml --seconds 60 --json searches.json
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice

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
SHARES = (0.25, 0.5, 1.0)
"""Shares of the budget at which the best so far is shown."""
Run = tuple[str, int, list[Trial]]
"""Search, seed, trials."""


def main() -> None:
    """Run the searches, measure their incumbents, print and write."""
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
    wanted = {each.key: each for _, _, trials in runs for _, each in incumbents(trials)}
    progress.stage(f"measuring {len(wanted)} incumbents on the held-out prompts")
    measured = on_held_out([tuning.warm_up_rule(each, warm_up) for each in wanted.values()], held_out)
    of = dict(zip(wanted, measured, strict=True))
    end = {"seconds": limits.seconds, "tokens": limits.tokens, "trials": limits.trials}
    unit = next(name for name, limit in end.items() if limit is not None)
    curves = [(name, seed, held_out_curve(trials, of, unit)) for name, seed, trials in runs]
    finals = {name: pooled([run for run in runs if run[0] == name], of, len(held_out.indices)) for name in names}
    rows = []
    for name in names:
        here = [curve for search, _, curve in curves if search == name]
        budget = {
            f"at {share:.0%}": float(np.mean([value_at(curve, share * (end[unit] or 0)) for curve in here]))
            for share in SHARES
        }
        rows.append(
            {
                "search": name,
                "trials": float(np.mean([len(trials) for search, _, trials in runs if search == name])),
                **budget,
                "held-out speed-up": f"{speed_ratio(*finals[name])}",
                f"over {names[0]}": "" if name == names[0] else f"{speed_ratio(finals[names[0]][1], finals[name][1])}",
                "not identical": sum(
                    not of[each.key].is_lossless for s, _, trials in runs if s == name for _, each in incumbents(trials)
                ),
            }
        )
    show(f"Searches, {args.seeds} seeds, each within {limits}; speed-ups on held-out prompts, 95 % intervals", rows)
    lines = [
        {
            "search": name,
            "seed": seed,
            "trial": number,
            "seconds": trial.seconds,
            "tokens": trial.tokens,
            "tuning_speedup": trial.speedup,
            "candidate": f"{trial.candidate.draft.describe()}; {trial.candidate.draft_length.describe()}",
        }
        for name, seed, trials in runs
        for number, trial in enumerate(trials, 1)
    ]
    curves_of = [{"search": name, "seed": seed, "curve": curve} for name, seed, curve in curves]
    samples = {key: each.model_dump(mode="json")["samples"] for key, each in of.items()}
    facts = {**facts_of(task), "limits": vars(limits), "table": rows, "curves": curves_of, "samples": samples}
    write(args.json, facts, lines, device=task.target.device)


def incumbents(trials: Sequence[Trial]) -> list[tuple[Trial, Candidate]]:
    """Return each trial that was faster than plain decoding and all trials before it, with its candidate."""
    found, best = [], 1.0
    for trial in trials:
        if trial.speedup is not None and trial.speedup > best:
            best = trial.speedup
            found.append((trial, trial.candidate))
    return found


def on_held_out(candidates: Sequence[Candidate], bench: Bench) -> list[Measurement]:
    """Return the measurements of candidates on all prompts, side by side in chunks."""
    measured: list[Measurement] = []
    rest = iter(candidates)
    while chunk := list(islice(rest, CHUNK)):
        measured += bench.side_by_side(chunk, bench.indices)
    return measured


def held_out_curve(trials: Sequence[Trial], of: dict[str, Measurement], unit: str) -> list[tuple[float, float]]:
    """Return steps (spent, held-out speed-up of the best so far from there on); before the first it is 1, plain decoding."""
    numbers = {id(trial): number for number, trial in enumerate(trials, 1)}
    return [
        (float(numbers[id(trial)] if unit == "trials" else getattr(trial, unit)), of[candidate.key].speedup)
        for trial, candidate in incumbents(trials)
    ]


def value_at(curve: Sequence[tuple[float, float]], spent: float) -> float:
    """Return the value of a curve at a budget."""
    index = bisect_right([start for start, _ in curve], spent)
    return curve[index - 1][1] if index else 1.0


def pooled(runs: Sequence[Run], of: dict[str, Measurement], num_prompts: int) -> tuple[Work, Work]:
    """Return the work of plain decoding and of each run's last incumbent by prompt, added up over the runs.

    Seconds are in mean plain ones of a token, as not all incumbents are measured at the same time. A run that ended with plain
    decoding has a second for each of as many tokens.
    """
    works = list[tuple[Work, Work]]()
    for _, _, trials in runs:
        if found := incumbents(trials):
            measured = of[found[-1][1].key]
            pair, rate = (measured.plain_decode, measured.draft_decode), measured.plain_tokens_per_second
            works.append((Work(pair[0].seconds * rate, pair[0].tokens), Work(pair[1].seconds * rate, pair[1].tokens)))
        else:
            works.append((Work(np.ones(num_prompts), np.ones(num_prompts)),) * 2)
    plain, draft = zip(*works, strict=True)
    return _sum(plain), _sum(draft)


def _sum(works: Sequence[Work]) -> Work:
    return Work(np.sum([each.seconds for each in works], axis=0), np.sum([each.tokens for each in works], axis=0))


if __name__ == "__main__":
    main()
