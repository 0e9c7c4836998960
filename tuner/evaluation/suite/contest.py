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
from decoding.losslessness import Comparison, compare
from decoding.profile import DraftProfile
from decoding.target import Target
from decoding.text import Ending
from studies.measurement import Measurement
from tuner.bench.contenders import Setting, enter
from tuner.bench.task import CHOOSING_PROMPTS
from tuner.config import SearchConfig
from tuner.errors import DatasetError
from tuner.evaluation.suite.result import BenchFound, MeasuredContender
from tuner.inputs.identity import target_identity
from tuner.inputs.models import Loaded, eos_token_ids, load
from tuner.inputs.prompts import PromptSet, search_prompts
from tuner.measuring.baseline import Baseline
from tuner.measuring.comparison import FEWEST_SAMPLES, Compared
from tuner.measuring.contender import PLAIN, Contender, reason_of
from tuner.measuring.own_decoding import OwnDecoding
from tuner.measuring.turns import Interleaved, PairedBench, Texts
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

    def draft(self, name: str, path: Path) -> Contender:
        """Return the decoding of a profile by this runner, under this name.

        Raises `SdtuneError` if it is not for this model, or if its head was trained on a prompt that is measured.
        """
        profile = DraftProfile.load(path)
        for file in profile.draft.files:
            refuse_if_trained_on(self.measured, path.parent / file)
        decoder = load_decoder(profile, folder=path.parent).decoder_on(self.target)
        description = f"{profile.draft.describe()}; {profile.draft_length.describe()}"
        settings = profile.model_dump(mode="json", include={"draft", "draft_length", "decoding"})
        return OwnDecoding(name, decoder, self.eos_token_ids, description=description, settings=settings)

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
    turns = Interleaved(
        [*contenders, *drafts], may_fail=[each.name for each in (*contenders, *drafts) if each.name != PLAIN]
    )
    found = _measure(arena, turns, progress)
    compared = Compared.of(found, needed=(PLAIN,))
    if len(compared.counted) < FEWEST_SAMPLES:
        raise DatasetError(
            f"only {len(compared.counted)} prompts are continued at sufficient length by all of "
            f"{', '.join(compared.measurements)}: give more tokens, or prompts that the model continues at greater length"
        )
    return BenchFound(
        facts=arena.facts,
        counted=compared.counted,
        num_prompts=len(arena.measured),
        prompt_tokens=tuple(map(len, arena.measured)),
        measured={
            name: MeasuredContender(
                description=turns.running[name].description,
                settings=dict(turns.running[name].settings),
                samples=found[name].samples,
            )
            for name in compared.measurements
        },
        same=same,
        left_out={**left_out, **refused, **turns.left_out, **compared.left_out},
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


def _drafts(arena: Arena, profiles: Mapping[str, Path]) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders of profiles, and those that cannot take part with the reasons."""
    drafts: list[Contender] = []
    refused: dict[str, str] = {}
    for name, path in profiles.items():
        try:
            drafts.append(arena.draft(name, path))
        except SdtuneError as cause:
            refused[name] = reason_of(cause)
    return drafts, refused


def _measure(arena: Arena, turns: Interleaved, progress: Progress) -> dict[str, Measurement]:
    """Let all continue all prompts in turns; return the measurement of every contender that ran to its end."""
    prompts, ending = tuple(arena.measured), Ending(arena.config.max_new_tokens, arena.eos_token_ids)
    batches = [[prompt] for prompt in prompts]
    progress.stage("warming up")
    turns.prepare(batches, ending.max_new_tokens)
    turns.warm_up([[max(prompts, key=len)], [min(prompts, key=len)]])

    def judge(name: str, row: int, texts: Texts) -> Comparison:
        return compare(arena.target, prompts[row], texts[PLAIN], texts[name])

    progress.stage(f"{len(turns.running)} contenders continue all prompts", len(batches))
    bench = PairedBench(Baseline(prompts, (), tuple(range(len(prompts))), ending), judge)
    return bench.compete(turns, bench.indices, lambda samples: progress.advance(), plain_too=True)
