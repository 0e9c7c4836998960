"""Draft-length rules on the draft of a profile, beside every fixed length, on the same prompts and side by side.

The best fixed length is found by measuring all of them on those very prompts, which no user could have known: a rule that comes
near it is useful, and on a mixture of data sets an adaptive rule can be faster. AdaEDL was published with --max-tokens 3 7 16 at
--temperature 0.7, 1, 1.3 and 1.7; --initial-thresholds compares starts of the rules with a moving threshold.

    python -m benchmarks.rules --profile profile.yaml --dataset configs/demo/prompts.jsonl configs/demo/prose.jsonl
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import torch

from benchmarks.results import show, write
from benchmarks.task import Printed, arguments
from decoding.deploy.custom_generate import check_target
from decoding.draft_length import RULES, AdaptiveThresholdRule, CostAwareRule, DraftLengthRule, Fixed, check_rules
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding, DraftProfile
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate
from studies.measurement import Measurement, ratio_interval
from tuner.inputs.models import Loaded, eos_token_ids, load
from tuner.inputs.prompts import load_prompts
from tuner.measuring.baseline import decode_baseline
from tuner.measuring.paired import Bench
from tuner.results import public_name

MIXED = "mixed"


def main() -> None:
    """Measure all rules, print and write."""
    parser = arguments(__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--model", help="default: the profile's")
    parser.add_argument("--dataset", nargs="+", required=True)
    parser.add_argument("--prompts", type=int, default=24, help="measured prompts of each data set")
    parser.add_argument(
        "--warm-up-prompts", type=int, default=8, help="further prompts, which warm up the adaptive rules"
    )
    parser.add_argument("--rules", nargs="+", default=[name for name in RULES if name != "fixed"])
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[8], help="longest drafts")
    parser.add_argument("--initial-thresholds", type=float, nargs="*", default=[])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="default: the profile's")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    check_rules(tuple(args.rules))
    if args.threads:
        torch.set_num_threads(args.threads)
    profile = DraftProfile.load(args.profile)
    decoding = profile.decoding
    if args.temperature is not None:
        decoding = decoding.model_copy(update={"temperature": args.temperature})
    identity = profile.target
    loaded = load(args.model or identity.model, revision=identity.revision, dtype=identity.dtype, device=args.device)
    check_target(profile, loaded.model)
    bench, warm_up, parts = _opened(args, profile, decoding, loaded)
    rules = dict(rules_to_compare(args, profile, bench, warm_up))
    indices = in_turn(list(parts.values()))
    candidates = [Candidate(draft=profile.draft, draft_length=rule) for rule in rules.values()]
    Printed().stage(f"measuring {len(rules)} rules on {len(indices)} prompts")
    results = dict(zip(rules, bench.side_by_side(candidates, indices), strict=True))
    columns = parts if len(parts) == 1 else {**parts, MIXED: indices}
    fixed = [name for name, rule in rules.items() if isinstance(rule, Fixed)]
    best = {
        column: max(fixed, key=lambda name: on(results[name], chosen).speedup) for column, chosen in columns.items()
    }
    rows = []
    for name, measured in results.items():
        row: dict[str, object] = {"rule": name}
        for column, chosen in columns.items():
            here = on(measured, chosen)
            row[column] = f"{here.speedup_interval()}{'*' if best[column] == name else ''}"
            row[f"{column} over best fixed"] = f"{ratio_interval(here, on(results[best[column]], chosen))}"
        row |= {"acceptance length": measured.mean_acceptance_length, "identical": measured.num_identical}
        rows.append({**row, "ties": measured.num_ties, "prompts": len(measured.samples)})
    show(
        f"{profile.draft.describe()}: speed-up over plain decoding, 95 % intervals; * best fixed length of the column",
        rows,
    )
    facts = {
        "profile": profile.name,
        "draft": profile.draft.model_dump(mode="json"),
        "model": loaded.name,
        "datasets": [public_name(each) for each in args.dataset],
        "temperature": decoding.temperature,
        "top_p": args.top_p,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "table": rows,
        "rules": {name: rule.model_dump(mode="json") for name, rule in rules.items()},
        "samples": {name: each.model_dump(mode="json")["samples"] for name, each in results.items()},
    }
    write(args.json, facts, rows, device=loaded.model.device)


def _opened(
    args: Namespace, profile: DraftProfile, decoding: Decoding, loaded: Loaded
) -> tuple[Bench, list[int], dict[str, list[int]]]:
    """Return the bench on all prompts, the indices to warm up on, and those to measure, by data set.

    Prompts whose outputs end too soon are left out. Raises ValueError if fewer than two, or none to warm up on, are left.
    """
    target = Target(loaded.model, profile.decoding.runner, exact_width=profile.decoding.exact_width)
    prompts: list[tuple[int, ...]] = []
    ranges: dict[str, tuple[range, range]] = {}
    for source in args.dataset:
        found = load_prompts(
            source,
            loaded.tokenizer,
            num_tuning=args.warm_up_prompts,
            num_held_out=args.prompts,
            max_new_tokens=args.max_new_tokens,
            context_length=target.context_length,
            seed=args.seed,
        )
        middle, start = len(prompts) + len(found.tuning), len(prompts)
        prompts += [prompt.token_ids for prompt in (*found.tuning, *found.held_out)]
        ranges[Path(source).stem] = range(start, middle), range(middle, len(prompts))
    baseline = decode_baseline(target, prompts, Ending(args.max_new_tokens, eos_token_ids(loaded.model)))
    index_of = {row: index for index, row in enumerate(baseline.rows)}
    warm_up = [[index_of[row] for row in rows if row in index_of] for rows, _ in ranges.values()]
    parts = {name: [index_of[row] for row in rows if row in index_of] for name, (_, rows) in ranges.items()}
    if not all(warm_up) or any(len(chosen) < 2 for chosen in parts.values()):
        raise ValueError("a data set needs 2 prompts to measure and 1 to warm up with outputs that are long enough")
    heads = HeadFolder(target, args.profile.parent)
    bench = Bench(target, baseline, decoding=decoding, heads=heads, seed=args.seed, top_p=args.top_p)
    return bench, in_turn(warm_up), parts


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


def on(measured: Measurement, indices: Iterable[int]) -> Measurement:
    """Return the measurement on some of its prompts."""
    wanted = set(indices)
    return Measurement(samples=tuple(each for each in measured.samples if each.prompt in wanted))


def in_turn(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the elements of all groups, one per group in turn."""
    return [index for indices in zip_longest(*groups) for index in indices if index is not None]


if __name__ == "__main__":
    main()
