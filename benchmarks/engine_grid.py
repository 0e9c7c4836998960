"""What `sdtune tune` finds in an engine, beside an exhaustive grid of the engine's own settings, and what both cost in time.

The grid measures every setting on the tuning prompts, as the tuning measures its few. The best of each then continue the held-out
prompts in turns with plain decoding and with each other. --methods and --lengths make the grid smaller, not the tuning. Converting
the model is in neither time.

    python -m benchmarks.engine_grid --model configs/demo/model --dataset configs/demo/prompts.jsonl --engine llama.cpp \\
      --set group_column=file --set engine_home=llama.cpp --sequences 1 4 --threads 1 --json grid.json
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from benchmarks.results import ratio_interval, show, write
from benchmarks.task import Printed, arguments, settings_of
from studies.measurement import Measurement
from tuner.engines.bench import Crowd, EngineDecoding, LoadFigures
from tuner.errors import EngineError
from tuner.export.schedule import figures_json
from tuner.measuring.contender import PLAIN
from tuner.tune.config import TuneConfig
from tuner.tune.costs import PlainOr, Setting
from tuner.tune.report import Tuned, describe, tuned_json
from tuner.tune.run import tune
from tuner.tune.task import TuneTask, tune_task

TUNED, GRID = "tuned", "best of grid"


def main() -> None:
    """Tune, measure the grid, compare, print and write."""
    parser = arguments(__doc__, settings=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--methods", default="", help="expression that the names of the grid's methods match; default: all"
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths of the grid; default: all")
    args = parser.parse_args()
    config = TuneConfig(
        model=args.model,
        dataset=args.dataset,
        engine=args.engine,
        draft_model=args.draft_model,
        sequences=tuple(args.sequences),
        threads=args.threads,
        **settings_of(args),
    )
    with tune_task(config, Printed()) as task:
        tuned = tune(task, Printed())
        methods = [each for each in task.program.methods(task.served) if re.search(args.methods, each.name)]
        settings = [
            Setting(each, n) for each in methods for n in each.lengths if args.lengths is None or n in args.lengths
        ]
        began = time.monotonic()
        with task.server(PLAIN, (), Printed()) as plain:
            crowd = task.crowd(plain.client, task.prompts.tuning, Printed())
            grid: dict[Setting, dict[int, LoadFigures]] = {}
            for setting, loads in measured(task, plain, crowd, settings):
                grid[setting] = loads
                seconds_of_grid = time.monotonic() - began
                write(
                    args.json, facts_of(tuned, grid, [], seconds_of_grid), by_setting(grid)
                )  # should it be interrupted
            held_out = task.crowd(plain.client, task.prompts.held_out, Printed())
            rows = [compared(task, plain, held_out, number, grid, tuned.chosen[number]) for number in task.sequences]
    share, chosen_in = tuned.search_seconds / seconds_of_grid, f"chosen in {tuned.search_seconds:.0f} s"
    title = (
        f"{config.engine}: {chosen_in}, {share:.1%} of the grid's {seconds_of_grid:.0f} s for {len(settings)} settings"
    )
    show(title, [{name: cell for name, cell in row.items() if name != "samples"} for row in rows])
    write(args.json, facts_of(tuned, grid, rows, seconds_of_grid), by_setting(grid))


def measured(
    task: TuneTask, plain: EngineDecoding, crowd: Crowd, settings: list[Setting]
) -> Iterator[tuple[Setting, dict[int, LoadFigures]]]:
    """Yield the figures of each setting that the engine runs, at each number of requests."""
    for setting in settings:
        try:
            with server_of(task, setting) as drafted:
                yield setting, {each: crowd.measure(plain, drafted, each, Printed()) for each in task.sequences}
        except EngineError as cause:
            Printed().say(f"{describe(setting)}: {cause}")


def server_of(task: TuneTask, setting: Setting) -> Any:
    """Return a server with one setting at any load."""
    return task.server(describe(setting), setting.method.flags(setting.num_tokens, None), Printed())


def compared(
    task: TuneTask,
    plain: EngineDecoding,
    crowd: Crowd,
    number: int,
    grid: Mapping[Setting, dict[int, LoadFigures]],
    tuned: PlainOr,
) -> dict[str, Any]:
    """Let both choices continue the held-out prompts in turns at one number of requests."""
    best = max(grid, key=lambda each: grid[each][number].measurement.speedup)
    on_tuning = grid[best][number].measurement.speedup
    choices: dict[str, PlainOr] = {TUNED: tuned, GRID: best if on_tuning > 1 else None}
    row: dict[str, Any] = {"side by side": number, **{name: _named(each) for name, each in choices.items()}}
    if choices[TUNED] == choices[GRID]:
        return row | {"tuned over grid": "the same setting"}
    with ExitStack() as servers:
        contenders = [plain]
        for name, each in choices.items():
            if each is not None:
                contenders.append(replace(servers.enter_context(server_of(task, each)), name=name))
        found = crowd.side_by_side(contenders, number, Printed())
    over: dict[str, Measurement] = {name: found[name if choices[name] else PLAIN].measurement for name in choices}
    for name, speed in over.items():
        row[f"{name}, over plain"] = str(speed.speedup_interval()) if choices[name] else "1"
    row["tuned over grid"] = str(ratio_interval(over[TUNED], over[GRID]))
    row["samples"] = {name: figures_json(each) for name, each in over.items()}
    return row


def _named(setting: PlainOr) -> str:
    return "plain decoding" if setting is None else describe(setting)


def by_setting(grid: Mapping[Setting, dict[int, LoadFigures]]) -> list[dict[str, Any]]:
    """Return a row per setting and number of requests."""
    return [
        {
            "setting": describe(setting),
            "sequences": number,
            "speedup": each.measurement.speedup,
            "low": each.measurement.speedup_interval().ci95[0],
            "high": each.measurement.speedup_interval().ci95[1],
            "drafted": each.measurement.num_draft_tokens,
            "accepted": each.measurement.num_accepted_draft_tokens,
            "texts": each.measurement.num_prompts,
            "identical": each.measurement.num_identical,
        }
        for setting, loads in grid.items()
        for number, each in loads.items()
    ]


def facts_of(
    tuned: Tuned,
    grid: Mapping[Setting, dict[int, LoadFigures]],
    rows: list[dict[str, Any]],
    seconds_of_grid: float,
) -> dict[str, Any]:
    """Return everything but the samples of the grid, whose figures are in the CSV."""
    document = tuned_json(tuned)
    del document["provenance"]
    return {
        "seconds_of_grid": seconds_of_grid,
        "settings_of_grid": len(grid),
        "compared": rows,
        "tuning": document,
    }


if __name__ == "__main__":
    main()
