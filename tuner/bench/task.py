"""Inputs of `sdtune bench`, loaded and checked: a profile on its model, held-out prompts, and tuning prompts for choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decoding.decoder import Decoder
from decoding.deploy import load_decoder
from decoding.head_folder import refuse_if_trained_on
from decoding.profile import DraftProfile
from decoding.target import Target
from tuner.bench.config import BenchConfig
from tuner.bench.contenders import check_names, default_names, side_by_side
from tuner.bench.modes import profile_by
from tuner.errors import ConfigError
from tuner.inputs.held_out import find_prompts
from tuner.inputs.models import Loaded, eos_token_ids, load, resolve_device
from tuner.inputs.prompts import Prompt
from tuner.measuring.contender import Prompts
from tuner.progress import Progress

USUAL_NEW_TOKENS = 64
CHOOSING_PROMPTS = 3
"""Tuning prompts on which contenders choose their options."""


@dataclass(frozen=True)
class BenchTask:
    """Everything a bench needs, before anything is decoded."""

    config: BenchConfig
    names: tuple[str, ...]
    """Names of the contenders."""
    left_out: dict[str, str]
    """Contenders left out because of the batch size, with the reasons."""
    profile: DraftProfile
    loaded: Loaded
    decoder: Decoder
    """Decoder of the profile, as deployed."""
    folder: Path
    """Folder of the profile and its exit head."""
    max_new_tokens: int
    dataset_fingerprint: str
    split: str
    """Sentence that says whether the profile was tuned on the measured prompts."""
    notes: tuple[str, ...]
    """Lines about the prompts, such as how many were left out or cut."""
    choosing: tuple[Prompt, ...]
    measured: tuple[Prompt, ...]
    """Prompts of whole batches, in order."""
    num_over: int
    """Number of prompts left out because they fill no batch."""

    @property
    def batches(self) -> list[Prompts]:
        """Token ids of the measured prompts by batch."""
        prompts, size = token_ids(self.measured), self.config.batch_size
        return [prompts[first : first + size] for first in range(0, len(prompts), size)]

    def deploy(self, profile: DraftProfile) -> Decoder:
        """Return the decoder of another profile on the same model."""
        return load_decoder(profile, folder=self.folder).decoder_for(self.loaded.model)

    @property
    def target(self) -> Target:
        """The model."""
        return self.decoder.target

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a sequence."""
        return eos_token_ids(self.loaded.model)


def prepare_bench(
    config: BenchConfig,
    profile_path: Path,
    progress: Progress,
    *,
    loaded: Loaded | None = None,
    target: Target | None = None,
) -> BenchTask:
    """Load and check profile, exit head, model and prompts. Raises SdtuneError for wrong input.

    A model that is `loaded` already, or a `target` of it with its runner, is used in place of the profile's.
    """
    names, left_out = _names(config)
    profile = DraftProfile.load(profile_path)
    if config.runner is not None:
        profile = profile_by(config.runner, profile)
    _check_mode(config.batch_size, profile)
    deployed = load_decoder(profile, folder=profile_path.parent)
    model = config.model or profile.target.model
    if loaded is None:
        progress.stage(f"loading {model}")
        dtype = config.dtype or profile.target.dtype
        loaded = load(model, revision=profile.target.revision, dtype=dtype, device=config.device)
    decoder = deployed.decoder_for(loaded.model) if target is None else deployed.decoder_on(target)
    facts = profile.measured.dataset if profile.measured else None
    max_new_tokens = config.max_new_tokens or (facts.max_new_tokens if facts else USUAL_NEW_TOKENS)
    drawn = find_prompts(
        config.dataset,
        loaded.tokenizer,
        facts,
        config,
        num_tuning=config.tuning_prompts,
        num_held_out=config.held_out_prompts,
        max_new_tokens=max_new_tokens,
        context_length=decoder.target.context_length,
        seed=config.seed,
    )
    found = drawn.prompts
    progress.say(f"prompts: {drawn.origin}")
    for note in found.notes:
        progress.say(note)
    num_measured = config.prompts or len(found.held_out)
    if num_measured > len(found.held_out):
        raise ConfigError(
            f"--prompts {num_measured} is more than the {len(found.held_out)} that are held out; --held-out-prompts "
            f"{num_measured} splits the dataset anew, and the search may have been tuned on some of these"
        )
    if not found.tuning:
        raise ConfigError(
            f"{config.dataset} has no prompt beside the held-out ones, and contenders choose their options on others: give it more"
        )
    num_over = _num_over(config.batch_size, num_measured)
    choosing, measured = found.tuning[:CHOOSING_PROMPTS], found.held_out[: num_measured - num_over]
    for name in profile.draft.files:
        refuse_if_trained_on(token_ids(measured), profile_path.parent / name)
    return BenchTask(
        config,
        names,
        left_out,
        profile,
        loaded,
        decoder,
        profile_path.parent,
        max_new_tokens,
        found.fingerprint,
        drawn.origin,
        found.notes,
        choosing,
        measured,
        num_over,
    )


def _names(config: BenchConfig) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the contenders, and the default ones that cannot decode batches with the reasons."""
    if config.against is not None:
        return check_names(config.against, config.batch_size), {}
    return side_by_side(default_names(resolve_device(config.device)), config.batch_size)


def _check_mode(batch_size: int, profile: DraftProfile) -> None:
    if batch_size > 1 and profile.decoding.exact_width is not None:
        raise ConfigError(
            f"--batch-size {batch_size} is not for bit-exact mode, which decodes one sequence at a time: "
            "give --runner eager or static"
        )


def _num_over(batch_size: int, num_prompts: int) -> int:
    """Return the number of prompts after the last whole batch. Raises ConfigError if there are fewer than two batches."""
    if num_prompts < 2 * batch_size:
        raise ConfigError(
            f"--batch-size {batch_size} makes {num_prompts // batch_size} whole batches of {num_prompts} prompts, and at least 2 "
            f"are needed: give a smaller --batch-size, or {2 * batch_size} or more prompts (--held-out-prompts, --prompts)"
        )
    return num_prompts % batch_size


def token_ids(prompts: Sequence[Prompt]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each prompt."""
    return tuple(prompt.token_ids for prompt in prompts)
