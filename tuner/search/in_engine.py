"""The end of a search that deploys to an engine: entrants, race and confirmation in the engine itself.

Trials in this process choose drafts by the engine's rules. How many tokens to draft depends on what passes cost there, so each
draft enters with other lengths too, beside the engine's own lookup. A heat of a few prompts leaves the best for the race.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        first = self._drafts_and_lookups(best)
        others = self._other_lengths(first)
        heat = indices[:HEAT]
        num_wanted = len(first) + sum(map(len, others.values()))
        progress.stage(f"heat in {self.title}", len(heat) * num_wanted)
        measured: list[tuple[TrialRecord, Measurement]] = []
        for num_tried, record in enumerate(self._in_order(first, others, measured)):
            if measured and not may_go_on():
                progress.say(f"heat: {num_wanted - num_tried} candidates are not tried, as no time is left")
                break
            try:
                found = bench.measure(record.candidate, heat)
            except (EngineError, ExportError) as refused:
                progress.say(f"{record.candidate.draft.describe()} does not race: {refused}")
            else:
                measured.append((record, found))
            progress.advance(len(heat))
        if not measured:
            raise EngineError(f"{self.title} runs none of the {num_wanted} candidates")
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

    def _drafts_and_lookups(self, best: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Return the drafts of the trials as the engine runs them, and the engine's own lookups after the first, each once.

        Lookups cost no draft model, so in an engine they are the likeliest to pay: a short heat must have tried them.
        """
        rules = self.servers.exports.rules
        drafts = [
            record.model_copy(update={"candidate": rules.as_run(record.candidate)})
            for record in best
            if record.candidate.draft.drafts
        ]
        own = own_lookups() if self.servers.program.starts_at_once else own_lookups()[1:2]
        lookups = [
            TrialRecord(
                study=rules.name,
                number=number,
                state=TrialState.COMPLETE,
                candidate=rules.as_run(candidate),
                notes={ORIGIN: f"{self.title}'s own lookup"},
            )
            for number, candidate in enumerate(own)
        ]
        return _each_once([*drafts[:1], *lookups, *drafts[1:]])

    def _other_lengths(self, records: Sequence[TrialRecord]) -> dict[str, list[TrialRecord]]:
        """Return other draft lengths of each record, by its key; none where a server takes long to start."""
        if not self.servers.program.starts_at_once:
            return {}
        stops_below, known = self.servers.exports.rules.engine.stops_below, {each.candidate.key for each in records}
        found: dict[str, list[TrialRecord]] = {}
        for record in records:
            others = [
                each for each in other_lengths(record.candidate, stops_below=stops_below) if each.key not in known
            ]
            known.update(each.key for each in others)
            found[record.candidate.key] = [record.model_copy(update={"candidate": each}) for each in others]
        return found

    def _in_order(
        self,
        first: Sequence[TrialRecord],
        others: Mapping[str, Sequence[TrialRecord]],
        measured: Sequence[tuple[TrialRecord, Measurement]],
    ) -> Iterator[TrialRecord]:
        """Yield `first`, and then the other lengths of each, those of the fastest first, as far as it could be `measured`."""
        yield from first
        for record, _ in sorted(measured, key=lambda each: -each[1].speedup):
            yield from others.get(record.candidate.key, ())


def _each_once(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the first record of each candidate."""
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
