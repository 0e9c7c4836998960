"""The run of `sdtune bench --engine`: export, start both servers, continue the held-out prompts in turns.

One server decodes plainly all the time; another runs each draft in turn: the export's own and those of other flags, one request at
a time, or each draft length at each number of requests side by side, and the schedule that follows where the engine runs one.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoding.head_folder import HeadFolder
from decoding.text import Ending
from tuner.bench.config import BenchConfig
from tuner.bench.in_engine.report import engine_json, engine_table
from tuner.bench.in_engine.result import (
    SCHEDULE,
    EngineDraft,
    EngineFigures,
    EngineResult,
    schedule_of,
    with_its_own,
)
from tuner.bench.report import TABLE_WIDTH
from tuner.bench.settings_check import check_bench_settings, check_groups
from tuner.bench.task import prepare_bench, token_ids
from tuner.engines.contender import EngineDecoding, engine_judge
from tuner.engines.contract import ServerSettings
from tuner.engines.expectation import predict_by_rules
from tuner.engines.loopback import Client
from tuner.engines.registry import find_engine
from tuner.engines.serving import served
from tuner.errors import ConfigError, DatasetError, EngineError
from tuner.export.engines.registry import load_engine
from tuner.export.run import export
from tuner.export.settings import ExportSettings
from tuner.fields import PromptSettings
from tuner.measuring.baseline import FEWEST_DECODED, Baseline
from tuner.measuring.comparison import FEWEST_SAMPLES, is_long, without
from tuner.measuring.contender import PLAIN
from tuner.measuring.turns import Interleaved, PairedBench
from tuner.results import check_results_folder, public_name, stamped, write_json, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tuner.bench.task import BenchTask
    from tuner.engines.contract import EngineProgram
    from tuner.export.plan import Plan
    from tuner.export.prediction import PredictedSpeedup
    from tuner.progress import Progress

NAME = "engine"
PROFILE = "profile"
LENGTHS, FEW_LENGTHS = (1, 2, 4, 8), (1, 3)
"""Draft lengths beside the export's own, in an engine that starts at once, and in one that does not."""
EXPORT = "export"
OVER = 8
"""Positions beyond the longest text and its draft."""
USUAL_DRAFT = 16
"""Positions for the drafts of other settings, of which only the flags are known."""


@dataclass(frozen=True)
class EngineTask:
    """A profile's export, and the engine that runs it."""

    name: str
    """Name of the engine's export."""
    config: BenchConfig
    task: BenchTask
    program: EngineProgram
    version: str
    plan: Plan
    settings: ServerSettings

    def server(
        self, flags: Sequence[str], log: Path, progress: Progress, *, what: str
    ) -> AbstractContextManager[Client]:
        """Return a server with these flags of a draft, or one that decodes plainly; it runs while the context does."""
        progress.stage(f"starting {self.program.title} {what}")
        return served(self.program, self.plan, self.settings, flags, log)

    def shown(self, flags: Sequence[str]) -> tuple[str, ...]:
        """Return flags without this machine's folders."""
        return tuple(word.replace(str(self.plan.out), EXPORT) for word in flags)

    def facts(self) -> dict[str, Any]:
        """Return what the figures were measured with, stamped."""
        task, plan = self.task, self.plan
        words = self.shown(self.program.launch(plan, self.settings, 0, ()).command)
        facts = {
            "profile": task.profile.name,
            "engine": self.program.title,
            "engine_version": self.version,
            "plain_command": shlex.join(map(public_name, words)),
            "model": public_name(task.loaded.name),
            "dataset": public_name(self.config.dataset),
            "dataset_fingerprint": task.dataset_fingerprint,
            "split": task.split,
            "max_new_tokens": task.max_new_tokens,
            "seed": self.config.seed,
            "rows": [prompt.row for prompt in task.measured],
            "dtype": plan.dtype,
            "threads": self.config.threads,
        }
        return stamped(facts, task.target.device)


