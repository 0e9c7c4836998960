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
from tuner.bench.accounting import Account, longest_draft, take_account
from tuner.bench.collecting import SampleCollector
from tuner.bench.config import BenchConfig
from tuner.bench.contenders import ALWAYS, PLAIN, Setting, enter
from tuner.bench.exported import exported_generation
from tuner.bench.memory import measure_memory
from tuner.bench.modes import profile_by
from tuner.bench.report import TABLE_WIDTH, bench_json, bench_picture, bench_table
from tuner.bench.result import BenchResult, Entry, comparable, mean_context, units_of
from tuner.bench.roofline import Roofline, measure_bandwidth, reading
from tuner.bench.sample import TextSample
from tuner.bench.settings_check import check_bench_settings
from tuner.bench.task import BenchTask, prepare_bench, token_ids
from tuner.contest.contest import Contest, Prompts
from tuner.measuring.clock import WallClock
from tuner.measuring.cost_table import measure_cost_table
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
    """Make the contenders, warm them up and hold the contest on the measured prompts. Bandwidth is measured before and after.

    Raises DatasetError if too few prompts have continuations long enough to measure.
    """
    device = task.target.device
    progress.stage("measuring memory bandwidth")
    before = measure_bandwidth(device)
    prompts = token_ids(task.measured)
    progress.stage("contenders choose on tuning prompts")
    contenders, left_out = enter(task.names, _setting(task, progress))
    contest = Contest(contenders, WallClock(device), needed=ALWAYS)
    progress.stage("warming up")
    contest.prepare(task.batches, task.max_new_tokens)
    contest.warm_up(_longest_and_shortest(task.batches))
    samples = _hold(contest, task, progress)
    left_out = {**task.left_out, **left_out, **contest.left_out}
    account = _account(task, prompts, progress) if _is_accounted_for(task) else None
    entries = [
        Entry(name, each.describe(), dict(each.settings), tuple(samples[name]))
        for name, each in contest.running.items()
    ]
    kept, uncounted, counted = comparable(entries)
    contexts = mean_context(kept[PLAIN].samples, counted)
    bandwidth = before.and_also(measure_bandwidth(device, buffer_bytes=before.buffer_bytes))
    batch_size = task.config.batch_size
    roofline = Roofline(bandwidth=bandwidth, reading=reading(task.target, contexts, batch_size=batch_size))
    memory, unknown = (
        measure_memory(task, task.config.profile, list(kept), progress) if task.config.memory else ({}, {})
    )
    return BenchResult(
        memory=memory,
        memory_unknown=unknown,
        entries=kept,
        left_out={**left_out, **uncounted},
        counted=counted,
        num_prompts=len(prompts),
        roofline=roofline,
        account=account,
        facts=_facts(task),
        remarks=_remarks(task, len(task.batches) - len(counted)),
        batch_size=batch_size,
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
        exported=functools.partial(exported_generation, task, progress),
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


def _is_accounted_for(task: BenchTask) -> bool:
    """Return whether the profile's time can be accounted for: on the CPU, one sequence at a time, with a draft."""
    drafts = task.profile.draft.drafts
    return task.target.device.type == "cpu" and task.config.batch_size == 1 and drafts


def _account(task: BenchTask, prompts: Prompts, progress: Progress) -> Account:
    """Account for the profile's decode time."""
    draft, target = task.profile.draft, task.target
    progress.stage("measuring pass costs")
    max_drafted = longest_draft(draft, task.profile.draft_length.max_tokens)
    lengths = [len(prompt) for prompt in prompts]
    contexts = [min(lengths), max(lengths) + task.max_new_tokens]
    precisions = () if draft.weight_bits is None else (draft.weight_bits,)
    table = measure_cost_table(target, max_tokens=max_drafted, contexts=contexts, bits=precisions)
    progress.stage("accounting for the profile's time", len(prompts))
    return take_account(
        task.decoder,
        draft,
        task.profile.decoding,
        table,
        prompts,
        max_new_tokens=task.max_new_tokens,
        eos_token_ids=task.eos_token_ids,
        on_text=progress.advance,
    )


def _facts(task: BenchTask) -> dict[str, Any]:
    config, profile = task.config, task.profile
    facts = {
        "profile": profile.name,
        "model": public_name(task.loaded.name),
        "dataset": public_name(config.dataset),
        "dataset_fingerprint": task.dataset_fingerprint,
        "split": task.split,
        "prompt_notes": list(task.notes),
        "context": config.context,
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
        remarks.append("the profile's time is accounted for with --batch-size 1 only")
        if task.target.unbatchable_reason is not None:
            remarks.append(
                f"profile and plain decode a batch in turns, not in shared passes: {task.target.unbatchable_reason}"
            )
    return tuple(remarks)
