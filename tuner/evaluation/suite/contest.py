"""A contest of many drafts, plain decoding and stock contenders on the same prompts, by the parts of `sdtune bench`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.decoder import Decoder, plain_decoder
from decoding.deploy import load_decoder
from decoding.documents.strict_yaml import dump
from decoding.draft_length import Fixed
from decoding.drafts import PlainDecoding
from decoding.errors import SdtuneError
from decoding.head_folder import refuse_if_trained_on
from decoding.profile import DraftProfile
from decoding.target import Target
from tuner.bench.collecting import SampleCollector
from tuner.bench.contenders import PLAIN, Setting, enter
from tuner.bench.result import Entry, comparable
from tuner.bench.task import CHOOSING_PROMPTS
from tuner.config import SearchConfig
from tuner.contest.contest import Contender, Contest, Prompts, reason_of
from tuner.contest.own_decoding import OwnDecoding
from tuner.errors import DatasetError
from tuner.evaluation.suite.result import BenchFound, MeasuredContender
from tuner.inputs.identity import target_identity
from tuner.inputs.models import Loaded, eos_token_ids, load
from tuner.inputs.prompts import PromptSet, search_prompts
from tuner.measuring.clock import WallClock
from tuner.measuring.recording import TimedBatch
from tuner.progress import Progress
from tuner.results import public_name, stamped
from tuner.search.task import choose_target, token_ids


@dataclass(frozen=True)
class Arena:
    """A model with its runner, and the prompts of one task."""

    config: SearchConfig
    loaded: Loaded
    target: Target
    prompts: PromptSet

    @classmethod
    def of(cls, config: SearchConfig, progress: Progress) -> Arena:
        """Load model and prompts. Raises `SdtuneError` for wrong input."""
        progress.stage(f"loading {config.model}")
        loaded = load(config.model, revision=config.revision, dtype=config.dtype, device=config.device)
        target = choose_target(loaded.model, config, progress)
        return cls(config, loaded, target, search_prompts(config, loaded.tokenizer, target.context_length))

    @property
    def measured(self) -> list[tuple[int, ...]]:
        """Token ids of the held-out prompts."""
        return token_ids(self.prompts.held_out)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a sequence."""
        return eos_token_ids(self.loaded.model)

    def refuse_tuning_prompts(self, tuned_on: SearchConfig) -> None:
        """Raise `DatasetError` if a search was tuned on a prompt that is measured here."""
        tuning = search_prompts(tuned_on, self.loaded.tokenizer, self.target.context_length).tuning
        if shared := set(self.measured) & set(token_ids(tuning)):
            raise DatasetError(
                f"{len(shared)} of the {len(self.measured)} held-out prompts of {public_name(self.config.dataset)} are "
                f"tuning prompts of the searches on {public_name(tuned_on.dataset)}: use data sets without common rows"
            )

    def setting(self, progress: Progress) -> Setting:
        """Return what the contenders of `sdtune bench` are made from, with plain decoding as the profile."""
        plain = DraftProfile(
            name=PLAIN, target=target_identity(self.loaded, self.target), draft=PlainDecoding(), draft_length=Fixed()
        )
        return Setting(
            profile=plain,
            decoder=plain_decoder(self.target),
            in_mode=functools.cache(self._plain_by),
            eos_token_ids=self.eos_token_ids,
            tuning_prompts=tuple(token_ids(self.prompts.tuning[:CHOOSING_PROMPTS])),
            max_new_tokens=self.config.max_new_tokens,
            longest_prompt=max(map(len, self.measured)),
            on_text=progress.advance,
        )

    def draft(self, path: Path) -> Contender:
        """Return the decoding of a profile by this runner.

        Raises `SdtuneError` if it is not for this model, or if its head was trained on a prompt that is measured.
        """
        profile = DraftProfile.load(path)
        for name in profile.draft.files:
            refuse_if_trained_on(self.measured, path.parent / name)
        decoder = load_decoder(profile, folder=path.parent).decoder_on(self.target)
        description = f"{profile.draft.describe()}; {profile.draft_length.describe()}"
        settings = profile.model_dump(mode="json", include={"draft", "draft_length", "decoding"})
        return OwnDecoding(decoder, self.eos_token_ids, description, settings)

    def _plain_by(self, runner: str) -> Decoder:
        return plain_decoder(Target(self.loaded.model, runner))

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that the figures depend on, stamped."""
        facts = {
            "model": public_name(self.loaded.name),
            "dataset": public_name(self.config.dataset),
            "dataset_fingerprint": self.prompts.fingerprint,
            "prompt_notes": list(self.prompts.notes),
            "rows": [prompt.row for prompt in self.prompts.held_out],
            "max_new_tokens": self.config.max_new_tokens,
            "chat_template": self.config.chat_template,
            "runner": self.target.runner.name,
            "seed": self.config.seed,
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }
        return stamped(facts, self.target.device)


def hold(
    config: SearchConfig,
    baselines: Sequence[str],
    profiles: Mapping[str, Path],
    progress: Progress,
    *,
    tuned_on: Sequence[SearchConfig] = (),
) -> BenchFound:
    """Time plain decoding, the `baselines` and the drafts of `profiles` in turns on the held-out prompts of a task.

    All drafts and plain decoding share one runner; equal drafts are measured once. `tuned_on` are configurations of the searches
    for the drafts. Raises `SdtuneError` for wrong input, and `DatasetError` if too few prompts have continuations long enough to
    measure, or if a search was tuned on one of them.
    """
    arena = Arena.of(config, progress)
    for other in tuned_on:
        arena.refuse_tuning_prompts(other)
    progress.stage("contenders choose on tuning prompts")
    contenders, left_out = enter((PLAIN, *baselines), arena.setting(progress))
    first, same = _without_repeats(profiles)
    drafts, refused = _drafts(arena, first)
    contest = Contest({**contenders, **drafts}, WallClock(arena.target.device), needed=(PLAIN,))
    entries = _measure(arena, contest, progress)
    kept, uncounted, counted = comparable(entries)
    return BenchFound(
        facts=arena.facts,
        counted=counted,
        num_prompts=len(arena.measured),
        measured={
            name: MeasuredContender(description=entry.description, settings=entry.settings, samples=entry.samples)
            for name, entry in kept.items()
        },
        same=same,
        left_out={**left_out, **refused, **contest.left_out, **uncounted},
    )


def _without_repeats(profiles: Mapping[str, Path]) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the first profile of each draft, rule and decoding, and by name of the others the name of their first."""
    first: dict[str, Path] = {}
    same: dict[str, str] = {}
    names: dict[str, str] = {}
    for name, path in profiles.items():
        content = dump(DraftProfile.load(path).model_copy(update={"name": ""}))
        if (known := names.setdefault(content, name)) == name:
            first[name] = path
        else:
            same[name] = known
    return first, same


