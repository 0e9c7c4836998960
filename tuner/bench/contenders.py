"""Contenders of a bench by name: our own loops, and the alternatives that transformers offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from decoding.decoder import Decoder, plain_decoder
from decoding.documents.strict_yaml import suggest
from decoding.profile import DraftProfile
from decoding.target import Target
from tuner.bench.modes import MODES, profile_by
from tuner.errors import ConfigError
from tuner.fields import BITWISE
from tuner.measuring.contender import PLAIN, Contender, reason_of
from tuner.measuring.generation import (
    ONE_SEQUENCE,
    StockGeneration,
    fastest_exit,
    stock_generate,
    stock_prompt_lookup,
)
from tuner.measuring.own_decoding import OwnDecoding

PROFILE = "profile"
ALWAYS = (PROFILE, PLAIN)
"""The contender under test and the reference of all speed-ups: both take part in every bench."""


@dataclass(frozen=True)
class Setting:
    """Everything a contender may be built from."""

    profile: DraftProfile
    decoder: Decoder
    """The profile on the model, as deployed."""
    eos_token_ids: frozenset[int]
    tuning_prompts: tuple[tuple[int, ...], ...]
    """Token ids of prompts for choices; none of them is measured."""
    max_new_tokens: int
    longest_prompt: int
    """Length of the longest measured prompt, in tokens."""
    in_mode: Callable[[str], Decoder]
    """Returns the profile's decoder in one of `tuner.bench.modes.MODES`, built on first use."""
    on_text: Callable[[], None] = lambda: None
    """Called after each prompt that is decoded for a choice."""

    @property
    def target(self) -> Target:
        """The model that all contenders run."""
        return self.decoder.target


@dataclass(frozen=True)
class _Own:
    """Factory of the profile or plain decoding with a given runner, in place of the profile's own."""

    mode: str
    is_plain: bool

    def __call__(self, name: str, setting: Setting) -> Contender:
        decoder, eos = setting.in_mode(self.mode), setting.eos_token_ids
        if self.is_plain:
            return OwnDecoding(name, plain_decoder(decoder.target), eos, description=f"plain, {self._how(decoder)}")
        settings = {"decoding": profile_by(self.mode, setting.profile).decoding.model_dump(mode="json")}
        return OwnDecoding(name, decoder, eos, description=f"profile, {self._how(decoder)}", settings=settings)

    def _how(self, decoder: Decoder) -> str:
        exact_width = decoder.target.runner.exact_width
        if exact_width is None:
            return f"by the {decoder.target.runner.name} runner"
        return f"in bit-exact mode: every pass of the whole model runs on {exact_width} positions"


def _profile(name: str, setting: Setting) -> Contender:
    profile = setting.profile
    rule = f"; {profile.draft_length.describe()}" if profile.draft.drafts else ""
    settings = profile.model_dump(mode="json", include={"draft", "draft_length", "decoding"})
    described = f"{profile.draft.describe()}{rule}"
    return OwnDecoding(name, setting.decoder, setting.eos_token_ids, description=described, settings=settings)


def _plain(name: str, setting: Setting) -> Contender:
    description = "our own loop without drafts: the whole model, token by token"
    return OwnDecoding(name, plain_decoder(setting.target), setting.eos_token_ids, description=description)


def _stock(name: str, setting: Setting) -> Contender:
    return stock_generate(name, setting.target.model, setting.eos_token_ids)


def _stock_early_exit(name: str, setting: Setting) -> Contender:
    return fastest_exit(
        name,
        setting.target.model,
        setting.eos_token_ids,
        setting.tuning_prompts,
        num_layers=setting.target.num_layers,
        max_new_tokens=setting.max_new_tokens,
        on_text=setting.on_text,
    )


def _stock_prompt_lookup(name: str, setting: Setting) -> Contender:
    return stock_prompt_lookup(name, setting.target.model, setting.eos_token_ids)


def _stock_static(name: str, setting: Setting) -> Contender:
    # One size for all prompts: transformers would otherwise compile again for each prompt longer than the ones before.
    positions = setting.longest_prompt + setting.max_new_tokens
    compiled = "compiled by transformers" if setting.target.device.type == "cuda" else "not compiled on this device"
    return StockGeneration(
        name,
        setting.target.model,
        setting.eos_token_ids,
        f'generate(cache_implementation="static"), {compiled}; {positions} positions for every prompt',
        {"cache_implementation": "static", "max_cache_len": positions},
    )


Factory = Callable[[str, Setting], Contender]
"""Builds the contender of a name; may raise anything on an unsuitable model or device."""

CONTENDERS: dict[str, Factory] = {
    PROFILE: _profile,
    PLAIN: _plain,
    **{f"{who}-{mode}": _Own(mode, who == PLAIN) for mode in MODES for who in (PLAIN, PROFILE)},
    "hf": _stock,
    "hf-early-exit": _stock_early_exit,
    "hf-prompt-lookup": _stock_prompt_lookup,
    "hf-static": _stock_static,
}

_BIT_EXACT = "bit-exact mode decodes one sequence at a time"
ONE_TEXT_ONLY: Mapping[str, str] = {
    "hf-early-exit": ONE_SEQUENCE,
    "hf-prompt-lookup": ONE_SEQUENCE,
    **{f"{who}-bitwise": _BIT_EXACT for who in ALWAYS},
}
"""Contenders that cannot decode batches, with the reasons."""


def default_names(device: torch.device) -> tuple[str, ...]:
    """Return the default contenders: what transformers offers, but a static cache only where transformers compiles for it."""
    stock = tuple(name for name in CONTENDERS if name.startswith("hf"))
    return (*ALWAYS, *(name for name in stock if name != "hf-static" or device.type == "cuda"))


def check_names(names: Sequence[str], batch_size: int = 1) -> tuple[str, ...]:
    """Return `names` with the contenders that they need: the mandatory ones first, then references of comparisons.

    Raises ConfigError for an unknown name, and for a contender that cannot decode batches if `batch_size` is above 1.
    """
    for name in names:
        if name not in CONTENDERS:
            raise ConfigError(f"unknown contender {name!r}; {suggest(name, CONTENDERS)}")
        if batch_size > 1 and name in ONE_TEXT_ONLY:
            raise ConfigError(f"{name} does not work with --batch-size {batch_size}: {ONE_TEXT_ONLY[name]}")
    needed = [f"{PLAIN}-{BITWISE}" for name in names if name == f"{PROFILE}-{BITWISE}"]
    return tuple(dict.fromkeys([*ALWAYS, *needed, *names]))


def side_by_side(names: Sequence[str], batch_size: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the contenders of `names` that can decode batches of `batch_size`, and the others with the reasons."""
    left_out = {name: ONE_TEXT_ONLY[name] for name in names if batch_size > 1 and name in ONE_TEXT_ONLY}
    return tuple(name for name in names if name not in left_out), left_out


def enter(names: Sequence[str], setting: Setting) -> tuple[list[Contender], dict[str, str]]:
    """Build the contenders; return them, and the ones that fail with the reasons. Errors of mandatory ones are raised."""
    contenders: list[Contender] = []
    left_out: dict[str, str] = {}
    for name in names:
        try:
            contenders.append(CONTENDERS[name](name, setting))
        except Exception as cause:  # code of others on a model of any family may fail in any way: the reason is shown
            if name in ALWAYS:
                raise
            left_out[name] = reason_of(cause)
    return contenders, left_out
