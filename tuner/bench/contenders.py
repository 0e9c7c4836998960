"""Contenders of a bench by name: our own loops, and the alternatives that transformers offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from decoding.decoder import plain_decoder
from decoding.documents.strict_yaml import suggest
from decoding.profile import Decoding, DraftProfile
from decoding.runners import RUNNERS, bit_exact_runners, has_bit_exact_mode
from tuner.config import EXACT_WIDTH
from tuner.errors import ConfigError
from tuner.fields import BITWISE
from tuner.measuring.contender import PLAIN, PROFILE, Contender, reason_of
from tuner.measuring.generation import (
    ONE_SEQUENCE,
    StockGeneration,
    stock_generate,
    stock_prompt_lookup,
)
from tuner.measuring.paired import OwnDecoding

if TYPE_CHECKING:
    from tuner.bench.task import BenchTask

ALWAYS = (PROFILE, PLAIN)
"""The contender under test and the reference of all speed-ups: both take part in every bench."""
MODES = (*RUNNERS, BITWISE)
"""The modes in which a bench decodes a profile: each runner, and bit-exact."""


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


def _ours(name: str, task: BenchTask) -> Contender:
    """Return the profile or plain decoding, in a mode that the name ends with, or in the profile's own."""
    who, _, mode = name.partition("-")
    decoder, profile = (task.in_mode(mode), profile_by(mode, task.profile)) if mode else (task.decoder, task.profile)
    exact_width = decoder.target.runner.exact_width
    if not mode:
        how = "the whole model, token by token" if who == PLAIN else profile.draft.describe()
        how += f"; {profile.draft_length.describe()}" if who == PROFILE and profile.draft.drafts else ""
    elif exact_width is None:
        how = f"by the {decoder.target.runner.name} runner"
    else:
        how = f"in bit-exact mode: every pass of the whole model runs on {exact_width} positions"
    if who == PLAIN:
        return OwnDecoding(
            name, plain_decoder(decoder.target), task.eos_token_ids, description=f"our own loop without drafts: {how}"
        )
    settings = profile.model_dump(mode="json", include={"draft", "draft_length", "decoding"})
    history = profile.decoding.history
    return OwnDecoding(name, decoder, task.eos_token_ids, description=how, settings=settings, history=history)


def _stock_static(name: str, task: BenchTask) -> Contender:
    # One size for all prompts: transformers would otherwise compile again for each prompt longer than the ones before.
    positions = max(len(prompt.token_ids) for prompt in task.measured) + task.max_new_tokens
    compiled = "compiled by transformers" if task.target.device.type == "cuda" else "not compiled on this device"
    return StockGeneration(
        name,
        task.loaded.model,
        task.eos_token_ids,
        f'generate(cache_implementation="static"), {compiled}; {positions} positions for every prompt',
        {"cache_implementation": "static", "max_cache_len": positions},
    )


Factory = Callable[[str, "BenchTask"], Contender]
"""Builds the contender of a name; may raise anything on an unsuitable model or device."""

CONTENDERS: dict[str, Factory] = {
    PROFILE: _ours,
    PLAIN: _ours,
    **{f"{who}-{mode}": _ours for mode in MODES for who in (PLAIN, PROFILE)},
    "hf": lambda name, task: stock_generate(name, task.loaded.model, task.eos_token_ids),
    "hf-prompt-lookup": lambda name, task: stock_prompt_lookup(name, task.loaded.model, task.eos_token_ids),
    "hf-static": _stock_static,
}
ONE_TEXT_ONLY: Mapping[str, str] = {
    "hf-prompt-lookup": ONE_SEQUENCE,
    **{f"{who}-{BITWISE}": "bit-exact mode decodes one sequence at a time" for who in ALWAYS},
}
"""Contenders that cannot decode batches, with the reasons."""


def default_names(device: torch.device) -> tuple[str, ...]:
    """Return the default contenders: what transformers offers, but a static cache only where transformers compiles for it."""
    stock = tuple(name for name in CONTENDERS if name.startswith("hf"))
    return (*ALWAYS, *(name for name in stock if name != "hf-static" or device.type == "cuda"))


def check_names(names: Sequence[str], batch_size: int) -> tuple[str, ...]:
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


def enter(task: BenchTask) -> tuple[list[Contender], dict[str, str]]:
    """Build the contenders; return them, and the ones that fail with the reasons. Errors of mandatory ones are raised."""
    contenders: list[Contender] = []
    left_out: dict[str, str] = {}
    for name in task.names:
        try:
            contenders.append(CONTENDERS[name](name, task))
        except Exception as cause:  # code of others on a model of any family may fail in any way: the reason is shown
            if name in ALWAYS:
                raise
            left_out[name] = reason_of(cause)
    return contenders, left_out
