"""Models x tasks x methods in one table: every method is searched for, then all drafts continue the same held-out prompts in turns.

A method is a study of `sdtune search`, `ada_edl` (its published rule on the drafts of exit_layer) or a rival of
`benchmarks.searches`. With --tuning each method is searched once, on that data set, and measured on every task; otherwise on each
task. Each search and each comparison is a process of its own with its results in --out: one that fails is reported, the others go
on, and the same command runs what is missing. A prompt that was a tuning prompt, or that a head was trained on, is refused in a
comparison. A method's row is the best draft that it found; * marks tasks where its search decided for plain decoding. `overall` is
the geometric mean over the tasks; its interval is for these tasks, not for tasks in general. `sdtune bench` compares a profile with
transformers' own generation.

    python -m benchmarks.suite --models demo=configs/demo/model --set heads=configs/demo/heads --set timeout=3m \\
        --tasks code=configs/demo/prompts.jsonl tables=configs/demo/tables.jsonl --methods conf_layers joint swift
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.results import show, write
from benchmarks.searches.rivals import RIVALS
from benchmarks.searches.trials import Limits, run_search
from benchmarks.steps import run_step
from benchmarks.task import Printed, arguments, facts_of, head_drafts, read_config, search_arguments
from decoding.exit_heads import prompt_sha256
from studies.contract import Candidate
from studies.measurement import Measurement
from studies.ratios import Ratio, geometric_mean
from tuner.search.run import search
from tuner.search.task import open_bench, prepare, token_ids

METHODS: dict[str, dict[str, Any]] = {
    "ada_edl": {"study": ("exit_layer", "draft_length"), "studies": {"draft_length": {"rules": ["ada_edl"]}}}
}
"""Methods made of several studies, as settings of a search."""


def main() -> None:
    """Run the missing steps, print the tables and write them."""
    parser = arguments(__doc__, settings=True)
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=MODEL")
    parser.add_argument("--dtypes", nargs="+", default=["auto"])
    parser.add_argument("--tasks", nargs="+", required=True, metavar="NAME=DATASET")
    parser.add_argument(
        "--methods", nargs="+", default=["conf_layers", "exit_layer", "ada_edl", "swift", "draft_verify", "joint"]
    )
    parser.add_argument("--tuning", metavar="DATASET", help="data set of all searches; default: each task's own")
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration of a search: settings of all")
    parser.add_argument("--out", type=Path, default=Path("suite"), help="folder of the steps' results")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    for (model, path), dtype in product(_named(args.models), args.dtypes):
        found = list(_compared(args, model, path, dtype, failed))
        rows += found
        show(f"{model}, {dtype}: speed-up over plain decoding on held-out prompts, 95 % intervals", found)
    if failed:
        show("Failed", failed)
    write(args.json, {"table": rows, "failed": failed, "set": args.set}, rows)


def _named(given: list[str]) -> list[tuple[str, str]]:
    pairs = [tuple(each.split("=", 1)) for each in given]
    if wrong := [each for each in pairs if len(each) != 2]:
        raise ValueError(f"NAME=VALUE is wanted, got {wrong[0][0]!r}")
    return [(name, value) for name, value in pairs]


def _compared(
    args: Namespace, model: str, path: str, dtype: str, failed: list[dict[str, str]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each method, with its speed-up on each task and over all of them."""
    place = args.out / model / dtype
    common = ["--model", path, "--set", f"dtype={dtype}", *(part for each in args.set for part in ("--set", each))]
    common += ["--config", str(args.config)] if args.config else []
    common += ["--threads", str(args.threads)] if args.threads else []
    by_method: dict[str, dict[str, Measurement | None]] = {}
    kept: set[tuple[str, str]] = set()
    for task, dataset in _named(args.tasks):
        files = []
        for method in args.methods:
            results = place / ("tuning" if args.tuning else task) / f"{method}.json"
            options = ["search", "--method", method, "--dataset", args.tuning or dataset, *common]
            found = run_step("benchmarks.suite", *options, results=results)
            if "failed" in found:
                failed.append({"step": f"{model} {dtype} {results.parent.name} {method}", "cause": found["failed"]})
            else:
                files.append(str(results))
        options = ["compare", "--candidates", *files, "--dataset", dataset, *common]
        found = run_step("benchmarks.suite", *options, results=place / task / "compare.json")
        if "failed" in found:
            failed.append({"step": f"{model} {dtype} {task} compare", "cause": found["failed"]})
        kept |= {(method, task) for method, keeps in found.get("keeps_plain", {}).items() if keeps}
        for method, samples in found.get("samples", {}).items():
            measured = Measurement.model_validate({"samples": samples}) if samples is not None else None
            by_method.setdefault(method, {})[task] = measured
    for method, tasks in by_method.items():
        ratios = [Ratio(1.0, 0.0, 1.0) if each is None else _ratio(each) for each in tasks.values()]
        known = [each for each in tasks.values() if each is not None]
        cells = {
            task: "plain" if each is None else f"{_ratio(each).interval()}{'*' * ((method, task) in kept)}"
            for task, each in tasks.items()
        }
        yield {
            "model": model,
            "dtype": dtype,
            "method": method,
            **cells,
            "overall": f"{geometric_mean(ratios)}",
            "not lossless": sum(not sample.identical and not sample.tie for each in known for sample in each.samples),
        }


