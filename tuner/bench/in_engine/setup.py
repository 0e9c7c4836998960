"""What both benches in an engine begin with: the export, the engine's files, its servers, and the facts of the results."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.engines.contract import ServerSettings
from tuner.engines.loopback import Client, free_port
from tuner.engines.serving import serving
from tuner.export.engines.registry import load_engine
from tuner.export.run import export
from tuner.export.settings import ExportSettings
from tuner.prompt_settings import PromptSettings
from tuner.results import public_name, stamped

if TYPE_CHECKING:
    from tuner.bench.config import BenchConfig
    from tuner.bench.task import BenchTask
    from tuner.engines.contract import EngineProgram
    from tuner.export.plan import Plan
    from tuner.progress import Progress

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

    @property
    def has_schedule(self) -> bool:
        """True if the engine takes a schedule of draft lengths by number of sequences."""
        return load_engine(self.name).has_schedule

    def server(
        self, flags: Sequence[str], log: Path, progress: Progress, *, what: str = "with its draft"
    ) -> AbstractContextManager[Client]:
        """Return a server with these flags of a draft, or one that decodes plainly; it runs while the context does."""
        progress.stage(f"starting {self.program.title} {what if flags else 'for plain decoding'}")
        port = free_port()
        launch = self.program.launch(self.plan, self.settings, port, flags)
        return serving(launch, Client(port, self.program.title), log, start_seconds=self.program.start_seconds)

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
