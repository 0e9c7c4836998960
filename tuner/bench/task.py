"""Inputs of `sdtune bench`, loaded and checked: a profile on its model, and held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decoding.decoder import Decoder
from decoding.deploy import load_decoder
from decoding.head_folder import refuse_if_trained_on
from decoding.profile import DraftProfile
from decoding.target import Target
from tuner.bench.config import BenchConfig
from tuner.bench.contenders import ONE_TEXT_ONLY, check_names, default_names, profile_by
from tuner.errors import ConfigError
from tuner.fields import PromptSettings
from tuner.inputs.held_out import find_prompts
from tuner.inputs.models import Loaded, eos_token_ids, load_target, resolve_device
from tuner.inputs.prompts import Prompt
from tuner.measuring.contender import Prompts
from tuner.progress import Progress
from tuner.results import public_name, stamped

USUAL_NEW_TOKENS = 64


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
    max_new_tokens: int
    dataset_fingerprint: str
    split: str
    """Sentence that says whether the profile was tuned on the measured prompts."""
    notes: tuple[str, ...]
    """Lines about the prompts, such as how many were left out or cut."""
    measured: tuple[Prompt, ...]
    """Prompts of whole batches, in order."""
    num_over: int
    """Number of prompts left out because they fill no batch."""
    by_mode: dict[str, Decoder] = field(default_factory=dict)

    @property
    def batches(self) -> list[Prompts]:
        """Token ids of the measured prompts by batch."""
        prompts, size = token_ids(self.measured), self.config.batch_size
        return [prompts[first : first + size] for first in range(0, len(prompts), size)]

    def in_mode(self, mode: str) -> Decoder:
        """Return the profile's decoder in one of `tuner.bench.contenders.MODES`, made once for profile and plain."""
        if mode not in self.by_mode:
            changed = load_decoder(profile_by(mode, self.profile), folder=self.config.profile.parent)
            self.by_mode[mode] = changed.decoder_for(self.loaded.model)
        return self.by_mode[mode]

    @property
    def target(self) -> Target:
        """The model."""
        return self.decoder.target

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a sequence."""
        return eos_token_ids(self.loaded.model)

    def facts(self) -> dict[str, Any]:
        """Return what the figures were measured with, stamped."""
        config, runner = self.config, self.target.runner
        facts = {
            "profile": self.profile.name,
            "model": public_name(self.loaded.name),
            "dataset": public_name(config.dataset),
            "dataset_fingerprint": self.dataset_fingerprint,
            "split": self.split,
            "prompt_notes": list(self.notes),
            "max_new_tokens": self.max_new_tokens,
            "temperature": 0.0,
            "runner": runner.name,
            "exact_width": runner.exact_width,
            "repeats": config.repeats,
            "seed": config.seed,
            **{name: getattr(config, name) for name in PromptSettings.model_fields},
            "eos_token_ids": sorted(self.eos_token_ids),
            "rows": [prompt.row for prompt in self.measured],
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }
        return stamped(facts, self.target.device)


def prepare_bench(config: BenchConfig, progress: Progress) -> BenchTask:
    """Load and check profile, exit head, model and prompts. Raises SdtuneError for wrong input."""
    names, left_out = _names(config)
    profile = DraftProfile.load(config.profile)
    if config.runner is not None:
        profile = profile_by(config.runner, profile)
    if config.batch_size > 1 and profile.decoding.exact_width is not None:
        raise ConfigError(
            f"--batch-size {config.batch_size} is not for bit-exact mode, which decodes one sequence at a time: "
            "give --runner eager or static"
        )
    deployed = load_decoder(profile, folder=config.profile.parent)
    progress.stage(f"loading {config.model or profile.target.model}")
    loaded = load_target(profile, config)
    decoder = deployed.decoder_for(loaded.model)
    facts = profile.measured.dataset if profile.measured else None
    max_new_tokens = config.max_new_tokens or (facts.max_new_tokens if facts else USUAL_NEW_TOKENS)
    found, origin = find_prompts(
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
    progress.say(f"prompts: {origin}")
    for note in found.notes:
        progress.say(note)
    num_measured = config.prompts or len(found.held_out)
    if num_measured > len(found.held_out):
        raise ConfigError(
            f"--prompts {num_measured} is more than the {len(found.held_out)} that are held out; --held-out-prompts "
            f"{num_measured} splits the dataset anew, and the search may have been tuned on some of these"
        )
    num_over = _num_over(config.batch_size, num_measured)
    measured = found.held_out[: num_measured - num_over]
    for name in profile.draft.files:
        refuse_if_trained_on(token_ids(measured), config.profile.parent / name)
    return BenchTask(
        config,
        names,
        left_out,
        profile,
        loaded,
        decoder,
        max_new_tokens,
        found.fingerprint,
        origin,
        found.notes,
        measured,
        num_over,
    )


def _names(config: BenchConfig) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the contenders, and the default ones that cannot decode batches with the reasons."""
    if config.against is not None:
        return check_names(config.against, config.batch_size), {}
    names = default_names(resolve_device(config.device))
    left_out = {name: ONE_TEXT_ONLY[name] for name in names if config.batch_size > 1 and name in ONE_TEXT_ONLY}
    return tuple(name for name in names if name not in left_out), left_out


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