def _ratio(measured: Measurement) -> Ratio:
    return Ratio.of_speeds(measured.plain_decode, measured.draft_decode)


def search_step() -> None:
    """Search by one method; write its best candidate, and the hashes of the prompts that it was tuned on."""
    parser = search_arguments("one search of a suite")
    parser.add_argument("step")
    parser.add_argument("--method", required=True)
    args = parser.parse_args()
    folder, progress = args.json.parent / args.method, Printed()
    folder.mkdir(parents=True, exist_ok=True)
    own = METHODS.get(args.method, {} if args.method in RIVALS else {"study": (args.method,)})
    places = {"storage": f"sqlite:///{folder / 'trials.db'}", "tracking_uri": f"sqlite:///{folder / 'mlflow.db'}"}
    config = read_config(args, distill="auto", stock=False, experiment="suite", **places, **own)
    config = config.model_copy(update={"out": folder / "profile.yaml"})
    task = prepare(config, progress)
    candidate: Candidate = Candidate.plain()
    if args.method in RIVALS:
        bench = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
        limits = Limits(seconds=config.timeout, trials=config.trials)
        trials = list(run_search(args.method, task, bench, config.seed, limits))
        best = max(trials, key=lambda trial: trial.speedup or 0.0, default=None)
        if best is not None and best.speedup is not None:
            candidate = best.candidate
        keeps_plain = best is None or (best.speedup or 0.0) <= 1.0
    else:
        result = search(task, progress)
        candidate, keeps_plain = result.winner.candidate, not result.profile.draft.drafts
    tuned_on = [prompt_sha256(prompt) for prompt in token_ids(task.prompts.tuning)]
    found = {"candidate": candidate.model_dump(mode="json"), "keeps_plain": keeps_plain, "tuned_on": tuned_on}
    facts = {**facts_of(task), **found}
    write(args.json, facts, device=task.target.device)


def compare_step() -> None:
    """Let plain decoding and the candidates of all methods continue the held-out prompts of one task in turns."""
    parser = search_arguments("one comparison of a suite")
    parser.add_argument("step")
    parser.add_argument("--candidates", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    progress = Printed()
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in args.candidates}
    task = prepare(read_config(args, temperature=0.0, finalists=100), progress)
    head_drafts(task)  # refuses heads that were trained on held-out prompts
    tuned_on = {sha256 for each in found.values() for sha256 in each["tuned_on"]}
    if shared := tuned_on & {prompt_sha256(prompt) for prompt in token_ids(task.prompts.held_out)}:
        raise ValueError(
            f"{len(shared)} held-out prompts are tuning prompts of the searches: use data sets without common rows"
        )
    candidates = {name: Candidate.model_validate(each["candidate"]) for name, each in found.items()}
    drafting = {name: each for name, each in candidates.items() if each.draft.drafts}
    bench = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
    measured = bench.side_by_side(list(drafting.values()), bench.indices) if drafting else []
    results = dict(zip(drafting, measured, strict=True))
    rows = [
        {
            "method": name,
            "draft": f"{each.draft.describe()}; {each.draft_length.describe()}",
            "speed-up": f"{results[name].speedup_interval()}",
            "end to end": f"{whole.speedup_interval()}" if (whole := results[name].end_to_end) else None,
            "acceptance length": results[name].mean_acceptance_length,
            "identical": results[name].num_identical,
            "prompts": results[name].num_prompts,
        }
        for name, each in drafting.items()
    ]
    show("Drafts on held-out prompts", rows)
    samples = {
        name: results[name].model_dump(mode="json")["samples"] if name in results else None for name in candidates
    }
    keeps_plain = {name: each["keeps_plain"] for name, each in found.items()}
    facts = {**facts_of(task), "table": rows, "keeps_plain": keeps_plain, "samples": samples}
    write(args.json, facts, rows, device=task.target.device)


if __name__ == "__main__":
    import sys

    {"search": search_step, "compare": compare_step}.get(sys.argv[1] if sys.argv[1:] else "", main)()
