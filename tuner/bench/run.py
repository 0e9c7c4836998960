"""The run of `sdtune bench`, from its settings to its results on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.losslessness import Comparison, compare
from decoding.text import Ending
from studies.measurement import Measurement
from tuner.bench.config import BenchConfig, check_bench_settings
from tuner.bench.contenders import ALWAYS, enter
from tuner.bench.engine import LEAST, EngineTask, engine_task
from tuner.bench.report import TABLE_WIDTH, BenchResult, bench_json, bench_table, units_of
from tuner.bench.task import BenchTask, prepare_bench, token_ids
from tuner.errors import DatasetError, EngineError
from tuner.export.losses import LOSSES
from tuner.fields import BITWISE
from tuner.measuring.baseline import FEWEST_DECODED, Baseline
from tuner.measuring.comparison import FEWEST_SAMPLES, Compared
from tuner.measuring.contender import PLAIN, PROFILE, Contender, Prompts
from tuner.measuring.turns import Interleaved, PairedBench, Texts
from tuner.progress import Progress
from tuner.results import check_results_folder, plain_text, write_result

NAME = "bench"


def run_and_write(config: BenchConfig, *, progress: Progress) -> tuple[RenderableType, Path, str | None]:
    """Run the bench, write its results, and return the table, the JSON file, and the error to end with after they are shown.

    The results are `bench.json` and `bench.txt`. Raises SdtuneError for wrong input.
    """
    check_bench_settings(config)
    check_results_folder(config.out)
    if config.engine is None:
        result = run_bench(prepare_bench(config, progress), progress)
        return *_written(config, result), None
    with engine_task(config, progress) as engine:
        result = _run_in_engine(engine, progress)
    wrong = f"{result.num_different} texts differ from {engine.program.title}'s own plain decoding"
    return *_written(config, result), wrong if result.num_different else None


def _written(config: BenchConfig, result: BenchResult) -> tuple[RenderableType, Path]:
    shown = bench_table(result)
    write_result(config.out, f"{NAME}.txt", plain_text(shown, width=TABLE_WIDTH))
    write_result(config.out, f"{NAME}.json", json.dumps(bench_json(result), indent=1))
    return shown, config.out / f"{NAME}.json"


def run_bench(task: BenchTask, progress: Progress) -> BenchResult:
    """Make the contenders, warm them up and let all of them continue the measured prompts in turns.

    Raises DatasetError if too few prompts have continuations long enough to measure.
    """
    contenders, left_out = enter(task)
    turns = Interleaved(contenders, may_fail=[each.name for each in contenders if each.name not in ALWAYS])
    progress.stage("warming up")
    turns.prepare(task.batches, task.max_new_tokens)
    turns.warm_up(_longest_and_shortest(task.batches))
    found = _compete(task, turns, _bench(task, progress), progress, "all contenders")
    return _result(task, turns.running, found, {**task.left_out, **left_out, **turns.left_out}, task.facts())


def _run_in_engine(engine: EngineTask, progress: Progress) -> BenchResult:
    """Let the engine continue the measured prompts with each draft in turns with plain decoding: the export's, and other flags.

    Raises `EngineError` if it does not run the export's draft, and DatasetError as `run_bench` does.
    """
    task, bench = engine.task, _bench(engine.task, progress)
    contenders: dict[str, Contender] = {}
    everything: dict[str, Measurement] = {}
    left_out: dict[str, str] = {}
    with engine.server((), progress, what="for plain decoding") as plain:
        for name, flags in engine.drafts():
            try:
                with engine.server(flags, progress, what=f"with its draft, {name}") as drafted:
                    turns = Interleaved([engine.contender(PLAIN, plain), engine.contender(name, drafted, flags)])
                    turns.warm_up(_longest_and_shortest(task.batches))
                    found = _compete(task, turns, bench, progress, name)
            except EngineError as cause:
                if name == PROFILE:
                    raise
                left_out[name] = str(cause)
                progress.say(f"{name}: {cause}")
                continue
            contenders = {**turns.running, **contenders}
            everything = {**found, **everything}
        acceptance = engine.acceptance(plain, everything[PROFILE], progress)
    others = sorted((name for name in everything if name not in ALWAYS), key=lambda name: -everything[name].speedup)
    ordered = {name: everything[name] for name in (*ALWAYS, *others)}
    facts = engine.facts() | {"export_acceptance": acceptance}
    result = _result(task, contenders, ordered, left_out, facts)
    return replace(
        result,
        engine=f"{engine.program.title} ({engine.version})",
        remarks=(*engine.remarks, *_of_acceptance(engine, acceptance), *result.remarks),
    )


def _of_acceptance(engine: EngineTask, found: Mapping[str, float] | None) -> Iterator[str]:
    if found is not None:
        title, real, wanted = engine.program.title, found["engine"], found["transformers"]
        why = "" if real >= LEAST * wanted else f": {title} does not run the draft that was tuned; {LOSSES} may say why"
        yield f"{title} accepts {real:.1%} of the export's drafted tokens, transformers {wanted:.1%} on the same texts{why}"


def _compete(
    task: BenchTask, turns: Interleaved, bench: PairedBench, progress: Progress, who: str
) -> dict[str, Measurement]:
    config = task.config
    progress.stage(f"{who}: all {units_of(config.batch_size)}", len(bench.indices) * config.repeats)
    return bench.compete(
        turns, bench.indices, lambda samples: progress.advance(), repeats=config.repeats, plain_too=True
    )


def _result(
    task: BenchTask,
    contenders: Mapping[str, Contender],
    found: Mapping[str, Measurement],
    left_out: Mapping[str, str],
    facts: dict[str, Any],
) -> BenchResult:
    config, compared = task.config, Compared.of(found, needed=ALWAYS)
    if len(compared.counted) < FEWEST_SAMPLES:
        raise DatasetError(
            f"only {len(compared.counted)} {units_of(config.batch_size)} are continued with at least {FEWEST_DECODED} tokens per "
            f"sequence after the prefill by all of {', '.join(compared.measurements)}: give more --max-new-tokens, or prompts that "
            "the model continues at greater length"
        )
    return BenchResult(
        contenders=contenders,
        everything=found,
        compared=compared,
        left_out={**left_out, **compared.left_out},
        prompt_lengths=tuple(len(prompt.token_ids) for prompt in task.measured),
        facts=facts,
        remarks=_remarks(task, len(task.batches) - len(compared.counted)),
        batch_size=config.batch_size,
        repeats=config.repeats,
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
