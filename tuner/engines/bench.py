"""A running engine as a contender, and candidates measured in it: `Measuring` for the race and the confirmation."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from decoding.losslessness import Comparison, compare
from tuner.engines.contract import completed
from tuner.engines.server import served
from tuner.errors import EngineError
from tuner.measuring.baseline import FEWEST_DECODED, Baseline
from tuner.measuring.contender import PLAIN, Decoded, Prompts
from tuner.measuring.turns import Interleaved, PairedBench

if TYPE_CHECKING:
    from decoding.target import Target
    from decoding.text import Ending
    from studies.contract import Candidate
    from studies.measurement import Measurement, PromptSample
    from tuner.engines.candidates import CandidateExports
    from tuner.engines.contract import EngineProgram, ServerSettings
    from tuner.engines.server import Client
    from tuner.export.plan import Plan
    from tuner.measuring.paired import Bench
    from tuner.measuring.turns import Judge, OnSample, Texts
    from tuner.progress import Progress

DRAFTED = "draft"
"""Name of a candidate beside plain decoding."""
SHORTAGE = re.compile("memory|alloc", re.IGNORECASE)
"""What an engine says if memory was short at its start."""
MOST_RUNNING = 6
"""Servers with a draft that run at a time; the one that has waited longest ends for another."""


@dataclass(frozen=True)
class EngineDecoding:
    """A server of an engine; see `Contender`."""

    name: str
    program: EngineProgram
    client: Client
    by_load: bool = False
    """Sends the prompts of a batch at once, and takes the wall clock until the last answer, prompts included."""
    description: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        """Do nothing: a server prepares itself."""

    def decode(self, prompts: Prompts, max_new_tokens: int) -> Decoded:
        """See `Contender.decode`. Raises `EngineError` for a wrong answer."""
        if self.by_load:
            return self._decode_together(prompts, max_new_tokens)
        (prompt,) = prompts
        return self.program.complete(self.client, prompt, max_new_tokens)

    def _decode_together(self, prompts: Prompts, max_new_tokens: int) -> Decoded:
        program, client = self.program, self.client
        before = client.counters()
        with ThreadPoolExecutor(len(prompts)) as threads:
            began = time.perf_counter()
            asked = [threads.submit(program.continuation, client, prompt, max_new_tokens) for prompt in prompts]
            texts = tuple(each.result() for each in asked)
            seconds = time.perf_counter() - began
        after = program.counters_after(client, before, len(prompts))
        return completed(texts, None, seconds, program.counts(after) - program.counts(before))


def engine_judge(target: Callable[[], Target], baseline: Baseline) -> Judge:
    """Return the comparison with the engine's own plain decoding: at the same moment, or of the prompt alone.

    Continuations of the baseline are those of each prompt alone: a batch may round otherwise than one row, which is no fault of
    the draft. Without any, the text of the same turn is all that there is. `target` is called only for texts that differ.
    """

    def judge(name: str, row: int, texts: Texts) -> Comparison:
        if name != PLAIN and texts[name] == texts[PLAIN]:
            return Comparison(identical=True)
        reference = baseline.continuations[row] if baseline.continuations else texts[PLAIN]
        if texts[name] == reference:
            return Comparison(identical=True)
        return compare(target(), baseline.prompts[row], reference, texts[name])

    return judge


@dataclass(frozen=True)
class LoadFigures:
    """A draft in turns with plain decoding, at one number of requests side by side."""

    sequences: int
    measurement: Measurement
    """A sample per group of prompts, by the wall clock of its rounds, prompts included."""
    num_plain_different: int = 0
    """Texts that plain decoding itself continues otherwise at this number of sequences than alone."""


@dataclass(frozen=True)
class Crowd:
    """Prompts, and what the engine's plain decoding writes after each of them alone."""

    prompts: tuple[tuple[int, ...], ...]
    alone: tuple[tuple[int, ...], ...]
    ending: Ending
    target: Callable[[], Target]
    """Returns the model that tells ties from errors; called only for texts that differ."""

    def measure(
        self, plain: EngineDecoding, drafted: EngineDecoding, sequences: int, progress: Progress
    ) -> LoadFigures:
        """Measure a server that drafts in turns with one that does not, with `sequences` prompts side by side."""
        found = self.side_by_side((plain, drafted), sequences, progress)[drafted.name]
        speedup = found.measurement.speedup_interval()
        progress.say(f"{sequences} side by side, {drafted.name}: {speedup} over plain decoding")
        return found

    def side_by_side(
        self, contenders: Sequence[EngineDecoding], sequences: int, progress: Progress
    ) -> dict[str, LoadFigures]:
        """Measure several servers in turns, plain decoding among them."""
        num_used = len(self.prompts) // sequences * sequences
        baseline = Baseline(
            prompts=self.prompts[:num_used],
            continuations=self.alone[:num_used],
            rows=tuple(range(num_used)),
            ending=self.ending,
            batch_size=sequences,
        )
        bench = PairedBench(baseline, engine_judge(self.target, baseline))
        turns = Interleaved([replace(each, by_load=True) for each in contenders])
        turns.warm_up([bench.batch(0)])
        title, names = contenders[0].program.title, ", ".join(each.name for each in contenders if each.name != PLAIN)
        progress.stage(f"{title}: {names}, {sequences} side by side", len(bench.indices))
        found = bench.compete(turns, bench.indices, lambda samples: progress.advance(), plain_too=True)
        num_different = found[PLAIN].num_prompts - found[PLAIN].num_identical
        return {name: LoadFigures(sequences, each, num_different) for name, each in found.items()}


