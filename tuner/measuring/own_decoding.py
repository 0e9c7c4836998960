"""Our own loops as contenders: a draft or plain decoding, by any runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation import TemperatureLogitsWarper, TopPLogitsWarper

from decoding.acceptance import Greedy, Sampling
from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.rounds import Prefill
from decoding.text import Ending, LogitsProcessor, Shaping
from tuner.measuring.clock import Clock, WallClock
from tuner.measuring.contender import PLAIN, Decoded, Prompts, Recorder
from tuner.measuring.machine import seconds_waited


@dataclass(frozen=True)
class SamplingSettings:
    """How requests are sampled: temperature and nucleus as in `generate`, every sequence with the same seed."""

    temperature: float
    top_p: float = 1.0
    seed: int = 0

    def acceptance(self, device: torch.device) -> Sampling:
        """Return the choice of tokens, with a fresh generator."""
        return Sampling(torch.Generator(device).manual_seed(self.seed))

    def requests(self, greedy: Sequence[Request], device: torch.device) -> list[Request]:
        """Return the requests, sampled."""
        processors: list[LogitsProcessor] = [TemperatureLogitsWarper(self.temperature)]
        if self.top_p < 1.0:
            processors.append(TopPLogitsWarper(self.top_p))
        shaping = Shaping(processors)
        return [replace(each, acceptance=self.acceptance(device), shaping=shaping) for each in greedy]


class OwnDecoding:
    """A decoder with our own loop and cache; see `Contender`.

    The baseline, named `PLAIN`, is not compared with itself, and by a clock that repeats exactly it decodes a batch only once.
    """

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        eos_token_ids: frozenset[int],
        *,
        description: str = "",
        settings: Mapping[str, Any] | None = None,
        sampling: SamplingSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Decode greedily unless `sampling` is given; `clock` is real time unless given."""
        self.name, self.description, self.settings = name, description, settings or {}
        self.decoder = decoder
        self._eos, self._sampling = eos_token_ids, sampling
        self._clock = clock or WallClock(decoder.target.device)
        self._known: dict[tuple[object, int], Decoded] = {}

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        """See `Contender.prepare`: every shape of pass that the batches may need runs once."""
        lengths = [len(prompt) for batch in batches for prompt in batch]
        for num_sequences in {len(batch) for batch in batches}:
            self.decoder.prepare(min(lengths), max(lengths) + max_new_tokens, num_sequences)

    def decode(self, prompts: Prompts, max_new_tokens: int) -> Decoded:
        """See `Contender.decode`. A sampled run is followed by a greedy one, which is not timed."""
        if self.name != PLAIN or not self._clock.is_deterministic:
            return self._decode(prompts, max_new_tokens)
        key = tuple(map(tuple, prompts)), max_new_tokens
        if key not in self._known:
            self._known[key] = self._decode(prompts, max_new_tokens)
        return self._known[key]

    def _decode(self, prompts: Prompts, max_new_tokens: int) -> Decoded:
        ending = Ending(max_new_tokens, self._eos)
        greedy = requests = [Request(prompt, ending, Greedy()) for prompt in prompts]
        if self._sampling is not None:
            requests = self._sampling.requests(greedy, self.decoder.target.device)
        before = seconds_waited()
        recorder = Recorder(self._clock.start(self.decoder.draft), num_sequences=len(requests))
        for sequence, step in self.decoder.batch_steps(requests):
            if isinstance(step, Prefill):
                recorder.put((step.token,), sequence)
            else:
                recorder.put(step.tokens, sequence, step)
        found = recorder.decoded()
        if self._clock.is_deterministic:  # prices know whole rounds only, and no waiting is charged
            found = replace(found, drafting_seconds=None, waited_seconds=0.0)
        elif before is not None:
            found = replace(found, waited_seconds=max(0.0, (seconds_waited() or 0.0) - before))
        if self._sampling is not None and self.name != PLAIN:  # two sampled sequences cannot be compared
            texts = tuple(each.tokens for each in self.decoder.generate_batch(greedy).generations)
            found = replace(found, texts=texts)
        return found