def _drafts(arena: Arena, profiles: Mapping[str, Path]) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders of profiles, and those that cannot take part with the reasons."""
    drafts: dict[str, Contender] = {}
    refused: dict[str, str] = {}
    for name, path in profiles.items():
        try:
            drafts[name] = arena.draft(path)
        except SdtuneError as cause:
            refused[name] = reason_of(cause)
    return drafts, refused


def _measure(arena: Arena, contest: Contest, progress: Progress) -> list[Entry]:
    """Hold the contest and return the samples of every contender that ran to its end."""
    batches: list[Prompts] = [[prompt] for prompt in arena.measured]
    progress.stage("warming up")
    contest.prepare(batches, arena.config.max_new_tokens)
    contest.warm_up([max(batches, key=lambda batch: len(batch[0])), min(batches, key=lambda batch: len(batch[0]))])
    collector = SampleCollector(arena.target, arena.measured, contest.running, batch_size=1)

    def collect(index: int, repeat: int, written: Mapping[str, TimedBatch]) -> None:
        collector.add(index, repeat, written)
        progress.advance()

    progress.stage(f"{len(contest.running)} contenders continue all prompts", len(batches))
    contest.hold(batches, max_new_tokens=arena.config.max_new_tokens, on_batch=collect)
    return [
        Entry(name, each.describe(), dict(each.settings), tuple(collector.samples[name]))
        for name, each in contest.running.items()
    ]
