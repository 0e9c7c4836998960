"""The run of `sdtune bench --engine`: export, start both servers, continue the held-out prompts in turns."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from decoding.head_folder import HeadFolder
from decoding.losslessness import compare
from decoding.text import Ending
from tuner.bench.config import BenchConfig
from tuner.bench.in_engine.by_load import run_by_load
from tuner.bench.in_engine.load_report import loads_json, loads_table
from tuner.bench.in_engine.loads import check_groups
from tuner.bench.in_engine.report import engine_json, engine_table
from tuner.bench.in_engine.result import EngineDraft, EngineResult, LoadsResult
from tuner.bench.in_engine.setup import EngineTask, prepare_engine
from tuner.bench.report import TABLE_WIDTH
from tuner.bench.settings_check import check_bench_settings
from tuner.bench.task import prepare_bench, token_ids
from tuner.engines.expectation import predict_by_rules
from tuner.engines.paired import measure_pairs
from tuner.engines.registry import find_engine
from tuner.errors import ConfigError, EngineError
from tuner.results import check_results_folder, write_json, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tuner.progress import Progress

NAME = "engine"
PROFILE = "profile"


def run_and_write_in_engine(
    config: BenchConfig, profile: Path, out: Path, *, progress: Progress
) -> tuple[RenderableType, EngineResult | LoadsResult]:
    """Measure the profile's export in `config.engine`, write `engine.json` and `engine.txt` into `out`, and return the table.

    Raises SdtuneError for wrong input, and for an engine that is not found or fails.
    """
    check_bench_settings(config)
    assert config.engine is not None, "the caller has looked"
    program = find_engine(config.engine, config.engine_home)
    version = program.version()
    others = _settings_of(config)
    check_results_folder(out)
    task = prepare_bench(config, profile, progress)
    check_groups(config.sequences, len(task.measured))
    engine = prepare_engine(config, task, program, version, out, progress)
    result: EngineResult | LoadsResult
    if config.sequences:
        result = run_by_load(engine, progress)
        shown, document = loads_table(result, config.engine), loads_json(result)
    else:
        result = _run(engine, others, progress)
        shown, document = engine_table(result), engine_json(result)
    write_text(out, NAME, shown, width=TABLE_WIDTH)
    write_json(out, NAME, document)
    return shown, result


def _settings_of(config: BenchConfig) -> tuple[str, ...]:
    """Return the lines of the file of other drafts."""
    if config.engine_settings is None:
        return ()
    try:
        text = config.engine_settings.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read {config.engine_settings}: {cause}") from None
    return tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def _run(engine: EngineTask, others: Sequence[str], progress: Progress) -> EngineResult:
    program, plan, task = engine.program, engine.plan, engine.task
    drafts = {PROFILE: program.draft_flags(plan)}
    drafts |= {line: tuple(shlex.split(line.replace("{out}", str(plan.out)))) for line in others}
    progress.stage(f"predicting by {program.title}'s rules")
    predicted = predict_by_rules(
        plan,
        task.target,
        HeadFolder(task.target, task.folder),
        token_ids(task.choosing),
        Ending(task.max_new_tokens, task.eos_token_ids),
    )
    with tempfile.TemporaryDirectory(prefix="sdtune-engine-") as folder:
        logs = Path(folder)
        progress.stage(f"files for {program.title}")
        remarks = program.prepare(plan, logs / "convert.log")
        measured, failed = _measure(engine, drafts, logs, progress)
    if PROFILE in failed:
        raise EngineError(failed[PROFILE])
    return EngineResult(
        title=program.title,
        version=engine.version,
        drafts=measured,
        failed=failed,
        predicted=predicted,
        facts=engine.facts(),
        remarks=(*remarks, *task.notes),
    )


def _measure(
    engine: EngineTask, drafts: dict[str, tuple[str, ...]], logs: Path, progress: Progress
) -> tuple[tuple[EngineDraft, ...], dict[str, str]]:
    """Measure each draft in turns with plain decoding, whose server stays; return them, and those that the engine refused."""
    program, task = engine.program, engine.task
    measured, failed = [], {}
    with engine.server((), logs / "plain.log", progress) as plain:
        for number, (name, flags) in enumerate(drafts.items()):
            began = time.monotonic()
            try:
                with engine.server(flags, logs / f"draft-{number}.log", progress) as drafted:
                    progress.stage(f"{program.title}: {name}", len(task.measured))
                    texts = measure_pairs(
                        program,
                        plain,
                        drafted,
                        task.measured,
                        num_tokens=task.max_new_tokens,
                        compare=partial(compare, task.target),
                        on_pair=progress.advance,
                    )
            except EngineError as cause:
                failed[name] = str(cause)
                progress.say(f"{name}: {cause}")
                continue
            measured.append(EngineDraft(name, engine.shown(flags), texts, time.monotonic() - began))
    return tuple(measured), failed
