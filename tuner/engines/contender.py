"""A running engine as a contender: one request at a time by its own clock, or several side by side by this process's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from decoding.losslessness import Comparison, compare
from tuner.engines.contract import completed
from tuner.measuring.contender import PLAIN, Decoded, Prompts

if TYPE_CHECKING:
    from decoding.target import Target
    from tuner.engines.contract import EngineProgram
    from tuner.engines.loopback import Client
    from tuner.measuring.baseline import Baseline
    from tuner.measuring.turns import Judge, Texts


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
    clock: Callable[[], float] = time.perf_counter

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
            began = self.clock()
            asked = [threads.submit(program.continuation, client, prompt, max_new_tokens) for prompt in prompts]
            texts = tuple(each.result() for each in asked)
            seconds = self.clock() - began
        after = program.counters_after(client, before, len(prompts))
        return completed(texts, None, seconds, program.counts(after) - program.counts(before))


def engine_judge(target: Target, baseline: Baseline) -> Judge:
    """Return the comparison with the engine's own plain decoding: at the same moment, or of the prompt alone.

    Continuations of the baseline are those of each prompt alone: a batch may round otherwise than one row, which is no fault of
    the draft. Without any, the text of the same turn is all that there is.
    """

    def judge(name: str, row: int, texts: Texts) -> Comparison:
        if name != PLAIN and texts[name] == texts[PLAIN]:
            return Comparison(identical=True)
        reference = baseline.continuations[row] if baseline.continuations else texts[PLAIN]
        return compare(target, baseline.prompts[row], reference, texts[name])

    return judge
