"""The end of a search that deploys to an engine: entrants, race and confirmation in the engine itself.

Trials in this process choose drafts by the engine's rules. How many tokens to draft depends on what passes cost there, so each
draft enters with other lengths too, beside the engine's own lookup. A heat of a few prompts leaves the best for the race.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decoding.profile import EngineFacts
from studies.contract import ORIGIN, Candidate, TrialRecord, TrialState
from tuner.engines.bench import EngineBench, EngineServers
from tuner.engines.candidates import CandidateExports, other_lengths, own_lookups
from tuner.engines.contract import ServerSettings
from tuner.errors import EngineError, ExportError
from tuner.results import public_name

if TYPE_CHECKING:
    from studies.measurement import Measurement
    from tuner.measuring.paired import Bench
    from tuner.progress import Progress
    from tuner.search.task import Task

HEAT = 2
"""Prompts of the heat: a sample of each order, plain first and draft first."""
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
        bench: EngineBench,
        may_go_on: Callable[[], bool],
        progress: Progress,
    ) -> list[TrialRecord]:
        """Return the candidates to race: the best of a heat of `best`, also with other draft lengths, and the engine's own lookups.

        Each draft model's best enters, and the best lookup. What the engine refuses is left out, and said.
        """
        wanted = self._wanted(best)
        heat = indices[:HEAT]
        progress.stage(f"heat in {self.title}", len(heat) * len(wanted))
        measured: list[tuple[TrialRecord, Measurement]] = []
        for record in wanted:
            if measured and not may_go_on():
                progress.say(f"heat: {len(wanted) - len(measured)} candidates are not tried, as no time is left")
                break
            try:
                found = bench.measure(record.candidate, heat)
            except (EngineError, ExportError) as refused:
                progress.say(f"{record.candidate.draft.describe()} does not race: {refused}")
            else:
                measured.append((record, found))
            progress.advance(len(heat))
        if not measured:
            raise EngineError(f"{self.title} runs none of the {len(wanted)} candidates")
        ranked = sorted(measured, key=lambda each: (not each[1].is_lossless, -each[1].speedup))
        return _best_of_each([record for record, _ in ranked], self.task.config.finalists)

    @property
    def title(self) -> str:
        """Name of the engine."""
        return self.servers.program.title

    def facts(self, candidate: Candidate | None) -> EngineFacts:
        """Return the engine with the command of a candidate, or of plain decoding."""
        words = [public_name(word) for word in self.servers.command(candidate)]
        return EngineFacts(name=self.title, version=self.version, command=shlex.join(words))

    def _wanted(self, best: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Return every candidate of the heat once, as the engine runs it."""
        rules = self.servers.exports.rules
        records: list[TrialRecord] = []
        for record in best:
            if record.candidate.draft.drafts:
                records.append(record.model_copy(update={"candidate": rules.as_run(record.candidate)}))
        if self.servers.program.starts_at_once:
            others = [
                record.model_copy(update={"candidate": candidate})
                for record in records
                for candidate in other_lengths(record.candidate, stops_below=rules.engine.stops_below)
            ]
            records += others
        lookups = own_lookups() if self.servers.program.starts_at_once else own_lookups()[1:2]
        records += [
            TrialRecord(
                study=rules.name,
                number=number,
                state=TrialState.COMPLETE,
                candidate=rules.as_run(candidate),
                notes={ORIGIN: f"{self.title}'s own lookup"},
            )
            for number, candidate in enumerate(lookups)
        ]
        return list({record.candidate.key: record for record in reversed(records)}.values())[::-1]


def _best_of_each(ranked: Sequence[TrialRecord], count: int) -> list[TrialRecord]:
    """Return the first of each draft model, lookups counting as one, and the next best up to `count` in all."""
    first: dict[object, TrialRecord] = {}
    for record in ranked:
        draft = record.candidate.draft
        first.setdefault(draft.without_lookup() if draft.runs_model else None, record)
    lookup = first.get(None)
    chosen = list(first.values())[:count]
    if lookup is not None and lookup not in chosen:
        chosen[-1] = lookup
    rest = [record for record in ranked if record not in chosen]
    return [*chosen, *rest[: count - len(chosen)]]


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
