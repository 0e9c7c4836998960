"""The run of `sdtune bench --engine`: export, start both servers, continue the held-out prompts in turns."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoding.head_folder import HeadFolder
from decoding.losslessness import compare
from decoding.text import Ending
from tuner.bench.config import BenchConfig
from tuner.bench.in_engine.report import engine_json, engine_table
from tuner.bench.in_engine.result import EngineDraft, EngineResult
from tuner.bench.report import TABLE_WIDTH
from tuner.bench.task import BenchTask, prepare_bench, token_ids
from tuner.engines.contract import EngineProgram, ServerSettings
from tuner.engines.expectation import predict_by_rules
from tuner.engines.loopback import Client, free_port
from tuner.engines.paired import measure_pairs
from tuner.engines.registry import find_engine
from tuner.engines.serving import serving
from tuner.errors import ConfigError, EngineError
from tuner.export.run import export
from tuner.export.settings import ExportSettings
from tuner.prompt_settings import PromptSettings
from tuner.results import check_results_folder, public_name, stamped, write_json, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tuner.export.plan import Plan
    from tuner.progress import Progress

NAME = "engine"
EXPORT = "export"
PROFILE = "profile"
WITHOUT_ENGINE = ("against", "batch_size", "memory", "repeats")
"""Settings of a bench in this process that an engine does not have."""
OVER = 8
"""Positions beyond the longest text and its draft."""


def run_and_write_in_engine(
    config: BenchConfig, profile: Path, out: Path, *, progress: Progress
) -> tuple[RenderableType, EngineResult]:
    """Measure the profile's export in `config.engine`, write `engine.json` and `engine.txt` into `out`, and return the table.

    Raises SdtuneError for wrong input, and for an engine that is not found or fails.
    """
    check_engine_settings(config)
    assert config.engine is not None, "the caller has looked"
    program = find_engine(config.engine, config.engine_home)
    version = program.version()
    settings_file = _settings_of(config)
    check_results_folder(out)
    result = _run(config, prepare_bench(config, profile, progress), program, version, settings_file, out, progress)
    shown = engine_table(result)
    write_text(out, NAME, shown, width=TABLE_WIDTH)
    write_json(out, NAME, engine_json(result))
    return shown, result


def check_engine_settings(config: BenchConfig) -> None:
    """Raise `ConfigError` for settings that exclude each other."""
    defaults = {name: BenchConfig.model_fields[name].get_default() for name in WITHOUT_ENGINE}
    wrong = [name for name, usual in defaults.items() if getattr(config, name) != usual]
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ConfigError(f"{flags} does not go with --engine: the engine runs the export, one sequence at a time")


def _settings_of(config: BenchConfig) -> tuple[str, ...]:
    """Return the lines of the file of other drafts."""
    if config.engine_settings is None:
        return ()
    try:
        text = config.engine_settings.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read {config.engine_settings}: {cause}") from None
    return tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def _run(
    config: BenchConfig,
    task: BenchTask,
    program: EngineProgram,
    version: str,
    others: Sequence[str],
    out: Path,
    progress: Progress,
) -> EngineResult:
    out.mkdir(exist_ok=True)
    exported = export(_export_settings(config, out), progress, loaded=task.loaded)
    plan = exported.plan
    assert plan is not None, "an engine's export has a plan"
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
    settings = _server_settings(config, task, plan)
    with tempfile.TemporaryDirectory(prefix="sdtune-engine-") as folder:
        logs = Path(folder)
        progress.stage(f"files for {program.title}")
        remarks = program.prepare(plan, logs / "convert.log")
        measured, failed = _measure(task, program, plan, settings, drafts, logs, progress)
    if PROFILE in failed:
        raise EngineError(failed[PROFILE])
    return EngineResult(
        title=program.title,
        version=version,
        drafts=measured,
        failed=failed,
        predicted=predicted,
        facts=_facts(config, task, program, plan, settings, version),
        remarks=(*remarks, *task.notes),
    )


def _measure(
    task: BenchTask,
    program: EngineProgram,
    plan: Plan,
    settings: ServerSettings,
    drafts: dict[str, tuple[str, ...]],
    logs: Path,
    progress: Progress,
) -> tuple[tuple[EngineDraft, ...], dict[str, str]]:
    """Measure each draft in turns with plain decoding, whose server stays; return them, and those that the engine refused."""
    measured, failed = [], {}
    with _server(program, plan, settings, (), logs / "plain.log", progress) as plain:
        for number, (name, flags) in enumerate(drafts.items()):
            began = time.monotonic()
            try:
                with _server(program, plan, settings, flags, logs / f"draft-{number}.log", progress) as drafted:
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
            shown = tuple(word.replace(str(plan.out), EXPORT) for word in flags)
            measured.append(EngineDraft(name, shown, texts, time.monotonic() - began))
    return tuple(measured), failed


def _server(
    program: EngineProgram,
    plan: Plan,
    settings: ServerSettings,
    flags: Sequence[str],
    log: Path,
    progress: Progress,
) -> Any:
    progress.stage(f"starting {program.title} {'with its draft' if flags else 'for plain decoding'}")
    port = free_port()
    launch = program.launch(plan, settings, port, flags)
    return serving(launch, Client(port, program.title), log, start_seconds=program.start_seconds)


def _export_settings(config: BenchConfig, out: Path) -> ExportSettings:
    return ExportSettings(
        profile=config.profile,
        to=config.engine,
        out=out / EXPORT,
        overwrite=True,
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        prompts=config.dataset,
        tuning_prompts=config.tuning_prompts,
        held_out_prompts=config.held_out_prompts,
        seed=config.seed,
        **{name: getattr(config, name) for name in PromptSettings.model_fields},
    )


def _server_settings(config: BenchConfig, task: BenchTask, plan: Plan) -> ServerSettings:
    longest = max(len(prompt.token_ids) for prompt in (*task.measured, *task.choosing))
    wanted = longest + task.max_new_tokens + max(plan.length.num_tokens, 16) + OVER
    limit = task.target.context_length
    return ServerSettings(
        context=wanted if limit is None else min(wanted, limit),
        threads=config.threads,
        arguments=tuple(shlex.split(config.engine_args or "")),
    )


def _facts(
    config: BenchConfig, task: BenchTask, program: EngineProgram, plan: Plan, settings: ServerSettings, version: str
) -> dict[str, Any]:
    def shown(flags: Sequence[str]) -> str:
        words = program.launch(plan, settings, 0, flags).command
        return shlex.join(public_name(word.replace(str(plan.out), EXPORT)) for word in words)

    facts = {
        "profile": task.profile.name,
        "engine": program.title,
        "engine_version": version,
        "plain_command": shown(()),
        "model": public_name(task.loaded.name),
        "dataset": public_name(config.dataset),
        "dataset_fingerprint": task.dataset_fingerprint,
        "split": task.split,
        "max_new_tokens": task.max_new_tokens,
        "seed": config.seed,
        "rows": [prompt.row for prompt in task.measured],
        "dtype": plan.dtype,
        "threads": config.threads,
    }
    return stamped(facts, task.target.device)
