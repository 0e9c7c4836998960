"""The run of `sdtune bench`, from its settings to its results on disk."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.text import Ending
from tuner.bench.collecting import SampleCollector
from tuner.bench.config import BenchConfig
from tuner.bench.contenders import ALWAYS, Setting, enter
from tuner.bench.modes import profile_by
from tuner.bench.report import TABLE_WIDTH, bench_json, bench_picture, bench_table
from tuner.bench.result import BenchResult, Entry, comparable, units_of
from tuner.bench.sample import TextSample
from tuner.bench.settings_check import check_bench_settings
from tuner.bench.task import BenchTask, prepare_bench, token_ids
from tuner.contest.contest import Contest, Prompts
from tuner.measuring.clock import WallClock
from tuner.progress import Progress
from tuner.prompt_settings import PromptSettings
from tuner.results import check_results_folder, public_name, stamped, write_json, write_result, write_text

NAME = "bench"


def run_and_write(config: BenchConfig, profile: Path, out: Path, *, progress: Progress) -> RenderableType:
    """Measure the profile against the other contenders, write `bench.json`, `.txt` and `.png` into `out`, and return the table.

    Raises SdtuneError for wrong input.
    """
    check_results_folder(out)
    check_bench_settings(config)
    result = run_bench(prepare_bench(config, profile, progress), progress)
    shown = bench_table(result)
    picture = io.BytesIO()
    bench_picture(result, picture)
    write_result(out, f"{NAME}.png", picture.getvalue())
    write_text(out, NAME, shown, width=TABLE_WIDTH)
    write_json(out, NAME, bench_json(result))
    return shown


def run_bench(task: BenchTask, progress: Progress) -> BenchResult:
    """Make the contenders, warm them up and hold the contest on the measured prompts.

    Raises DatasetError if too few prompts have continuations long enough to measure.
    """
    progress.stage("contenders choose on tuning prompts")
    contenders, left_out = enter(task.names, _setting(task, progress))
    contest = Contest(contenders, WallClock(task.target.device), needed=ALWAYS)
    progress.stage("warming up")
    contest.prepare(task.batches, task.max_new_tokens)
    contest.warm_up(_longest_and_shortest(task.batches))
    samples = _hold(contest, task, progress)
    left_out = {**task.left_out, **left_out, **contest.left_out}
    entries = [
        Entry(name, each.describe(), dict(each.settings), tuple(samples[name]))
        for name, each in contest.running.items()
    ]
    kept, uncounted, counted = comparable(entries)
    return BenchResult(
        entries=kept,
        left_out={**left_out, **uncounted},
        counted=counted,
        num_prompts=len(task.measured),
        facts=_facts(task),
        remarks=_remarks(task, len(task.batches) - len(counted)),
        batch_size=task.config.batch_size,
    )


def _setting(task: BenchTask, progress: Progress) -> Setting:
    return Setting(
        profile=task.profile,
        decoder=task.decoder,
        in_mode=functools.cache(lambda mode: task.deploy(profile_by(mode, task.profile))),
        eos_token_ids=task.eos_token_ids,
        tuning_prompts=token_ids(task.choosing),
        max_new_tokens=task.max_new_tokens,
        longest_prompt=max(len(prompt.token_ids) for prompt in task.measured),
        on_text=progress.advance,
    )


def _longest_and_shortest(batches: Sequence[Prompts]) -> list[Prompts]:
    """Return the batch with the longest prompt and the batch with the shortest one."""
    return [max(batches, key=lambda batch: max(map(len, batch))), min(batches, key=lambda batch: min(map(len, batch)))]


def _hold(contest: Contest, task: BenchTask, progress: Progress) -> dict[str, list[TextSample]]:
    """Hold the contest and return all samples by contender."""
    prompts, batch_size, repeats = token_ids(task.measured), task.config.batch_size, task.config.repeats
    # Sequences of a batch are compared with what plain decoding writes for each prompt by itself.
    plain = _decode_one_by_one(task, prompts, progress) if batch_size > 1 else ()
    categories = [prompt.category for prompt in task.measured]
    collector = SampleCollector(
        task.target, prompts, contest.running, batch_size=batch_size, plain=plain, categories=categories
    )
    progress.stage(f"all contenders continue all {units_of(batch_size)}", len(task.batches) * repeats)
    collector.hold(
        contest,
        task.batches,
        max_new_tokens=task.max_new_tokens,
        repeats=repeats,
        on_batch=lambda index, repeat, results: progress.advance(),
    )
    return collector.samples


def _decode_one_by_one(task: BenchTask, prompts: Prompts, progress: Progress) -> list[tuple[int, ...]]:
    """Return the plain continuation of each prompt decoded by itself."""
    plain, ending = plain_decoder(task.target), Ending(task.max_new_tokens, task.eos_token_ids)
    progress.stage("plain decoding continues each prompt by itself", len(prompts))
    continuations = []
    for prompt in prompts:
        continuations.append(plain.generate(Request(prompt, ending)).tokens)
        progress.advance()
    return continuations


def _facts(task: BenchTask) -> dict[str, Any]:
    config, profile = task.config, task.profile
    facts = {
        "profile": profile.name,
        "model": public_name(task.loaded.name),
        "dataset": public_name(config.dataset),
        "dataset_fingerprint": task.dataset_fingerprint,
        "split": task.split,
        "prompt_notes": list(task.notes),
        "max_new_tokens": task.max_new_tokens,
        "temperature": 0.0,
        "runner": task.target.runner.name,
        "exact_width": task.target.runner.exact_width,
        "repeats": config.repeats,
        "seed": config.seed,
        **{name: getattr(config, name) for name in PromptSettings.model_fields},
        "eos_token_ids": sorted(task.eos_token_ids),
        "tuning_rows": [prompt.row for prompt in task.choosing],
        "rows": [prompt.row for prompt in task.measured],
        "dtype": str(task.target.dtype).removeprefix("torch."),
    }
    return stamped(facts, task.target.device)


def _remarks(task: BenchTask, num_uncounted: int) -> tuple[str, ...]:
    remarks = []
    if (temperature := task.profile.decoding.temperature) > 0:
        remarks.append(
            f"all contenders decode greedily, so that tokens can be compared; the profile was tuned at temperature {temperature:g}"
        )
    batch_size = task.config.batch_size
    if num_uncounted:
        remarks.append(
            f"{num_uncounted} {units_of(batch_size)} are not in the rates: a contender decoded too few tokens after the prefill"
        )
    if task.num_over:
        remarks.append(f"the last {task.num_over} prompts are not measured: they fill no batch of {batch_size}")
    if batch_size > 1:
        remarks.append(
            f"tokens and seconds are sums over a batch of {batch_size} sequences, tokens per pass are per sequence; identical "
            "sequences are the ones that plain decoding writes for the prompt by itself"
        )
        if task.target.unbatchable_reason is not None:
            remarks.append(
                f"profile and plain decode a batch in turns, not in shared passes: {task.target.unbatchable_reason}"
            )
    return tuple(remarks)