def prepare_engine(
    config: BenchConfig, task: BenchTask, program: EngineProgram, version: str, out: Path, progress: Progress
) -> EngineTask:
    """Export the profile into `out`, and return what is needed to run it; raise `ExportError` for what has no counterpart."""
    out.mkdir(exist_ok=True)
    assert config.engine is not None, "the caller has looked"
    settings = ExportSettings(
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
    plan = export(settings, progress, loaded=task.loaded).plan
    assert plan is not None, "an engine's export has a plan"
    return EngineTask(config.engine, config, task, program, version, plan, _server_settings(config, task, plan))


def _server_settings(config: BenchConfig, task: BenchTask, plan: Plan) -> ServerSettings:
    longest = max(len(prompt.token_ids) for prompt in (*task.measured, *task.choosing))
    wanted = longest + task.max_new_tokens + max(plan.length.num_tokens, USUAL_DRAFT, *config.draft_tokens) + OVER
    limit = task.target.context_length
    return ServerSettings(
        context=wanted if limit is None else min(wanted, limit),
        threads=config.threads,
        sequences=max(config.sequences, default=1),
        arguments=tuple(shlex.split(config.engine_args or "")),
    )


def run_and_write_in_engine(
    config: BenchConfig, profile: Path, out: Path, *, progress: Progress
) -> tuple[RenderableType, EngineResult]:
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
    with tempfile.TemporaryDirectory(prefix="sdtune-engine-") as logs:
        result = _run(engine, others, Path(logs), progress)
    shown = engine_table(result, config.engine)
    write_text(out, NAME, shown, width=TABLE_WIDTH)
    write_json(out, NAME, engine_json(result))
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


def _run(engine: EngineTask, others: Sequence[str], logs: Path, progress: Progress) -> EngineResult:
    program, plan, task, schedule = engine.program, engine.plan, engine.task, None
    predicted = None if engine.config.sequences else _predicted(engine, progress)
    progress.stage(f"files for {program.title}")
    remarks = program.prepare(plan, logs / "convert.log")
    with engine.server((), logs / "plain.log", progress, what="for plain decoding") as plain:
        bench = _Drafts(engine, plain, logs, progress)
        if engine.config.sequences:
            bench.read_plain_texts()
            for num_tokens in engine.config.draft_tokens or usual_lengths(plan, starts_at_once=program.starts_at_once):
                name = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
                bench.measure(name, program.draft_flags(plan.with_length(num_tokens)), num_tokens)
            if not bench.drafts:
                raise EngineError("; ".join(bench.failed.values()))
            schedule = schedule_of(bench.drafts, task.profile, program.title, engine.version)
            if schedule.most_tokens and load_engine(engine.name).has_schedule:
                bench.measure(SCHEDULE, program.draft_flags(plan.with_length(schedule.most_tokens, schedule)))
                schedule = with_its_own(schedule, bench.drafts[-1])
        else:
            bench.measure(PROFILE, program.draft_flags(plan))
            if bench.failed:
                raise EngineError(bench.failed[PROFILE])
            for line in others:
                bench.measure(line, shlex.split(line.replace("{out}", str(plan.out))))
    return EngineResult(
        title=program.title,
        version=engine.version,
        drafts=tuple(bench.drafts),
        failed=bench.failed,
        facts=engine.facts(),
        remarks=(*remarks, *task.notes),
        predicted=predicted,
        schedule=schedule,
    )


def _predicted(engine: EngineTask, progress: Progress) -> PredictedSpeedup:
    task = engine.task
    progress.stage(f"predicting by {engine.program.title}'s rules")
    return predict_by_rules(
        engine.plan,
        task.target,
        HeadFolder(task.target, task.folder),
        token_ids(task.choosing),
        Ending(task.max_new_tokens, task.eos_token_ids),
    )


def usual_lengths(plan: Plan, *, starts_at_once: bool) -> tuple[int, ...]:
    """Return the export's own draft length and a few others, in order."""
    own = plan.lookup.max_tokens if plan.shape is None and plan.lookup is not None else plan.length.num_tokens
    return tuple(sorted({own, *(LENGTHS if starts_at_once else FEW_LENGTHS)}))


@dataclass
class _Drafts:
    """Measures one server with a draft after another beside the plain one."""

    engine: EngineTask
    plain: Client
    logs: Path
    progress: Progress
    alone: tuple[tuple[int, ...], ...] = ()
    """Plain texts of the prompts, each decoded alone; empty where no other is measured."""
    drafts: list[EngineDraft] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Names of drafts that the engine did not run, with its reasons."""

    def read_plain_texts(self) -> None:
        """Let the plain server continue every prompt alone."""
        task, program = self.engine.task, self.engine.program
        self.progress.stage(f"{program.title}: plain texts", len(task.measured))
        texts = []
        for prompt in task.measured:
            texts.append(program.continuation(self.plain, prompt.token_ids, task.max_new_tokens))
            self.progress.advance()
        self.alone = tuple(texts)

    def measure(self, name: str, flags: Sequence[str], num_tokens: int | None = None) -> None:
        """Start a server with these flags of a draft, and measure it at every number of sequences."""
        engine, began = self.engine, time.monotonic()
        log = self.logs / f"draft-{len(self.drafts) + len(self.failed)}.log"
        try:
            with engine.server(flags, log, self.progress, what=f"with its draft, {name}") as drafted:
                loads = [self._at_load(name, drafted, number) for number in sorted({*engine.config.sequences}) or [1]]
        except EngineError as cause:
            self.failed[name] = str(cause)
            self.progress.say(f"{name}: {cause}")
            return
        seconds = time.monotonic() - began
        self.drafts.append(EngineDraft(name, num_tokens, engine.shown(flags), tuple(loads), seconds))

    def _at_load(self, name: str, drafted: Client, sequences: int) -> EngineFigures:
        engine, task, by_load = self.engine, self.engine.task, bool(self.engine.config.sequences)
        num_used = len(task.measured) // sequences * sequences
        baseline = Baseline(
            prompts=token_ids(task.measured)[:num_used],
            continuations=self.alone[:num_used],
            rows=tuple(range(num_used)),
            ending=Ending(task.max_new_tokens, task.eos_token_ids),
            batch_size=sequences,
            categories=tuple(prompt.category for prompt in task.measured[:num_used]),
        )
        bench = PairedBench(baseline, engine_judge(task.target, baseline))
        clients = {PLAIN: self.plain, name: drafted}
        turns = Interleaved([EngineDecoding(each, engine.program, client, by_load) for each, client in clients.items()])
        turns.warm_up([bench.batch(0)])
        repeats = engine.config.repeats
        beside = f", {sequences} side by side" if by_load else ""
        self.progress.stage(f"{engine.program.title}: {name}{beside}", repeats * len(bench.indices))
        found = bench.compete(
            turns, bench.indices, lambda samples: self.progress.advance(), repeats=repeats, plain_too=True
        )
        plain, everything = found[PLAIN], found[name]
        short = {s.prompt for each in found.values() for s in each.samples if not is_long(s)}
        measurement = everything if by_load else without(everything, short)
        if len(measurement.samples) < FEWEST_SAMPLES:
            raise DatasetError(
                f"only {len(measurement.samples)} texts have {FEWEST_DECODED} tokens after the first: give more "
                "--max-new-tokens, or prompts that the model continues at greater length"
            )
        figures = EngineFigures(sequences, measurement, everything, plain.num_prompts - plain.num_identical)
        if by_load:
            self.progress.say(f"{sequences} side by side, {name}: {measurement.speedup_interval()} over plain decoding")
        return figures
