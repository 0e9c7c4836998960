"""A search that deploys to an engine: trials in this process by the engine's rules; heat, race and confirmation in the engine.

Trials choose the drafts. What the engine's passes cost is not known before, so in the heat, on a few prompts, each draft model
enters with other lengths too, and the engine's own lookups in any case.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from decoding.profile import EngineFacts
from studies.contract import ORIGIN, Candidate, TrialRecord, TrialState
from tuner.engines.bench import EngineBench, EngineServers
from tuner.engines.candidates import CandidateExports, EngineRules, other_lengths, own_lookups
from tuner.engines.contract import ServerSettings, find_engine
from tuner.errors import ConfigError, EngineError, ExportError
from tuner.export.engines.registry import load_engine
from tuner.export.engines.vllm import NATIVE_RULES
from tuner.export.run import model_folder_of
from tuner.results import public_name

if TYPE_CHECKING:
    from decoding.profile import TargetIdentity
    from studies.measurement import Measurement
    from tuner.config import SearchConfig
    from tuner.engines.contract import EngineProgram
    from tuner.inputs.models import Loaded
    from tuner.measuring.paired import Bench
    from tuner.progress import Progress
    from tuner.search.task import Task

HEAT = 2
"""Prompts of the heat: a sample of each order, plain first and draft first."""
HOPELESS = 0.9
"""A draft model does not race if it was slower than this in the heat, and slower than plain decoding on each prompt."""


@dataclass(frozen=True)
class Deployment:
    """The engine of a search, and what it can run."""

    program: EngineProgram
    rules: EngineRules


def deployment_of(config: SearchConfig, loaded: Loaded, identity: TargetIdentity) -> Deployment | None:
    """Return the deployment of a search, None for one that stays in this process; raise `EngineError` if it is not installed."""
    if config.deploy_to is None:
        return None
    program = find_engine(config.deploy_to, config.engine_home)
    folder = model_folder_of(loaded.name, loaded.revision)
    rules = EngineRules(
        config.deploy_to,
        identity,
        loaded.model.config,
        model=str(folder),
        runs_profiles=program.runs_profiles(),
    )
    return Deployment(program, rules)


def restricted(config: SearchConfig) -> SearchConfig:
    """Return the configuration of a search whose candidates the engine of `deploy_to` can run.

    Raises `ConfigError` for a study's settings that exclude what the engine runs, and `EngineError` if it is not installed.
    """
    if config.deploy_to is None:
        return config
    engine = load_engine(config.deploy_to)
    native = find_engine(config.deploy_to, config.engine_home).runs_profiles()
    rules, quantises = (NATIVE_RULES, False) if native else (engine.rules, engine.quantises)
    studies = dict(config.studies)
    for name in config.study:
        try:
            settings = config.study_settings(name)
            changes = settings.for_engine(rules, quantises=quantises, whole_blocks=not native)
        except ValueError as cause:
            raise ConfigError(f"studies.{name}: {cause}") from None
        studies[name] = {**studies.get(name, {}), **changes}
    return config.model_copy(update={"studies": studies, "prefix_reuse": False})


def heat_seconds(program: EngineProgram, pair_seconds: float) -> float:
    """Return the seconds of the shortest heat, where a sample takes `pair_seconds`: the engine's own lookups and the best draft."""
    least = (len(own_lookups()) if program.starts_at_once else 1) + 1
    start = program.usual_start_seconds
    return start + least * (start + pair_seconds * HEAT)


@dataclass(frozen=True)
class EngineArena:
    """The engine of a search with its servers, which measure race and confirmation."""

    task: Task
    servers: EngineServers
    version: str
    progress: Progress

    def bench(self, bench: Bench) -> EngineBench:
        """Return the prompts of `bench`, measured in the engine."""
        return EngineBench(self.servers, bench, self.task.target)

    def shortlist(
        self,
        best: Sequence[TrialRecord],
        indices: Sequence[int],
        count: int,
        bench: Bench,
        may_go_on: Callable[[], bool],
    ) -> list[TrialRecord]:
        """Return up to `count` candidates to race; see `Heat`.

        Raises `EngineError` if the engine does not start, or runs none of them.
        """
        _ = self.servers.plain  # started here: an engine that does not start would be started again for each draft
        heat = Heat(self.servers.program, self.servers.exports.rules, self.bench(bench), self.progress)
        heat.run(best, indices, may_go_on)
        return heat.entrants(count)

    def facts(self, candidate: Candidate | None) -> EngineFacts:
        """Return the engine with the command of a candidate, or of plain decoding."""
        words = [public_name(word) for word in self.servers.command(candidate)]
        return EngineFacts(name=self.servers.program.title, version=self.version, command=shlex.join(words))


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
        config, texts = task.config, (*task.prompts.tuning, *task.prompts.held_out)
        settings = ServerSettings.of(
            texts, config.max_new_tokens, task.target.config, threads=config.threads, engine_args=config.engine_args
        )
        with EngineServers(program, exports, settings, logs, bench.prompts[0]) as servers:
            yield EngineArena(task, servers, version, progress)


