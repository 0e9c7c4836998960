"""Our own loops as contenders: the profile or plain decoding, with the profile's runner or another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.profile import Decoding, DraftProfile
from decoding.runners import RUNNERS, bit_exact_runners, has_bit_exact_mode
from decoding.text import Ending
from tuner.bench.contest import Prompts
from tuner.config import EXACT_WIDTH
from tuner.fields import BITWISE
from tuner.measuring.recording import Recorder, record_decoding

MODES = (*RUNNERS, BITWISE)


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


def profile_by(mode: str, profile: DraftProfile) -> DraftProfile:
    """Return the profile in one of `MODES`: a runner by name, or bit-exact at the profile's width if it has one."""
    decoding = profile.decoding
    if mode == BITWISE:
        runner = decoding.runner if has_bit_exact_mode(decoding.runner) else bit_exact_runners()[0]
        changes: dict[str, Any] = {"runner": runner, "exact_width": decoding.exact_width or EXACT_WIDTH}
    else:
        changes = {"runner": mode, "exact_width": None}
    changed = Decoding.model_validate({**decoding.model_dump(), **changes})
    return profile.model_copy(update={"decoding": changed})
