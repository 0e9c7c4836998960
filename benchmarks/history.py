"""What earlier answers add to a suffix automaton (`decoding.history`): on requests from a few templates, or on any data set.

The same draft decodes the held-out prompts in their order with a history, without one, and plainly, in turns; each answer is
compared with plain decoding. Without --dataset the requests are those of `TEMPLATES`. With --bits 8 the int8 model drafts where
nothing is copied.

    python -m benchmarks.history --model smollm2 --set runner=static --threads 1 --json history.json
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.results import show, write
from benchmarks.task import Printed, facts_of, read_config, search_arguments
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip, SuffixDraft, SuffixLookup
from studies.ratios import Work, speed_ratio
from tuner.inputs.models import eos_token_ids
from tuner.measuring.contender import PLAIN
from tuner.measuring.paired import OwnDecoding
from tuner.measuring.turns import Interleaved
from tuner.search.task import open_bench, prepare

WITHOUT, WITH = "without history", "with history"
HISTORY = 32_768
"""Tokens of earlier answers that are kept."""
TEMPLATES = (
    "Write a short, polite e-mail to {name} that confirms the appointment on {day} and asks to bring the contract.",
    "Write a Python function `load_{field}` that reads the column `{field}` of a CSV file and returns it as a list.",
    'Write a JSON object with the keys "name", "day", "status" and "notes" for the visit of {name} on {day}.',
)
NAMES, DAYS, FIELDS = (
    ("Ms Hill", "Mr Osei", "Dr Lind", "Ms Rao", "Mr Vega", "Dr Novak", "Ms Okafor", "Mr Sato"),
    ("Monday", "Thursday", "Friday"),
    (
        "price",
        "city",
        "weight",
        "date",
        "colour",
        "status",
        "height",
        "country",
        "amount",
        "email",
        "quantity",
        "rating",
    ),
)
FEW = 18
"""Requests that have few earlier answers to copy from."""
PARTS = {"all": slice(None), "first 18": slice(FEW), "after them": slice(FEW, None)}


def main() -> None:
    """Measure, print and write."""
    parser = search_arguments(__doc__)
    parser.add_argument(
        "--bits", type=int, choices=(4, 8), help="precision of a model that drafts where nothing is copied"
    )
    parser.add_argument("--max-tokens", type=int, default=4, help="most tokens to draft")
    args = parser.parse_args()
    folder = (args.json or Path("history.json")).parent
    folder.mkdir(parents=True, exist_ok=True)
    held_out = FEW
    if args.dataset is None:
        requests = templated()
        args.dataset, held_out = str(folder / "templated.jsonl"), len(requests) - 2
        Path(args.dataset).write_text(
            "".join(json.dumps({"prompt": each}) + "\n" for each in requests), encoding="utf-8"
        )
    task = prepare(
        read_config(args, temperature=0.0, tuning_prompts=2, prompts_per_trial=2, held_out_prompts=held_out), Printed()
    )
    target, most = task.target, args.max_tokens
    bench = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", Printed())
    draft = LayerSkip(bits=args.bits, lookup=SuffixLookup(max_tokens=most)) if args.bits else SuffixDraft()
    decoder, eos = Decoder(target, draft, Fixed(max_tokens=most), task.decoding), eos_token_ids(target.model)
    contenders = [
        OwnDecoding(PLAIN, plain_decoder(target), eos),
        OwnDecoding(WITHOUT, decoder, eos),
        OwnDecoding(WITH, decoder, eos, history=HISTORY),
    ]
    turns = Interleaved(contenders)
    turns.prepare([bench.batch(index) for index in bench.indices], bench.max_new_tokens)
    turns.warm_up([bench.batch(0)])
    measured = bench.compete(turns, bench.indices)
    without, with_history = measured[WITHOUT].draft_decode, measured[WITH].draft_decode
    adds = {
        name: f"{speed_ratio(_part(without, part), _part(with_history, part))}"
        for name, part in PARTS.items()
        if len(without.tokens[part]) > 1
    }
    rows: list[dict[str, Any]] = [
        {
            "draft": f"{draft.describe()}, {name}",
            "over plain": f"{each.speedup_interval()}",
            "tokens a round": each.mean_acceptance_length,
            "identical": f"{each.num_identical} of {each.num_prompts}",
            **{f"over no history, {part}": value if name == WITH else "" for part, value in adds.items()},
        }
        for name, each in measured.items()
    ]
    show(f"{len(bench.indices)} requests", rows)
    samples = {name: each.model_dump(mode="json") for name, each in measured.items()}
    write(args.json, {**facts_of(task), "rows": rows, "samples": samples}, rows)


def _part(work: Work, part: slice) -> Work:
    return Work(work.seconds[part], work.tokens[part])


def templated() -> list[str]:
    """Return requests from the templates, in an order that is always the same."""
    letters = [(template, {"name": name, "day": day}) for name, day in product(NAMES, DAYS) for template in (0, 2)]
    code = [(1, {"field": field}) for field in FIELDS]
    requests = [TEMPLATES[template].format(**values) for template, values in letters + code]
    Random(0).shuffle(requests)
    return requests


if __name__ == "__main__":
    main()