@dataclass
class Heat:
    """Candidates of one heat, and what was measured of them."""

    program: EngineProgram
    rules: EngineRules
    bench: EngineBench
    progress: Progress
    measured: list[tuple[TrialRecord, Measurement]] = field(default_factory=list)

    def run(self, best: Sequence[TrialRecord], indices: Sequence[int], may_go_on: Callable[[], bool]) -> None:
        """Measure the `best` trials' drafts, lookups and other draft lengths at the first of the indices.

        `may_go_on` is asked before each but the first. What the engine refuses is left out, and said.

        Raises `EngineError` if it runs none of them.
        """
        drafts, lookups = self._drafts(best), self._own_lookups()
        others = self._other_lengths([*drafts, *lookups])
        heat = indices[:HEAT]
        num_wanted = len(drafts) + len(lookups) + sum(map(len, others.values()))
        self.progress.stage(f"heat in {self.program.title}", len(heat) * num_wanted)
        tried: set[str] = set()
        for record in self._in_order(drafts, lookups, others):
            if record.candidate.key in tried:
                continue
            if self.measured and not may_go_on():
                left = max(1, num_wanted - len(tried))
                self.progress.say(f"heat: {left} candidates are not tried, as no time is left")
                break
            tried.add(record.candidate.key)
            try:
                found = self.bench.measure(record.candidate, heat)
            except (EngineError, ExportError) as refused:
                self.progress.say(f"{record.candidate.draft.describe()} does not race: {refused}")
            else:
                self.measured.append((record, found))
            self.progress.advance(len(heat))
        if not self.measured:
            raise EngineError(f"{self.program.title} runs none of the {num_wanted} candidates")

    def entrants(self, count: int) -> list[TrialRecord]:
        """Return up to `count` candidates to race: the best of each draft model that has a chance, and the best lookups."""
        with_a_chance = [each for each in self.measured if not _is_hopeless(*each)] or self.measured
        ranked = sorted(with_a_chance, key=lambda each: (not each[1].is_lossless, -each[1].speedup))
        chosen = _best_of_each([record for record, _ in ranked], count)
        others = [record for record, _ in ranked if record not in chosen]
        return [*chosen, *others][:count]

    def _drafts(self, best: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Return the drafts of the trials as the engine runs them, each once."""
        found: dict[str, TrialRecord] = {}
        for record in best:
            if record.candidate.draft.drafts:
                as_run = self.rules.as_run(record.candidate)
                found.setdefault(as_run.key, record.model_copy(update={"candidate": as_run}))
        return list(found.values())

    def _own_lookups(self) -> list[TrialRecord]:
        """Return the engine's own lookups that are measured in any case; one where a server takes long to start."""
        own = own_lookups() if self.program.starts_at_once else own_lookups()[1:2]
        return [
            TrialRecord(
                study=self.rules.name,
                number=number,
                state=TrialState.COMPLETE,
                candidate=self.rules.as_run(candidate),
                notes={ORIGIN: f"{self.program.title}'s own lookup"},
            )
            for number, candidate in enumerate(own)
        ]

    def _other_lengths(self, records: Sequence[TrialRecord]) -> dict[str, list[TrialRecord]]:
        """Return other draft lengths of each record, by its key; none where a server takes long to start."""
        if not self.program.starts_at_once:
            return {}
        stops_below, known = self.rules.engine.stops_below, {each.candidate.key for each in records}
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
        drafts: Sequence[TrialRecord],
        lookups: Sequence[TrialRecord],
        others: Mapping[str, Sequence[TrialRecord]],
    ) -> Iterator[TrialRecord]:
        """Yield lookups, the drafts, the best first, and other lengths, those of the fastest draft first.

        Lookups cost no draft model, so in an engine they are the likeliest to pay: a short heat must have tried them.
        """
        yield from lookups
        yield from drafts
        for record, _ in sorted(self.measured, key=lambda each: -each[1].speedup):
            yield from others.get(record.candidate.key, ())


def _is_hopeless(record: TrialRecord, measurement: Measurement) -> bool:
    slower = all(sample.ratio < 1.0 for sample in measurement.samples)
    return record.candidate.draft.runs_model and slower and measurement.speedup < HOPELESS


def _best_of_each(ranked: Sequence[TrialRecord], count: int) -> list[TrialRecord]:
    """Return the first of each draft model, lookups counting as one, `count` at most; a lookup is always among them."""
    first: dict[object, TrialRecord] = {}
    for record in ranked:
        draft = record.candidate.draft
        first.setdefault(draft.having(lookup=None) if draft.runs_model else None, record)
    lookup = first.get(None)
    chosen = list(first.values())[:count]
    if lookup is not None and lookup not in chosen:
        chosen[-1] = lookup
    return chosen
