"""Candidates measured in an engine that we start, in turns with its own plain decoding: `Measuring` for race and confirmation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from decoding.losslessness import compare
from studies.measurement import Measurement
from tuner.engines.loopback import Client, free_port
from tuner.engines.paired import continue_both
from tuner.engines.serving import serving
from tuner.errors import EngineError
from tuner.measuring.baseline import FEWEST_DECODED

if TYPE_CHECKING:
    from decoding.target import Target
    from studies.contract import Candidate
    from studies.measurement import PromptSample
    from tuner.engines.candidates import CandidateExports
    from tuner.engines.contract import EngineProgram, ServerSettings
    from tuner.engines.lookup_replay import Text
    from tuner.engines.paired import Compare
    from tuner.export.plan import Plan
    from tuner.measuring.paired import Bench

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
        port, log = free_port(), self._logs / f"server-{self._num_started}.log"
        launch, client = self.program.launch(plan, self.settings, port, flags), Client(port, self.program.title)
        with ExitStack() as starting:
            starting.enter_context(serving(launch, client, log, start_seconds=self.program.start_seconds))
            self.program.complete(client, self._warm_up, FEWEST_DECODED)
            return client, starting.pop_all()


class EngineBench:
    """The prompts of a bench of this process, continued by the engine; see `Measuring`.

    Every text is compared with the engine's own plain decoding of the same prompt. The rules that engines run do not adapt.
    """

    def __init__(self, servers: EngineServers, bench: Bench, target: Target) -> None:
        self._servers, self._bench = servers, bench
        self._compare: Compare = partial(compare, target)

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the measurable prompts."""
        return self._bench.indices

    @property
    def texts(self) -> Sequence[Text]:
        """The prompts, each with its plain greedy continuation by this process, as token ids."""
        return tuple(zip(self._bench.prompts, self._bench.continuations, strict=True))

    def measure(
        self,
        candidate: Candidate,
        indices: Sequence[int],
        on_sample: Callable[[PromptSample], None] = lambda sample: None,
    ) -> Measurement:
        """Measure a candidate at these indices, each in turns with plain decoding.

        Raises `EngineError` for a text that is too short to be timed: this process has decoded a longer one.
        """
        servers = self._servers
        plain, drafted = servers.plain, servers.drafted(candidate)
        samples = []
        for index in indices:
            prompt = self._bench.prompts[index]
            pair = continue_both(servers.program, plain, drafted, index, prompt, self._bench.max_new_tokens)
            if pair.num_decoded < 1:
                raise EngineError(
                    f"{servers.program.title} ends prompt {index} at its first token, and sdtune's decoder does not: its text "
                    "cannot be timed; leave the prompt out of the dataset"
                )
            comparison = self._compare(prompt, pair.plain.tokens, pair.drafted.tokens)
            samples.append(pair.sample(index, comparison, self._bench.baseline.category(index)))
            on_sample(samples[-1])
        return Measurement(samples=tuple(samples))

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate."""
        return candidate
