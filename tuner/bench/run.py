"""`sdtune bench` from its settings to its results on disk."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.losslessness import Comparison, compare
from decoding.text import Ending
from tuner.bench.accounting import Account, longest_draft, take_account
from tuner.bench.config import BenchConfig
from tuner.bench.contenders import ALWAYS, PLAIN, Setting, enter
from tuner.bench.contest import Contest, Prompts
from tuner.bench.own_decoding import profile_by
from tuner.bench.report import TABLE_WIDTH, bench_json, bench_picture, bench_table
from tuner.bench.result import BenchResult, Entry, TextSample, comparable, mean_context, units_of
from tuner.bench.roofline import Roofline, measure_bandwidth, reading
from tuner.bench.task import BenchTask, prepare_bench, token_ids
from tuner.measuring.clock import WallClock
from tuner.measuring.cost_table import measure_cost_table
from tuner.measuring.recording import TimedBatch
from tuner.progress import Progress
from tuner.results import check_results_folder, public_name, stamped, write_json, write_result, write_text

NAME = "bench"


def run_and_write(config: BenchConfig, profile: Path, out: Path, *, progress: Progress) -> RenderableType:
    """Measure the profile against the others and write `bench.json`, `.txt` and `.png` into the folder `out`; the table.

    Raises errors of ours for what the user can put right.
    """
    check_results_folder(out)
    result = run_bench(prepare_bench(config, profile, progress), progress)
    shown = bench_table(result)
    picture = io.BytesIO()
    bench_picture(result, picture)
    write_result(out, f"{NAME}.png", picture.getvalue())
    write_text(out, NAME, shown, width=TABLE_WIDTH)
    write_json(out, NAME, bench_json(result))
    return shown


def run_bench(task: BenchTask, progress: Progress) -> BenchResult:
    """Let everybody in, warm them up, and hold the contest on the prompts to be measured; memory is read before and after.

    Raises `DatasetError` if too few of the prompts are continued at a length worth measuring.
    """
    device = task.target.device
    progress.stage("measuring how fast memory is read")
    before = measure_bandwidth(device)
    prompts = token_ids(task.measured)
    progress.stage("contenders choose on tuning prompts")
    contenders, left_out = enter(task.names, _setting(task, progress))
    contest = Contest(contenders, WallClock(device), needed=ALWAYS)
    progress.stage("warming up")
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
    return BenchResult(
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
    )


def _longest_and_shortest(batches: Sequence[Prompts]) -> list[Prompts]:
    """The batch with the longest of all prompts, and that with the shortest."""
    return [max(batches, key=lambda batch: max(map(len, batch))), min(batches, key=lambda batch: min(map(len, batch)))]


def _hold(contest: Contest, task: BenchTask, progress: Progress) -> dict[str, list[TextSample]]:
    """All samples by contender; texts are compared with the first that the one they should be like wrote of the prompt.

    Where several are written side by side, that is what plain decoding writes of the prompt alone.
    """
    prompts, batch_size = token_ids(task.measured), task.config.batch_size
    samples: dict[str, list[TextSample]] = {name: [] for name in contest.running}
    same_as = {name: each.same_as for name, each in contest.running.items()}
    written: dict[tuple[str, int], tuple[int, ...]] = {}
    if batch_size > 1:
        written = {(PLAIN, place): text for place, text in enumerate(_unbatchable_reason(task, prompts, progress))}

    def compared(name: str, place: int, tokens: tuple[int, ...]) -> Comparison:
        if (other := same_as[name]) is not None:
            return Comparison(identical=written.get((other, place)) == tokens)
        return compare(task.target, prompts[place], written[PLAIN, place], tokens)

    def note(number: int, repeat: int, batches: Mapping[str, TimedBatch]) -> None:
        first = number * batch_size
        for name, batch in batches.items():
            for text, each in enumerate(batch.sequences):
                written.setdefault((name, first + text), each.tokens)
        for name, batch in batches.items():
            for text, each in enumerate(batch.sequences):
                place = first + text
                comparison = compared(name, place, each.tokens)
                samples[name].append(TextSample.of(place, repeat, len(prompts[place]), batch, text, comparison))
        progress.advance()

    repeats = task.config.repeats
    progress.stage(f"everybody continues all {units_of(batch_size)}", len(task.batches) * repeats)
    contest.hold(task.batches, max_new_tokens=task.max_new_tokens, repeats=repeats, on_batch=note)
    return samples


def _unbatchable_reason(task: BenchTask, prompts: Prompts, progress: Progress) -> Iterator[tuple[int, ...]]:
    """What plain decoding writes of each prompt by itself."""
    plain = plain_decoder(task.target)
    progress.stage("plain decoding continues each prompt alone", len(prompts))
    for prompt in prompts:
        yield plain.generate(Request(prompt, Ending(task.max_new_tokens, task.eos_token_ids))).tokens
        progress.advance()


def _is_accounted_for(task: BenchTask) -> bool:
    """Whether where the time goes can be told: passes must wait for their end and be of one text, and something must be drafted."""
    drafts = task.profile.draft.drafts
    return task.target.device.type == "cpu" and task.config.batch_size == 1 and drafts


def _account(task: BenchTask, prompts: Prompts, progress: Progress) -> Account:
    """Where the profile's time goes."""
    draft, target = task.profile.draft, task.target
    progress.stage("measuring what passes of the model cost")
    max_drafted = longest_draft(draft, task.profile.draft_length.max_tokens)
    lengths = [len(prompt) for prompt in prompts]
    table = measure_cost_table(
        target, max_tokens=max_drafted, contexts=[min(lengths), max(lengths) + task.max_new_tokens]
    )
    progress.stage("accounting for the profile's time", len(prompts))
    return take_account(
        task.decoder,
        draft,
        table,
        prompts,
        max_new_tokens=task.max_new_tokens,
        eos_token_ids=task.eos_token_ids,
        prefix_reuse=task.profile.decoding.prefix_reuse and target.runner.exact_width is None,
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
        "context": config.context,
        "max_new_tokens": task.max_new_tokens,
        "temperature": 0.0,
        "runner": task.target.runner.name,
        "exact_width": task.target.runner.exact_width,
        "repeats": config.repeats,
        "seed": config.seed,
        "prompt_column": config.prompt_column,
        "group_column": config.group_column,
        "chat_template": config.chat_template,
        "max_prompt_tokens": config.max_prompt_tokens,
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
            f"greedy for everybody, so that texts can be compared; the profile was tuned at temperature {temperature:g}"
        )
    batch_size = task.config.batch_size
    if num_uncounted:
        remarks.append(
            f"{num_uncounted} {units_of(batch_size)} do not count in the rates: somebody decoded too few tokens behind the prefill"
        )
    if task.num_over:
        remarks.append(f"the last {task.num_over} prompts are not measured: they make no whole batch of {batch_size}")
    if batch_size > 1:
        remarks.append(
            f"of {batch_size} texts side by side, tokens and seconds are those of all, tokens per pass those of each; identical is "
            "a text that plain decoding writes of its prompt alone"
        )
        remarks.append("where the profile's time goes is told of single texts only (--batch-size 1)")
        if task.target.unbatchable_reason is not None:
            remarks.append(
                f"profile and plain write the texts of a batch in turns, not in shared passes: {task.target.unbatchable_reason}"
            )
    return tuple(remarks)
