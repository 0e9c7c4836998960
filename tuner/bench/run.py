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
from decoding.losslessness import Comparison, compare
from decoding.text import Ending
from tuner.bench.config import BenchConfig
from tuner.bench.contenders import ALWAYS, PROFILE, Setting, enter
from tuner.bench.modes import profile_by
from tuner.bench.report import TABLE_WIDTH, bench_json, bench_picture, bench_table
from tuner.bench.result import BenchResult, units_of
from tuner.bench.settings_check import check_bench_settings
from tuner.bench.task import BenchTask, prepare_bench, token_ids
from tuner.errors import DatasetError
from tuner.fields import BITWISE, PromptSettings
from tuner.measuring.baseline import FEWEST_DECODED, Baseline
from tuner.measuring.comparison import FEWEST_SAMPLES, Compared
from tuner.measuring.contender import PLAIN, Prompts
from tuner.measuring.turns import Interleaved, PairedBench, Texts
from tuner.progress import Progress
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
    """Make the contenders, warm them up and let all of them continue the measured prompts in turns.

    Raises DatasetError if too few prompts have continuations long enough to measure.
    """
    progress.stage("contenders choose on tuning prompts")
    contenders, left_out = enter(task.names, _setting(task, progress))
    turns = Interleaved(contenders, may_fail=[each.name for each in contenders if each.name not in ALWAYS])
    config, batches = task.config, task.batches
    progress.stage("warming up")
    turns.prepare(batches, task.max_new_tokens)
    turns.warm_up(_longest_and_shortest(batches))
    bench = _bench(task, progress)
    progress.stage(f"all contenders continue all {units_of(config.batch_size)}", len(batches) * config.repeats)
    found = bench.compete(
        turns, bench.indices, lambda samples: progress.advance(), repeats=config.repeats, plain_too=True
    )
    compared = Compared.of(found, needed=ALWAYS)
    if len(compared.counted) < FEWEST_SAMPLES:
        raise DatasetError(
            f"only {len(compared.counted)} {units_of(config.batch_size)} are continued with at least {FEWEST_DECODED} tokens per "
            f"sequence after the prefill by all of {', '.join(compared.measurements)}: give more --max-new-tokens, or prompts that "
            "the model continues at greater length"
        )
    return BenchResult(
        contenders=turns.running,
        everything=found,
        compared=compared,
        left_out={**task.left_out, **left_out, **turns.left_out, **compared.left_out},
        prompt_lengths=tuple(len(prompt.token_ids) for prompt in task.measured),
        facts=_facts(task),
        remarks=_remarks(task, len(batches) - len(compared.counted)),
        batch_size=config.batch_size,
        repeats=config.repeats,
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


def _bench(task: BenchTask, progress: Progress) -> PairedBench:
    """Return the measured prompts, and the comparison with plain decoding of each prompt, by itself in a batch.

    Bit-exact decoding must equal plain decoding in this mode.
    """
    prompts, ending = token_ids(task.measured), Ending(task.max_new_tokens, task.eos_token_ids)
    alone = _decode_one_by_one(task, prompts, ending, progress) if task.config.batch_size > 1 else ()
    exact = {f"{PROFILE}-{BITWISE}": f"{PLAIN}-{BITWISE}"}

    def judge(name: str, row: int, texts: Texts) -> Comparison:
        if name in exact:
            return Comparison(identical=texts[name] == texts.get(exact[name]))
        return compare(task.target, prompts[row], alone[row] if alone else texts[PLAIN], texts[name])

    baseline = Baseline(
        prompts=prompts,
        continuations=alone,
        rows=tuple(range(len(prompts))),
        ending=ending,
        batch_size=task.config.batch_size,
        categories=tuple(prompt.category for prompt in task.measured),
    )
    return PairedBench(baseline, judge)


def _decode_one_by_one(
    task: BenchTask, prompts: Prompts, ending: Ending, progress: Progress
) -> tuple[tuple[int, ...], ...]:
    """Return the plain continuation of each prompt decoded by itself."""
    plain = plain_decoder(task.target)
    progress.stage("plain decoding continues each prompt by itself", len(prompts))
    continuations = []
    for prompt in prompts:
        continuations.append(plain.generate(Request(prompt, ending)).tokens)
        progress.advance()
    return tuple(continuations)


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
