"""Each kind of draft alone and combined: predicted and measured speed-ups, memory, and what each kind adds to the others.

Every kind has the setting with the best prediction on the tuning prompts, the quantised model also from fewer token ids; then a
lookup comes before each, whose copies it may check. All settings and plain decoding continue the
held-out prompts in turns, and each output is compared with plain decoding.
With --set category_column=COLUMN every category is a task, and speed-ups are geometric means over the tasks.

    python -m benchmarks.kinds --config configs/demo.yaml --set held_out_prompts=12 --only int8 lookup exit --json kinds.json
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from benchmarks.results import show, write
from benchmarks.task import Printed, facts_of, head_drafts, read_config, search_arguments
from decoding.decoder import Decoder
from decoding.drafts import BitWidth, Draft, EarlyExit, LayerSkip, Lookup, PromptLookup, SuffixDraft
from decoding.head_folder import HeadFolder
from decoding.kernels.choice import kernel_for
from decoding.profile import Interval
from studies.contract import Candidate
from studies.measurement import Measurement
from studies.prediction.pools import NGRAMS, SUFFIXES, lookups_before
from studies.prediction.predictor import COPYING, Predictor
from studies.prediction.proposals import Proposals
from studies.prediction.survey import Survey
from studies.ratios import Ratio, geometric_mean
from studies.space import SkipSpace, frequent_ids
from tuner.measuring.baseline import Baseline
from tuner.measuring.cost_table import cost_table
from tuner.search.task import Task, open_bench, prepare

SHORTLIST, NUM_QUANTISED = 3, 2
"""Drafts of a family that are predicted on all tuning prompts, and those of them that are tried in each precision."""
LOOKUP, CHECKS, FEWER = "lookup", "checks", "ids"


@dataclass(frozen=True)
class Row:
    """A kind or a combination of kinds with its chosen setting."""

    name: str
    uses: frozenset[str]
    candidate: Candidate
    predicted: float
    draft_step: float
    """Cost of a draft step in plain passes, by the cost table."""
    choosing_seconds: float
    measured: Measurement = field(default=Measurement(samples=()), repr=False)


def main() -> None:
    """Choose, measure, print and write."""
    parser = search_arguments(__doc__)
    parser.add_argument("--max-tokens", type=int, default=8, help="longest draft")
    parser.add_argument(
        "--bits", type=int, nargs="*", choices=(4, 8), help="precisions; default: both where they are fast"
    )
    parser.add_argument("--only", nargs="*", default=[], help="kinds to use, such as int8 or lookup; default: all")
    parser.add_argument("--combinations", type=int, default=8, help="combined kinds to measure")
    parser.add_argument("--skip-sets", type=int, default=60, help="skip sets to rate by prediction")
    parser.add_argument("--rating-tokens", type=int, default=256, help="tokens on which skip sets and exits are rated")
    args = parser.parse_args()
    progress = Printed()
    config = read_config(args, temperature=0.0, finalists=100)  # as many decoders are kept as kinds are measured
    task = prepare(config, progress)
    head_drafts(task)  # refused before any decoding if they were trained on held-out prompts
    held_out = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", progress)
    tuning = open_bench(task, task.prompts.tuning, "decoding the tuning prompts plainly", progress)
    rows = list(_chosen(args, task, tuning.baseline, held_out.baseline))
    measured = to_measure(rows, args.combinations)
    taken = {row.name: footprint(task, row.candidate) for row in measured}
    progress.stage(f"measuring {len(measured)} kinds on the held-out prompts")
    results = held_out.side_by_side([row.candidate for row in measured], held_out.indices)
    measured = [Row(**{**vars(row), "measured": each}) for row, each in zip(measured, results, strict=True)]
    lines = [{**_line(row), **taken[row.name]} for row in measured]
    adds = additions(measured)
    show("Kinds alone and combined: speed-up over plain decoding on held-out prompts, 95 % intervals", lines)
    if len(measured[0].measured.by_category()) > 1:
        show("Speed-up on each task", [_by_task(row) for row in measured])
    show(
        "What each kind adds: the best setting with it over the best without it, measured; below 1 it does not pay",
        adds,
    )
    facts = {
        **facts_of(task),
        "kinds": lines,
        "by_task": [_by_task(row) for row in measured],
        "additions": adds,
        "candidates": {row.name: row.candidate.model_dump(mode="json") for row in measured},
        "samples": {row.name: row.measured.model_dump(mode="json")["samples"] for row in measured},
    }
    write(args.json, facts, lines, device=task.target.device)


def _chosen(args: Namespace, task: Task, tuning: Baseline, held_out: Baseline) -> Iterator[Row]:
    """Yield a row for each kind, alone and combined, chosen by prediction on the tuning prompts."""
    target = task.target
    fast: tuple[BitWidth, ...] = (8, 4) if kernel_for("int8", target.device).kernel is not None else ()
    bits = () if not target.can_be_quantised else tuple(args.bits) if args.bits is not None else fast
    lengths = [len(prompt) for each in (tuning, held_out) for prompt in each.prompts]
    contexts = sorted({min(lengths), max(lengths) + task.config.max_new_tokens})
    seed = task.config.seed
    costs = cost_table(target, max_tokens=args.max_tokens, contexts=contexts, bits=bits, seed=seed, progress=Printed())

    def predictor(num_tokens: int | None) -> Predictor:
        outputs = [output[:num_tokens] for output in tuning.continuations]
        survey = Survey(
            target, tuning.prompts, outputs, decoding=task.decoding, seed=task.config.seed, heads=task.head_folder
        )
        return Predictor(survey, costs, max_tokens=args.max_tokens, decoding=task.decoding)

    rating = predictor(1 + max(1, args.rating_tokens // len(tuning.prompts)))  # the first token is the prefill's
    whole = predictor(None)

    def wanted(uses: Collection[str]) -> bool:
        return not args.only or set(uses) <= set(args.only)

    def best(name: str, uses: Collection[str], drafts: Sequence[Draft]) -> Row:
        start = time.perf_counter()
        whole.record(drafts)
        found = whole.best_first(drafts)[0]
        step = whole.costs(found.draft).draft_step if found.draft.runs_model else COPYING
        candidate = Candidate(draft=found.draft, draft_length=found.rule)
        return Row(name, frozenset(uses), candidate, found.speedup, step, time.perf_counter() - start)

    alone: list[Row] = []
    for name, propose in families(task, args.skip_sets).items():
        uses = {LOOKUP} if name in ("prompt lookup", "suffix automaton") else {name} - {"model"}
        if not wanted(uses):
            continue
        drafts = propose(rating)
        if len(drafts) > SHORTLIST and drafts[0].runs_model:
            rating.record(drafts)
            drafts = [each.draft for each in rating.best_first(drafts)[:SHORTLIST]]
        if drafts and uses:
            alone.append(best(name, uses, drafts))
        for width in bits:
            quantised = [draft.having(bits=width) for draft in drafts[:NUM_QUANTISED] if "bits" in draft.takes]
            if quantised and wanted(precise := {*uses, f"int{width}"}):
                alone.append(best(f"int{width} {name}" if uses else f"int{width}", precise, quantised))
            if not uses and (below := frequent_ids(target)) and wanted({f"int{width}", FEWER}):
                fewer = LayerSkip(bits=width, ids_below=below)
                alone.append(best(f"int{width}, fewer ids", {f"int{width}", FEWER}, [fewer]))
    after_lookup, checking = list[Row](), list[Row]()
    for row in alone:
        if "lookup" in row.candidate.draft.takes and wanted({*row.uses, LOOKUP}):
            found = lookups_before(whole, [row.candidate.draft], 1000)
            after_lookup.append(
                best(f"lookup, {row.name}", {*row.uses, LOOKUP}, [each for each in found if not _checks(each)][:1])
            )
            if checked := [each for each in found if _checks(each)][:1]:
                checking.append(best(f"lookup, {row.name} checks", {*row.uses, LOOKUP, CHECKS}, checked))
    yield from (*alone, *after_lookup, *checking)


def _checks(draft: Draft) -> bool:
    first = draft.parts.lookup
    return isinstance(first, Lookup) and first.direct_from is not None


def families(task: Task, num_skip_sets: int) -> dict[str, Callable[[Predictor], Sequence[Draft]]]:
    """Return the settings of each kind among which the best is chosen, as functions of a predictor, by name."""
    target, heads = task.target, list(head_drafts(task).values())
    exits = [EarlyExit(exit_layer=layer) for layer in range(1, target.num_layers)]

    def skip_sets(predictor: Predictor) -> list[Draft]:
        proposals = Proposals(SkipSpace.of(target), predictor)
        for _ in islice(proposals.rate(), num_skip_sets):
            pass
        as_exits = {each.skipped(target.num_layers) for each in exits}
        return [each.draft for each in proposals.best_first() if each.draft not in as_exits]

    found: dict[str, Callable[[Predictor], Sequence[Draft]]] = {
        "prompt lookup": lambda _: [PromptLookup(max_ngram=most, min_ngram=fewest) for most, fewest in NGRAMS],
        "suffix automaton": lambda _: [SuffixDraft(**settings) for settings in SUFFIXES],
    }
    if exits:
        found |= {"model": lambda _: [LayerSkip()], "skip set": skip_sets, "exit": lambda _: exits}
    if heads:
        found["exit with head"] = lambda _: heads
    return found


def to_measure(rows: Sequence[Row], num_combinations: int) -> list[Row]:
    """Return every kind alone, the combinations with the best predictions, and the best combination without each kind."""
    combined = sorted((row for row in rows if len(row.uses) > 1), key=lambda row: -row.predicted)
    wanted = {row.name for row in combined[:num_combinations]}
    for kind in {use for row in rows for use in row.uses} if num_combinations else ():
        wanted |= {row.name for row in [row for row in combined if kind not in row.uses][:1]}
    return [row for row in rows if len(row.uses) < 2 or row.name in wanted]


def over(faster: Measurement, slower: Measurement | None = None) -> Interval:
    """Return the speed of one measurement over another's, or over plain decoding, paired by prompt.

    It is the geometric mean over the tasks, or the ratio over all prompts if a task has fewer than two.
    """
    if slower is not None and [each.prompt for each in faster.samples] != [each.prompt for each in slower.samples]:
        raise ValueError("a ratio needs two measurements of the same prompts in the same order")

    def ratio(fast: Measurement, slow: Measurement | None) -> Ratio:
        return Ratio.of_speeds(fast.plain_decode if slow is None else slow.draft_decode, fast.draft_decode)

    tasks = faster.by_category()
    if not tasks or any(len(each.samples) < 2 for each in tasks.values()):
        return ratio(faster, slower).interval()
    others = {} if slower is None else slower.by_category()
    return geometric_mean([ratio(each, others.get(task)) for task, each in tasks.items()])


def additions(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return what each kind adds: the fastest row that uses it over the fastest that does not, plain decoding included."""
    speedups = {row.name: over(row.measured).value for row in rows}
    found = []
    for kind in dict.fromkeys(use for row in rows for use in sorted(row.uses)):
        best = max((row for row in rows if kind in row.uses), key=lambda row: speedups[row.name])
        others = [row for row in rows if kind not in row.uses and speedups[row.name] > 1.0]
        other = max(others, key=lambda row: speedups[row.name], default=None)
        ratio = over(best.measured, other.measured if other else None)
        without = other.name if other else "plain decoding"
        found.append({"kind": kind, "best with it": best.name, "best without it": without, "ratio": f"{ratio}"})
    return found


