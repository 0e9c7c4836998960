"""Our own loops as contenders: a draft or plain decoding, by any runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.text import Ending
from tuner.contest.contest import Prompts
from tuner.measuring.recording import Recorder, record_decoding


class OwnDecoding:
    """A decoder with our own loop and cache.

    `same_as` names the contender whose tokens it must write; None is plain decoding.
    """

    def __init__(
        self,
        decoder: Decoder,
        eos_token_ids: frozenset[int],
        description: str,
        settings: Mapping[str, Any],
        *,
        same_as: str | None = None,
    ) -> None:
        self._decoder = decoder
        self._eos = eos_token_ids
        self._description = description
        self.settings = settings
        self.same_as = same_as

    def describe(self) -> str:
        """See `Contender.describe`."""
        return self._description

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        """See `Contender.prepare`: every shape of pass that the batches may need runs once."""
        lengths = [len(prompt) for batch in batches for prompt in batch]
        for num_sequences in {len(batch) for batch in batches}:
            self._decoder.prepare(min(lengths), max(lengths) + max_new_tokens, num_sequences)

    def write(self, prompts: Prompts, max_new_tokens: int, recorder: Recorder) -> None:
        """See `Contender.write`."""
        requests = [Request(prompt, Ending(max_new_tokens, self._eos)) for prompt in prompts]
        record_decoding(self._decoder, requests, recorder)
