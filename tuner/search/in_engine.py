"""The end of a search that deploys to an engine: heat, race and confirmation in the engine itself."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decoding.profile import EngineFacts
from tuner.engines.bench import EngineBench, EngineServers
from tuner.engines.candidates import CandidateExports
from tuner.engines.contract import ServerSettings
from tuner.results import public_name
from tuner.search.heat import Heat

if TYPE_CHECKING:
    from studies.contract import Candidate, TrialRecord
    from tuner.measuring.paired import Bench
    from tuner.progress import Progress
    from tuner.search.task import Task

ROOM = 72
"""Positions beyond the longest text: of the longest draft or copy, and a few."""


@dataclass(frozen=True)
class EngineArena:
    """An engine with its servers, for one search."""

    task: Task
    servers: EngineServers
    version: str

    def bench(self, bench: Bench) -> EngineBench:
        """Return the prompts of `bench`, measured in the engine."""
        return EngineBench(self.servers, bench, self.task.target)

    def entrants(
        self,
        best: Sequence[TrialRecord],
        indices: Sequence[int],
        *,
        count: int,
        bench: EngineBench,
        may_go_on: Callable[[], bool],
        progress: Progress,
    ) -> list[TrialRecord]:
        """Return up to `count` candidates to race; see `Heat`. Raises `EngineError` if the engine runs none of them."""
        heat = Heat(self.servers.program, self.servers.exports.rules, bench, progress)
        heat.run(best, indices, may_go_on)
        return heat.entrants(count)

    @property
    def title(self) -> str:
        """Name of the engine."""
        return self.servers.program.title

    def facts(self, candidate: Candidate | None) -> EngineFacts:
        """Return the engine with the command of a candidate, or of plain decoding."""
        words = [public_name(word) for word in self.servers.command(candidate)]
        return EngineFacts(name=self.title, version=self.version, command=shlex.join(words))


@contextmanager
def arena(task: Task, bench: Bench, progress: Progress) -> Iterator[EngineArena | None]:
    """Open the engine that the search deploys to, or yield None if it stays in this process. Its servers end with the context.

    `bench` has the tuning prompts. Raises `EngineError` for an engine that does not run, before anything is raced.
    """
    deployment = task.deployment
    if deployment is None:
        yield None
        return
    program = deployment.program
    version = program.version()
    with tempfile.TemporaryDirectory(prefix="sdtune-engine-") as folder:
        out, logs = Path(folder) / "export", Path(folder) / "logs"
        out.mkdir()
        logs.mkdir()
        progress.stage(f"files for {program.title}")
        exports = CandidateExports(program, deployment.rules, task.loaded, task.config.heads, out)
        for remark in exports.remarks:
            progress.say(remark)
        with EngineServers(program, exports, _settings(task), logs, bench.prompts[0]) as servers:
            yield EngineArena(task, servers, version)


def _settings(task: Task) -> ServerSettings:
    longest = max(len(each.token_ids) for each in (*task.prompts.tuning, *task.prompts.held_out))
    wanted, limit = longest + task.config.max_new_tokens + ROOM, task.target.context_length
    return ServerSettings(
        context=wanted if limit is None else min(wanted, limit),
        threads=task.config.threads,
        arguments=tuple(shlex.split(task.config.engine_args or "")),
    )
