"""Measures candidates by real decoding, each prompt paired with plain decoding of the same prompt in the same process.

Only `Bench` looks at a clock's results; it decides nothing. Warm-up, interleaving and the comparison of tokens are here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.generation import TemperatureLogitsWarper

from decoding.acceptance import Greedy, Sampling
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.exactness import compare
from decoding.rounds import Generation
from decoding.target import Target
from decoding.text import Ending, Shaping
from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample
from tuner.errors import DatasetError

WARM_UP_TOKENS = 8
FEWEST_DECODED = 8  # a text that ends sooner says nothing about the rate of decoding

OnSample = Callable[[PromptSample], None]


class Bench:
    """A target, some prompts, and plain decoding's text of each.

    Every candidate is compared with plain decoding token by token; when sampling, by a greedy run of both on the side, as
    two sampled texts cannot be compared.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        eos_token_ids: frozenset[int] = frozenset(),
        prefix_reuse: bool = True,
        seed: int = 0,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.target = target
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self._eos = eos_token_ids
        self._prefix_reuse = prefix_reuse
        self._seed = seed
        self._plain = plain_decoder(target)
        self.prompts: list[tuple[int, ...]] = []
        self.greedy_texts: list[tuple[int, ...]] = []
        for prompt in prompts:
            text = self._plain.generate(self._request(prompt, greedy=True))
            on_progress()
            if text.num_decoded >= FEWEST_DECODED:
                self.prompts.append(tuple(prompt))
                self.greedy_texts.append(text.tokens)
        self.num_too_short = len(prompts) - len(self.prompts)
        if len(self.prompts) < 2:
            raise DatasetError(
                f"{self.num_too_short} of {len(prompts)} prompts end within {FEWEST_DECODED} tokens of plain decoding: give "
                "prompts that the model continues at greater length"
            )

    def measure(
        self, candidate: Candidate, places: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Decode the prompts at `places` with the candidate and plainly, in turn; `on_sample` sees each and may raise to stop."""
        decoder = self._decoder(candidate)
        samples = []
        with _undisturbed():
            self._warm_up(decoder, places[0])
            for turn, place in enumerate(places):
                samples.append(self._sample(decoder, place, plain_first=turn % 2 == 0))
                on_sample(samples[-1])
        return Measurement(samples=tuple(samples))

    def _decoder(self, candidate: Candidate) -> Decoder:
        return Decoder(self.target, candidate.draft, candidate.draft_length, prefix_reuse=self._prefix_reuse)

    def _warm_up(self, decoder: Decoder, place: int) -> None:
        for each in (self._plain, decoder):
            each.generate(self._request(self.prompts[place], greedy=True, max_new_tokens=WARM_UP_TOKENS))

    def _sample(self, decoder: Decoder, place: int, *, plain_first: bool) -> PromptSample:
        order = (self._plain, decoder) if plain_first else (decoder, self._plain)
        done = {each: self._timed(each, place) for each in order}
        plain, drafted = done[self._plain], done[decoder]
        comparison = compare(
            self.target, self.prompts[place], self.greedy_texts[place], self._greedy_tokens(decoder, place, drafted)
        )
        return PromptSample(
            prompt=place,
            plain_seconds=plain.decode_seconds,
            plain_tokens=plain.num_decoded,
            draft_seconds=drafted.decode_seconds,
            draft_tokens=drafted.num_decoded,
            rounds=len(drafted.rounds),
            drafted=drafted.num_drafted,
            accepted=drafted.num_accepted,
            identical=comparison.identical,
            tie=comparison.tie,
        )

    def _timed(self, decoder: Decoder, place: int) -> Generation:
        """A generation whose times are whole: every round ends by reading its tokens, so no work is left on the device."""
        _synchronize(self.target.device)
        return decoder.generate(self._request(self.prompts[place]))

    def _greedy_tokens(self, decoder: Decoder, place: int, drafted: Generation) -> tuple[int, ...]:
        if self.temperature == 0:
            return drafted.tokens
        return decoder.generate(self._request(self.prompts[place], greedy=True)).tokens

    def _request(self, prompt: Sequence[int], *, greedy: bool = False, max_new_tokens: int | None = None) -> Request:
        ending = Ending(max_new_tokens or self.max_new_tokens, self._eos)
        if greedy or self.temperature == 0:
            return Request(prompt, ending, Greedy())
        generator = torch.Generator(self.target.device).manual_seed(self._seed)
        return Request(prompt, ending, Sampling(generator), Shaping((TemperatureLogitsWarper(self.temperature),)))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection in the middle of a measurement."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
