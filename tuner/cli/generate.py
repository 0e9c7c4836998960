"""`sdtune generate`: one prompt, continued with a profile. The text goes to stdout, rates and a comparison to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from pydantic import Field
from rich.console import Console

from tuner.cli.options import GroupedCommand, keys_of, options_of, settings_from
from tuner.cli.terminal import check_names, use_threads
from tuner.fields import DECODING, PROBLEM, ChatTemplate, ProfileSettings, Seed, SystemPrompt

if TYPE_CHECKING:
    from decoding.decode import Request
    from decoding.rounds import Generation, Prefill, Round
    from decoding.target import Target
    from decoding.text import Ending


class GenerateSettings(ProfileSettings):
    prompt: str = Field(min_length=1, description="Text to continue.", json_schema_extra=PROBLEM)
    max_new_tokens: int = Field(128, ge=1, le=2**20, description="Most tokens to generate.", json_schema_extra=PROBLEM)
    chat_template: ChatTemplate = True
    system_prompt: SystemPrompt = None
    temperature: float | None = Field(
        None,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="Sampling temperature; 0 is greedy; default: the profile's.",
        json_schema_extra=DECODING,
    )
    seed: Seed = 0
    compare: bool = Field(
        False,
        description="Also decode plainly; print both rates and whether the tokens are equal.",
        json_schema_extra=DECODING,
    )


@click.command(cls=GroupedCommand)
@keys_of(GenerateSettings)
@options_of(
    GenerateSettings,
    only=[name for name in GenerateSettings.model_fields if name != "chat_template"],
    positions=("profile",),
)
def generate(**flags: Any) -> None:
    """Continue a prompt with a profile. The text streams to stdout, the rates go to stderr."""
    settings = settings_from(GenerateSettings, flags)
    check_names(profile=settings.profile, model=settings.model)

    use_threads(settings.threads)
    _stream(settings)


def _stream(settings: GenerateSettings) -> None:
    from decoding.decoder import plain_decoder
    from decoding.deploy import load_decoder
    from decoding.profile import DraftProfile
    from decoding.text import Ending
    from tuner.inputs.encoding import encode_prompt
    from tuner.inputs.models import eos_token_ids, load_target

    profile = DraftProfile.load(settings.profile)
    deployed = load_decoder(profile, folder=settings.profile.parent)
    loaded = load_target(profile, settings)
    decoder = deployed.decoder_for(loaded.model)
    temperature = profile.decoding.temperature if settings.temperature is None else settings.temperature
    ids = encode_prompt(
        settings.prompt, loaded.tokenizer, chat_template=settings.chat_template, system_prompt=settings.system_prompt
    )
    ending = Ending(settings.max_new_tokens, eos_token_ids(loaded.model))

    def request() -> Request:
        return _request(ids, ending, temperature, settings.seed, decoder.target)

    drafted = _print(decoder.steps(request()), loaded.tokenizer)
    messages = Console(stderr=True, highlight=False)
    messages.print(f"profile  {_rate(drafted)}, {_drafting(drafted)}")
    if settings.compare:
        plain = plain_decoder(decoder.target).generate(request())
        messages.print(f"plain    {_rate(plain)}")
        if plain.num_decoded and drafted.num_decoded:
            messages.print(
                f"speed-up {_speedup(plain, drafted):.2f} of decoding this prompt, once (sdtune bench measures)"
            )
        messages.print(_verdict(decoder.target, ids, plain, drafted, temperature))


def _request(prompt: list[int], ending: Ending, temperature: float, seed: int, target: Target) -> Request:
    import torch
    from transformers.generation import TemperatureLogitsWarper

    from decoding.acceptance import Greedy, Sampling
    from decoding.decode import Request
    from decoding.text import Shaping

    if temperature == 0:
        return Request(prompt, ending, Greedy())
    generator = torch.Generator(target.device).manual_seed(seed)
    return Request(prompt, ending, Sampling(generator), Shaping((TemperatureLogitsWarper(temperature),)))


def _print(steps: Iterator[Prefill | Round], tokenizer: Any) -> Generation:
    """Print the text round by round, whole words at a time."""
    import torch
    from transformers import TextStreamer

    from decoding.rounds import Generation, Prefill

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
    return f"{rate:.1f} tokens/s over {generation.num_decoded} tokens (after a prefill of {generation.prefill.seconds:.2f} s)"


def _speedup(plain: Generation, drafted: Generation) -> float:
    return (plain.decode_seconds / plain.num_decoded) / (drafted.decode_seconds / drafted.num_decoded)


def _drafting(generation: Generation) -> str:
    if not generation.num_drafted:
        return "nothing drafted"
    share = generation.num_accepted / generation.num_drafted
    per_round = generation.num_decoded / len(generation.rounds)
    return f"{share:.0%} of {generation.num_drafted} drafts accepted, {per_round:.2f} tokens per round"


def _verdict(target: Target, prompt: list[int], plain: Generation, drafted: Generation, temperature: float) -> str:
    if temperature > 0:
        return (
            "tokens   sampled: both texts follow one distribution, with different tokens (compare at --temperature 0)"
        )

    from decoding.losslessness import compare

    comparison = compare(target, prompt, plain.tokens, drafted.tokens)
    if comparison.identical:
        return f"tokens   identical ({len(plain.tokens)})"
    what = "a numerical tie" if comparison.tie else "NOT a tie: please report this"
    return f"tokens   differ from token {comparison.first_difference}, {what}"