def write_alone(
    program: EngineProgram, plain: Client, prompts: Prompts, max_new_tokens: int, progress: Progress
) -> tuple[tuple[int, ...], ...]:
    """Return what the server writes after each prompt alone."""
    progress.stage(f"{program.title}: plain texts", len(prompts))
    alone = []
    for prompt in prompts:
        alone.append(program.continuation(plain, prompt, max_new_tokens))
        progress.advance()
    return tuple(alone)


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
        """Return the server of a candidate; raise `ExportError` or `EngineError` if the engine does not run it.

        Where memory is short beside the servers of other candidates, these end.
        """
        plan, flags = self.exports.write(candidate)
        if flags not in self._drafted:
            self._end_drafted(most_left=MOST_RUNNING - 1)
            try:
                self._drafted[flags] = self._started(plan, flags)
            except EngineError as cause:
                if not self._drafted or SHORTAGE.search(str(cause)) is None:
                    raise
                self._end_drafted(most_left=0)
                self._drafted[flags] = self._started(plan, flags)
        self._drafted.move_to_end(flags)
        return self._drafted[flags][0]

    def _end_drafted(self, most_left: int) -> None:
        while len(self._drafted) > most_left:
            _, (_, server) = self._drafted.popitem(last=False)
            server.close()

    def command(self, candidate: Candidate | None) -> tuple[str, ...]:
        """Return the command of a candidate's server, or of the plain one, without this machine's folders."""
        plan, flags = self.exports.plain, tuple[str, ...]()
        if candidate is not None:
            plan, flags = self.exports.write(candidate)
        return tuple(self.exports.shown(self.program.launch(plan, self.settings, 0, flags).command))

    def _started(self, plan: Plan, flags: Sequence[str]) -> tuple[Client, ExitStack]:
        with ExitStack() as starting:
            client = starting.enter_context(served(self.program, plan, self.settings, flags, self._logs))
            self.program.complete(client, self._warm_up, FEWEST_DECODED)
            return client, starting.pop_all()


class EngineBench(PairedBench):
    """The prompts of a bench of this process, continued by the engine; see `Measuring`.

    Every text is compared with the engine's own plain decoding of the same prompt. The rules that engines run do not adapt.
    """

    def __init__(self, servers: EngineServers, bench: Bench, target: Target) -> None:
        super().__init__(bench.baseline, engine_judge(lambda: target, replace(bench.baseline, continuations=())))
        self._servers = servers

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

    def side_by_side(
        self, candidates: Sequence[Candidate], indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> list[Measurement]:
        """Measure candidates one after another: servers of all at once would need the memory of as many models."""
        return [self.measure(each, indices, on_sample) for each in candidates]

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate."""
        return candidate
