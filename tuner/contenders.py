"""Who can be put beside a profile: our own loops, and what a user of transformers would take instead. A plain dict names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.documents import suggest
from decoding.profile import DraftProfile, PlainDecoding
from decoding.rounds import Prefill
from decoding.target import Target
from decoding.text import Ending
from tuner.contest import Contender, Stopwatch, reason_of
from tuner.errors import ConfigError
from tuner.stock_generation import LOOKUP_TOKENS, StockGeneration, fastest_exit

PROFILE, PLAIN = "profile", "plain"
ALWAYS = (PROFILE, PLAIN)
"""What is compared, and the reference of all speed-ups: without them there is nothing to say."""


@dataclass(frozen=True)
class Setting:
    """All that a contender may be made of."""

    profile: DraftProfile
    decoder: Decoder
    """The profile on the model, as deployed."""
    eos_token_ids: frozenset[int]
    tuning_prompts: tuple[tuple[int, ...], ...]
    """To choose by; none of them is measured."""
    max_new_tokens: int
    longest_prompt: int
    """Tokens of the longest prompt that will be measured."""
    on_text: Callable[[], None] = lambda: None
    """Called for each text that is written in choosing."""

    @property
    def target(self) -> Target:
        """The model that all of them run."""
        return self.decoder.target


class OwnDecoding:
    """A decoder of ours, with our own loop and cache."""

    def __init__(
        self, decoder: Decoder, eos_token_ids: frozenset[int], description: str, settings: Mapping[str, Any]
    ) -> None:
        self._decoder = decoder
        self._eos = eos_token_ids
        self._description = description
        self.settings = settings

    def describe(self) -> str:
        """What it is, for the table."""
        return self._description

    def write(self, prompt: Sequence[int], max_new_tokens: int, watch: Stopwatch) -> None:
        """See `Contender.write`."""
        for step in self._decoder.steps(Request(prompt, Ending(max_new_tokens, self._eos))):
            watch.put((step.token,) if isinstance(step, Prefill) else step.tokens)


def _profile(setting: Setting) -> Contender:
    profile = setting.profile
    rule = "" if isinstance(profile.draft, PlainDecoding) else f"; {profile.draft_length.describe()}"
    settings = profile.model_dump(mode="json", include={"draft", "draft_length", "decoding"})
    return OwnDecoding(setting.decoder, setting.eos_token_ids, f"{profile.draft.describe()}{rule}", settings)


def _plain(setting: Setting) -> Contender:
    description = "our own loop without drafts: the whole model, token by token"
    return OwnDecoding(plain_decoder(setting.target), setting.eos_token_ids, description, {})


def _stock(setting: Setting) -> Contender:
    return StockGeneration(
        setting.target.model, setting.eos_token_ids, "transformers' generate, greedy, with its default (dynamic) cache"
    )


def _stock_early_exit(setting: Setting) -> Contender:
    return fastest_exit(
        setting.target.model,
        setting.eos_token_ids,
        setting.tuning_prompts,
        num_layers=setting.target.num_layers,
        max_new_tokens=setting.max_new_tokens,
        on_text=setting.on_text,
    )


def _stock_prompt_lookup(setting: Setting) -> Contender:
    model = setting.target.model
    longest = getattr(model.generation_config, "max_matching_ngram_size", None)
    ngrams = f"n-grams of up to {longest}" if longest else "n-grams as by default"
    description = f"generate(prompt_lookup_num_tokens={LOOKUP_TOKENS}), {ngrams}"
    return StockGeneration(model, setting.eos_token_ids, description, {"prompt_lookup_num_tokens": LOOKUP_TOKENS})


def _stock_static(setting: Setting) -> Contender:
    # Of one size for all prompts: transformers would otherwise compile anew for each that is longer than those before.
    positions = setting.longest_prompt + setting.max_new_tokens
    compiled = "compiled by transformers" if setting.target.device.type == "cuda" else "not compiled on this device"
    return StockGeneration(
        setting.target.model,
        setting.eos_token_ids,
        f'generate(cache_implementation="static"), {compiled}; {positions} positions for every prompt',
        {"cache_implementation": "static", "max_cache_len": positions},
    )


Factory = Callable[[Setting], Contender]
"""Makes a contender; may raise anything where the model or device does not do."""

CONTENDERS: dict[str, Factory] = {
    PROFILE: _profile,
    PLAIN: _plain,
    "hf": _stock,
    "hf-early-exit": _stock_early_exit,
    "hf-prompt-lookup": _stock_prompt_lookup,
    "hf-static": _stock_static,
}


def default_names(device: torch.device) -> tuple[str, ...]:
    """Whom to compare with if nothing is asked: all, but a static cache only where transformers compiles for it."""
    return tuple(name for name in CONTENDERS if name != "hf-static" or device.type == "cuda")


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names asked for, those that are always there first; `ConfigError` for an unknown one."""
    for name in names:
        if name not in CONTENDERS:
            raise ConfigError(f"unknown contender {name!r}; {suggest(name, CONTENDERS)}")
    return tuple(dict.fromkeys([*ALWAYS, *names]))


def enter(names: Sequence[str], setting: Setting) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders of these names, and the reasons of those that cannot be had here; what must be there raises."""
    contenders: dict[str, Contender] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            contenders[name] = CONTENDERS[name](setting)
        except Exception as cause:  # code of others on a model of any family may fail in any way: the reason is shown
            if name in ALWAYS:
                raise
            left_out[name] = reason_of(cause)
    return contenders, left_out
