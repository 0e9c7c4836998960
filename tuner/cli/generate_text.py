"""`sdtune generate`: continue one prompt with a profile, as text arrives, and compare with plain decoding if asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TextStreamer
from transformers.generation import TemperatureLogitsWarper

from decoding.acceptance import Greedy, Sampling
from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.deploy import load_decoder
from decoding.losslessness import compare as compare_texts
from decoding.profile import DraftProfile
from decoding.rounds import Generation, Prefill, Round
from decoding.target import Target
from decoding.text import Ending, Shaping
from tuner.inputs.models import eos_token_ids, load
from tuner.inputs.prompts import encode_prompt


def generate(
    profile_path: Path,
    prompt: str,
    *,
    model: str | None,
    max_new_tokens: int,
    temperature: float | None,
    seed: int,
    chat_template: bool,
    dtype: str | None,
    device: str,
    compare: bool,
) -> None:
    """Stream the continuation to stdout and the rates to stderr.

    Raises `ProfileError`, `ExitHeadError`, `ConfigError` or `TargetMismatchError` for a profile, head or model that does not do.
    """
    profile = DraftProfile.load(profile_path)
    deployed = load_decoder(profile, folder=profile_path.parent)
    loaded = load(
        model or profile.target.model,
        revision=profile.target.revision,
        dtype=dtype or profile.target.dtype,
        device=device,
    )
    decoder = deployed.decoder_for(loaded.model)
    chosen_temperature = profile.decoding.temperature if temperature is None else temperature
    ids = encode_prompt(prompt, loaded.tokenizer, chat_template=chat_template)
    ending = Ending(max_new_tokens, eos_token_ids(loaded.model))

    def request() -> Request:
        return _request(ids, ending, chosen_temperature, seed, decoder.target.device)

    drafted = _stream(decoder.steps(request()), loaded.tokenizer)
    messages = Console(stderr=True, highlight=False)
    messages.print(f"profile  {_rate(drafted)}, {_drafting(drafted)}")
    if compare:
        plain = plain_decoder(decoder.target).generate(request())
        messages.print(f"plain    {_rate(plain)}")
        messages.print(_verdict(decoder.target, ids, plain, drafted, chosen_temperature))


def _request(prompt: list[int], ending: Ending, temperature: float, seed: int, device: torch.device) -> Request:
    if temperature == 0:
        return Request(prompt, ending, Greedy())
    generator = torch.Generator(device).manual_seed(seed)
    return Request(prompt, ending, Sampling(generator), Shaping((TemperatureLogitsWarper(temperature),)))


def _stream(steps: Iterator[Prefill | Round], tokenizer: Any) -> Generation:
    """Print the text as its rounds come in, whole words at a time."""
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    done = []
    for step in steps:
        done.append(step)
        streamer.put(torch.tensor([step.token] if isinstance(step, Prefill) else step.tokens))
    streamer.end()
    return Generation.collect(done)


def _rate(generation: Generation) -> str:
    if not generation.num_decoded:
        return "1 token, from the prefill alone"
    rate = generation.num_decoded / generation.decode_seconds
    return (
        f"{rate:.1f} tokens/s over {generation.num_decoded} tokens (prefill {generation.prefill.seconds:.2f} s apart)"
    )


def _drafting(generation: Generation) -> str:
    if not generation.num_drafted:
        return "nothing drafted"
    share = generation.num_accepted / generation.num_drafted
    per_round = generation.num_decoded / len(generation.rounds)
    return f"{share:.0%} of {generation.num_drafted} drafts accepted, {per_round:.2f} tokens a round"


def _verdict(target: Target, prompt: list[int], plain: Generation, drafted: Generation, temperature: float) -> str:
    if temperature > 0:
        return "tokens   sampled: the two texts share a distribution, not their tokens (compare at --temperature 0)"
    comparison = compare_texts(target, prompt, plain.tokens, drafted.tokens)
    if comparison.identical:
        return f"tokens   identical ({len(plain.tokens)})"
    what = "a numerical tie" if comparison.tie else "NOT a tie: please report this"
    return f"tokens   differ from token {comparison.first_difference} on, {what}"
