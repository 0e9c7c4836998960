"""The whole benchmark of one GPU in ten minutes: `python -m tuner.evaluation.gpu --out DIR`.

Each step is a command of the tool in a process of its own, as an error of CUDA spoils the process that it happens in; a step that
fails or takes too long is reported as that, and those that need nothing of it still run, until the time for all is up. Writes
what the steps write, their output, `gpu_benchmark.json` with what became of each, and a table, printed last.

1. Losslessness on the demo model in float32 and bfloat16: plain and drafted, eager, static (CUDA graphs) and bit-exact.
2. The demo model widened to the size of an 8B model, in bfloat16: synthetic, a small trained model at the cost of a large one.
3. A whole `sdtune search` on it, by the static runner.
4. The profile that it found against what users would take instead, behind prompts of 512 tokens.
5. The same with 4 and with 16 texts side by side.
6. How long a new candidate takes to be ready.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tuner.results import stamped

DEMO = Path("configs/demo")
PROMPTS = str(DEMO / "prompts.jsonl")
OUR_MODES = "plain-eager,profile-eager,plain-bitwise,profile-bitwise"
STOCK = "plain-eager,hf,hf-static,hf-early-exit,hf-prompt-lookup"
STOCK_OF_BATCHES = "plain-eager,profile-eager,hf,hf-static"
BATCHES = {4: 16, 16: 32}
"""Batch sizes, and the prompts that are measured with each."""
TOTAL_SECONDS = 580.0


@dataclass(frozen=True)
class BenchmarkStep:
    """One command: the arguments of `python -m`, and the seconds after which it is given up."""

    name: str
    arguments: tuple[str, ...]
    timeout: float


@dataclass(frozen=True)
class Done:
    """What became of a step."""

    name: str
    ok: bool
    seconds: float
    said: str
    """The last line of its output."""


RunCommand = Callable[[BenchmarkStep, Path], Done]


def plan(out: Path, device: str, preset: str, search_seconds: int) -> list[BenchmarkStep]:
    """The steps, in order."""
    model = out / "widened"
    demo_profile = str(DEMO / "result" / "profile.yaml")
    common = ("--dataset", PROMPTS, "--group-column", "file", "--device", device)

    def bench(name: str, profile: str, *flags: str) -> tuple[str, ...]:
        return ("tuner.cli.main", "bench", "--profile", profile, *common, "--out", str(out / name), *flags)

    search = (
        "tuner.cli.main",
        "search",
        "--model",
        str(model),
        *common,
        "--heads",
        str(model / "heads"),
        "--distill",
        "never",
    )
    stores = ("--storage", f"sqlite:///{out}/sdtune.db", "--tracking-uri", f"sqlite:///{out}/mlflow.db")
    sizes = ("--tuning-prompts", "16", "--held-out-prompts", str(max(BATCHES.values())), "--max-new-tokens", "48")
    profile = str(out / "profile.yaml")
    return [
        *(
            BenchmarkStep(
                f"lossless in {dtype}",
                bench(
                    dtype,
                    demo_profile,
                    "--dtype",
                    dtype,
                    "--runner",
                    "static",
                    "--against",
                    OUR_MODES,
                    "--prompts",
                    "16",
                ),
                timeout=120,
            )
            for dtype in ("float32", "bfloat16")
        ),
        BenchmarkStep(
            "widening",
            (
                "tuner.evaluation.models.widen",
                "--model",
                str(DEMO / "model"),
                "--preset",
                preset,
                "--heads",
                str(DEMO / "heads"),
                "--device",
                device,
                "--out",
                str(model),
            ),
            120,
        ),
        BenchmarkStep(
            "search",
            (
                *search,
                *sizes,
                *stores,
                "--dtype",
                "bfloat16",
                "--runner",
                "static",
                "--timeout",
                f"{search_seconds}s",
                "--out",
                profile,
            ),
            search_seconds + 120,
        ),
        BenchmarkStep(
            "bench",
            bench(
                "widened_bench",
                profile,
                "--model",
                str(model),
                "--context",
                "512",
                "--prompts",
                "8",
                "--against",
                STOCK,
            ),
            180,
        ),
        *(
            BenchmarkStep(
                f"bench of {size} texts side by side",
                bench(
                    f"widened_bench_batch_{size}",
                    profile,
                    "--model",
                    str(model),
                    "--context",
                    "512",
                    "--batch-size",
                    str(size),
                    "--prompts",
                    str(num_prompts),
                    "--against",
                    STOCK_OF_BATCHES,
                ),
                90,
            )
            for size, num_prompts in BATCHES.items()
        ),
        BenchmarkStep(
            "readiness",
            (
                "tuner.evaluation.passes.readiness",
                "--model",
                str(model),
                "--device",
                device,
                "--out",
                str(out / "readiness.json"),
            ),
            90,
        ),
    ]


def run_step(step: BenchmarkStep, out: Path) -> Done:
    """Run one step, its output in a file of its name."""
    log = out / f"{step.name.replace(' ', '_')}.log"
    start = time.perf_counter()
    try:
        with log.open("w") as file:
            code = subprocess.run(
                [sys.executable, "-m", *step.arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=step.timeout,
                check=False,
            ).returncode
        said = _last_line(log)
    except subprocess.TimeoutExpired:
        code, said = 1, f"given up after {step.timeout:.0f} s"
    return Done(step.name, code == 0, time.perf_counter() - start, said)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def run_all(
    steps: Sequence[BenchmarkStep],
    out: Path,
    run: RunCommand = run_step,
    *,
    seconds: float = TOTAL_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Done]:
    """All steps in order; the results so far are on disk after each.

    All of them together take at most `seconds`: a step has what is left, where that is less than its own limit, and one
    for which nothing is left is not run.
    """
    end = clock() + seconds
    done: list[Done] = []
    for step in steps:
        left = end - clock()
        if left > 0:
            done.append(run(replace(step, timeout=min(step.timeout, left)), out))
        else:
            done.append(Done(step.name, False, 0.0, f"not run: the {seconds:.0f} s for all steps are up"))
        document = {"steps": [asdict(each) for each in done], "figures": figures(out)}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        (out / "gpu_benchmark.json").write_text(json.dumps(stamped(document, device), indent=1))
    return done


def figures(out: Path) -> dict[str, Any]:
    """What the benches that have been written show, in short: rates, ratios to plain decoding, identical texts."""
    found: dict[str, Any] = {}
    for path in sorted(out.glob("*/bench.json")):
        bench = json.loads(path.read_text())
        found[path.parent.name] = {
            "device": bench["provenance"]["device"],
            "dtype": bench["dtype"],
            "runner": bench["runner"],
            "batch_size": bench.get("batch_size", 1),
            "roofline_tokens_per_second": bench["roofline"]["tokens_per_second"],
            "left_out": bench["left_out"],
            "contenders": {
                name: {
                    key: each[key]
                    for key in ("tokens_per_second", "over_plain", "share_of_roofline", "identical", "ties", "texts")
                }
                for name, each in bench["contenders"].items()
            },
        }
    readiness = out / "readiness.json"
    return {**found, "readiness": json.loads(readiness.read_text())} if readiness.exists() else found


def table(done: Sequence[Done], found: dict[str, Any]) -> Table:
    """What became of the steps, and a line a contender."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("step or contender", "tok/s", "over plain", "roofline", "identical"):
        shown.add_column(heading, overflow="fold")
    for step in done:
        shown.add_row(
            f"{'ok' if step.ok else 'FAILED'}: {step.name}",
            f"{step.seconds:.0f} s",
            "",
            "",
            "" if step.ok else step.said,
        )
    for bench, facts in found.items():
        for name, each in facts.get("contenders", {}).items():
            low, high = each["over_plain"]["ci95"]
            shown.add_row(
                f"{bench}: {name}",
                f"{each['tokens_per_second']['value']:.1f}",
                f"{each['over_plain']['value']:.2f} [{low:.2f}, {high:.2f}]",
                f"{each['share_of_roofline']:.0%}",
                f"{each['identical']}/{each['texts']} + {each['ties']} ties",
            )
    return shown


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_benchmark"), help="folder of the results")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try the script")
    parser.add_argument("--preset", default="8b", help="of `python -m tuner.evaluation.models.widen`: 8b, 250m")
    parser.add_argument("--search-seconds", type=int, default=120, help="of the search")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="of all steps together")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    steps = plan(arguments.out, arguments.device, arguments.preset, arguments.search_seconds)
    done = run_all(steps, arguments.out, seconds=arguments.seconds)
    Console(width=130).print(table(done, figures(arguments.out)))
    sys.exit(not all(step.ok for step in done))


if __name__ == "__main__":
    main()
