"""Candidates measured in an engine that we start, in turns with its own plain decoding: `Measuring` for race and confirmation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tuner.engines.contender import EngineDecoding, engine_judge
from tuner.engines.serving import served
from tuner.errors import EngineError
from tuner.measuring.baseline import FEWEST_DECODED
from tuner.measuring.contender import PLAIN
from tuner.measuring.turns import Interleaved, PairedBench

if TYPE_CHECKING:
    from decoding.target import Target
    from studies.contract import Candidate
    from studies.measurement import Measurement, PromptSample
    from tuner.engines.candidates import CandidateExports
    from tuner.engines.contract import EngineProgram, ServerSettings
    from tuner.engines.lookup_replay import Text
    from tuner.engines.loopback import Client
    from tuner.export.plan import Plan
    from tuner.measuring.contract import OnSample
    from tuner.measuring.paired import Bench

DRAFTED = "draft"
"""Name of a candidate beside plain decoding."""
MOST_RUNNING = 6
"""Servers with a draft that run at a time; the one that has waited longest ends for another."""


class EngineServers:
    """The servers of one engine: one that decodes plainly, and one for each candidate measured last. A context."""

    def __init__(
        self,
        program: EngineProgram,
        exports: CandidateExports,
        settings: ServerSettings,
        logs: Path,
        warm_up: Sequence[int],
    ) -> None:
        """`warm_up` is a prompt that every new server continues once before it is measured."""
        self.program, self.exports, self.settings = program, exports, settings
        self._logs, self._warm_up = logs, warm_up
        self._plain: tuple[Client, ExitStack] | None = None
        self._drafted: OrderedDict[tuple[str, ...], tuple[Client, ExitStack]] = OrderedDict()
        self._num_started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as ending:
            for _, server in (*self._drafted.values(), *([self._plain] if self._plain else [])):
                ending.enter_context(server)

    @property
    def plain(self) -> Client:
        """The server that decodes plainly; it is started when it is first asked for."""
        if self._plain is None:
            self._plain = self._started(self.exports.plain, ())
        return self._plain[0]

    def drafted(self, candidate: Candidate) -> Client:
        """Return the server of a candidate; raise `ExportError` or `EngineError` if the engine does not run it."""
        exported = self.exports.write(candidate)
        if exported.flags not in self._drafted:
            while len(self._drafted) >= MOST_RUNNING:
                _, (_, server) = self._drafted.popitem(last=False)
                server.close()
            self._drafted[exported.flags] = self._started(exported.plan, exported.flags)
        self._drafted.move_to_end(exported.flags)
        return self._drafted[exported.flags][0]

    def command(self, candidate: Candidate | None) -> tuple[str, ...]:
        """Return the command of a candidate's server, or of the plain one, without this machine's folders."""
        plan, flags = self.exports.plain, tuple[str, ...]()
        if candidate is not None:
            exported = self.exports.write(candidate)
            plan, flags = exported.plan, exported.flags
        return tuple(self.exports.shown(self.program.launch(plan, self.settings, 0, flags).command))

    def _started(self, plan: Plan, flags: Sequence[str]) -> tuple[Client, ExitStack]:
        self._num_started += 1
        log = self._logs / f"server-{self._num_started}.log"
        with ExitStack() as starting:
            client = starting.enter_context(served(self.program, plan, self.settings, flags, log))
            self.program.complete(client, self._warm_up, FEWEST_DECODED)
            return client, starting.pop_all()


class EngineBench(PairedBench):
    """The prompts of a bench of this process, continued by the engine; see `Measuring`.

    Every text is compared with the engine's own plain decoding of the same prompt. The rules that engines run do not adapt.
    """

    def __init__(self, servers: EngineServers, bench: Bench, target: Target) -> None:
        super().__init__(bench.baseline, engine_judge(target, replace(bench.baseline, continuations=())))
        self._servers = servers

    @property
    def texts(self) -> Sequence[Text]:
        """The prompts, each with its plain greedy continuation by this process, as token ids."""
        return tuple(zip(self.prompts, self.continuations, strict=True))

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Measure a candidate at these indices, each in turns with plain decoding.

        Raises `EngineError` for a text that is too short to be timed: this process has decoded a longer one.
        """
        program, servers = self._servers.program, self._servers
        clients = {PLAIN: servers.plain, DRAFTED: servers.drafted(candidate)}

        def show(samples: Mapping[str, PromptSample]) -> None:
            sample = samples[DRAFTED]
            if min(sample.plain_tokens, sample.draft_tokens) < 1:
                raise EngineError(
                    f"{program.title} ends prompt {sample.prompt} at its first token, and sdtune's decoder does not: its text "
                    "cannot be timed; leave the prompt out of the dataset"
                )
            on_sample(sample)

        contenders = [EngineDecoding(name, program, client) for name, client in clients.items()]
        return self.compete(Interleaved(contenders), indices, show)[DRAFTED]

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate."""
        return candidate
