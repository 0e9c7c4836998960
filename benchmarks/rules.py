"""Draft-length rules on the draft of a profile, beside every fixed length, on the same prompts and side by side.

The best fixed length is found by measuring all of them on those very prompts, which no user could have known: a rule that comes
near it is useful, and on a mixture of tasks (--set category_column=COLUMN) an adaptive rule can be faster. Prompts, model and
decoding are those of `sdtune bench`, whose settings --set takes. AdaEDL was published with --max-tokens 3 7 16 at --temperature
0.7, 1, 1.3 and 1.7; --initial-thresholds compares starts of the rules with a moving threshold.

    python -m benchmarks.rules --profile profile.yaml --dataset configs/demo/prompts.jsonl --set held_out_prompts=24
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.results import ratio_interval, show, write
from benchmarks.task import Printed, arguments, settings_of
from decoding.draft_length import RULES, AdaptiveThresholdRule, CostAwareRule, DraftLengthRule, Fixed, check_rules
from decoding.head_folder import HeadFolder
from decoding.profile import DraftProfile
from decoding.text import Ending
from studies.contract import Candidate
from studies.measurement import Measurement
from tuner.bench.config import BenchConfig
from tuner.bench.task import prepare_bench
from tuner.measuring.baseline import decode_baseline
from tuner.measuring.paired import Bench

ALL, WARM_UP = "all", 3
"""The column of all tasks, and the first prompts, which warm the rules up and are not measured."""


def main() -> None:
    """Measure all rules, print and write."""
    parser = arguments(__doc__, settings=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--rules", nargs="+", default=[name for name in RULES if name != "fixed"])
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[8], help="longest drafts")
    parser.add_argument("--initial-thresholds", type=float, nargs="*", default=[])
    parser.add_argument("--temperature", type=float, help="default: the profile's")
    args = parser.parse_args()
    check_rules(tuple(args.rules))
    config = BenchConfig(profile=args.profile, dataset=args.dataset, **settings_of(args))
    task = prepare_bench(config, Printed())
    profile, decoding = task.profile, task.profile.decoding
    if args.temperature is not None:
        decoding = decoding.model_copy(update={"temperature": args.temperature})
    prompts = task.measured
    baseline = decode_baseline(
        task.target,
        [prompt.token_ids for prompt in prompts],
        Ending(task.max_new_tokens, task.eos_token_ids),
        categories=[prompt.category for prompt in prompts],
    )
    heads = HeadFolder(task.target, args.profile.parent)
    bench = Bench(task.target, baseline, decoding=decoding, heads=heads, seed=config.seed)
    warm_up = [index for index, row in enumerate(baseline.rows) if row < WARM_UP]
    indices = [index for index in bench.indices if index not in warm_up]
    if not warm_up or len(indices) < 2:
        raise ValueError("rules need 2 prompts to measure and 1 to warm up with outputs that are long enough")
    rules = dict(rules_to_compare(args, profile, bench, warm_up))
    candidates = [Candidate(draft=profile.draft, draft_length=rule) for rule in rules.values()]
    Printed().stage(f"measuring {len(rules)} rules on {len(indices)} prompts")
    results = dict(zip(rules, bench.side_by_side(candidates, indices), strict=True))
    by_task = {
        name: {ALL: each, **{task: on for task, on in each.by_category().items() if len(on.samples) > 1}}
        for name, each in results.items()
    }
    fixed = [name for name, rule in rules.items() if isinstance(rule, Fixed)]
    best = {
        column: max(fixed, key=lambda name: by_task[name][column].speedup) for column in by_task["the profile's own"]
    }
    rows = [{"rule": name, **_cells(by_task, name, best)} for name in rules]
    show(
        f"{profile.draft.describe()}: speed-up over plain decoding, 95 % intervals; * best fixed length of the column",
        rows,
    )
    facts = {
        **task.facts(),
        "draft": profile.draft.model_dump(mode="json"),
        "temperature": decoding.temperature,
        "table": rows,
        "rules": {name: rule.model_dump(mode="json") for name, rule in rules.items()},
        "samples": {name: each.model_dump(mode="json")["samples"] for name, each in results.items()},
    }
    write(args.json, facts, rows, device=task.target.device)


def rules_to_compare(
    args: Namespace, profile: DraftProfile, bench: Bench, warm_up: Sequence[int]
) -> Iterator[tuple[str, DraftLengthRule]]:
    """Yield all fixed lengths, then the asked rules with each longest draft, then the profile's own."""
    for length in range(1, max(args.max_tokens) + 1):
        yield f"fixed {length}", Fixed(max_tokens=length)
    for length in sorted(set(args.max_tokens)):
        for name in args.rules:
            label = f"{name}, K {length}" if len(args.max_tokens) > 1 else name
            rule = RULES[name](rule=name, max_tokens=length)
            if isinstance(rule, AdaptiveThresholdRule) and args.initial_thresholds:
                yield from ((f"{label} from {start:g}", rule.starting_at(start)) for start in args.initial_thresholds)
                continue
            yield label, rule
            if isinstance(rule, CostAwareRule):
                warm = bench.warm_up_rule(Candidate(draft=profile.draft, draft_length=rule), warm_up)
                yield f"{label}, warm", warm.draft_length
    yield "the profile's own", profile.draft_length


def _cells(by_task: dict[str, dict[str, Measurement]], name: str, best: dict[str, str]) -> dict[str, object]:
    """Return the speed-ups of a rule over plain decoding and over the best fixed length, on all prompts and on each task."""
    cells = dict[str, object]()
    for column, fixed in best.items():
        here = by_task[name][column]
        cells[column] = f"{here.speedup_interval()}{'*' * (fixed == name)}"
        cells[f"{column} over best fixed"] = f"{ratio_interval(here, by_task[fixed][column])}"
    whole = by_task[name][ALL]
    cells |= {"acceptance length": whole.mean_acceptance_length, "identical": whole.num_identical}
    return {**cells, "ties": whole.num_ties, "prompts": len(whole.samples)}


if __name__ == "__main__":
    main()