def footprint(task: Task, candidate: Candidate) -> dict[str, float]:
    """Return the MiB of the tensors that come into being with a draft's passes, and the seconds of making them.

    Packed weights, heads, rows of an LM head; keys and values are made with each sequence and are not counted.
    """
    gc.collect()
    known = set(_tensor_bytes())
    start = time.perf_counter()
    heads = HeadFolder(task.target, task.head_folder.folder)  # a new one, which has read no head yet
    made = Decoder(task.target, candidate.draft, candidate.draft_length, task.decoding, heads=heads)
    seconds = time.perf_counter() - start
    held = sum(size for address, size in _tensor_bytes().items() if address not in known)
    del made
    gc.collect()
    return {"MiB": held / 2**20, "packing s": seconds}


def _tensor_bytes() -> dict[int, int]:
    """Return the bytes of the memory behind all tensors that the garbage collector lists, by address."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        # Subclasses, such as the fake tensors of torch.compile, and functional tensors have no memory.
        if type(each) not in (torch.Tensor, torch.nn.Parameter) or each.is_meta or torch._is_functional_tensor(each):
            continue
        found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return found


def _line(row: Row) -> dict[str, Any]:
    measured = row.measured
    return {
        "kind": row.name,
        "setting": f"{row.candidate.draft.describe()}; {row.candidate.draft_length.describe()}",
        "predicted": row.predicted,
        "draft step": row.draft_step,
        "choosing s": row.choosing_seconds,
        "measured": f"{over(measured)}",
        "acceptance length": measured.mean_acceptance_length,
        "identical": measured.num_identical,
        "ties": measured.num_ties,
        "prompts": measured.num_prompts,
    }


def _by_task(row: Row) -> dict[str, Any]:
    tasks = {name: f"{over(each)}" for name, each in row.measured.by_category().items() if len(each.samples) > 1}
    return {"kind": row.name, **tasks, "all": f"{over(row.measured)}"}


if __name__ == "__main__":
    main()
