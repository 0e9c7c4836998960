"""A folder of trained heads for one target: which exits have a head, the drafts that use them, and the loaded modules.

Beside exit heads a folder may hold one feature head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from decoding.documents.atomic_write import write_atomically
from decoding.drafts import DraftDocument, EarlyExit, FeatureHeadDraft
from decoding.errors import ExitHeadError
from decoding.exit_heads import (
    FEATURE_HEAD,
    HeadFacts,
    check_head_file,
    file_sha256,
    head_name,
    load_exit_head,
    load_feature_head,
    prompt_sha256,
    read_facts,
)
from decoding.fingerprint import Fingerprint, fingerprint
from decoding.target import ExitHead, FeatureHead, Target

MAX_LOADED = 4
"""Heads kept in memory; others are read again when they are asked for."""

PromptTokenIds = Sequence[Sequence[int]]
"""Token ids of prompts."""

DraftT = TypeVar("DraftT", bound=DraftDocument)


class HeadFolder:
    """Exit heads of one target in one folder, which need not exist. Files are read when they are first needed.

    Every method raises `ExitHeadError` for a head that it needs and that is damaged, unreadable or of another model.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self.folder = folder
        # A plain dictionary: a cached method would refer to itself, and keep all this until a garbage collection.
        self._loaded: dict[tuple[int, str, str], ExitHead] = {}
        self._loaded_feature: tuple[str, FeatureHead] | None = None

    def facts(self, exit_layer: int) -> HeadFacts | None:
        """Return the metadata of an exit's head, or None if the folder has no head for it."""
        path = self.folder / head_name(exit_layer)
        if not path.exists():
            return None
        facts = self._own_facts(path)
        if facts.exit_layer != exit_layer:
            raise ExitHeadError(f"the exit head {path} is for exit layer {facts.exit_layer}, whatever its name says")
        return facts

    def drafts(self, exit_layers: Iterable[int], *, held_out: PromptTokenIds = ()) -> dict[int, EarlyExit]:
        """Return the draft of each of `exit_layers` that has a head, by exit layer.

        Raises `ExitHeadError` also for a head trained on a prompt of `held_out`, whose figures it would inflate.
        """
        found = {}
        for exit_layer in exit_layers:
            if (facts := self.facts(exit_layer)) is None:
                continue
            path = self.folder / head_name(exit_layer)
            _refuse_overlap(held_out, path, facts)
            found[exit_layer] = EarlyExit(
                exit_layer=exit_layer,
                head=path.name,
                head_sha256=file_sha256(path),
                draft_vocabulary=facts.draft_vocabulary,
            )
        return found

    def feature_facts(self) -> HeadFacts | None:
        """Return the metadata of the feature head, or None if the folder has none."""
        path = self.folder / FEATURE_HEAD
        return self._own_facts(path) if path.exists() else None

    def feature_draft(self, *, held_out: PromptTokenIds = ()) -> FeatureHeadDraft | None:
        """Return the draft of the feature head, or None if the folder has none.

        Raises `ExitHeadError` also for a head trained on a prompt of `held_out`.
        """
        if (facts := self.feature_facts()) is None:
            return None
        path = self.folder / FEATURE_HEAD
        _refuse_overlap(held_out, path, facts)
        sha256 = file_sha256(path)
        return FeatureHeadDraft(head=path.name, head_sha256=sha256, draft_vocabulary=facts.draft_vocabulary)

    def feature_head(self, draft: FeatureHeadDraft) -> FeatureHead:
        """Return the loaded head of `draft`; raise `ExitHeadError` if its file is missing or differs."""
        if self._loaded_feature is None or self._loaded_feature[0] != draft.head_sha256:
            path = self.folder / draft.head
            check_head_file(path, draft.head_sha256)
            self._loaded_feature = draft.head_sha256, load_feature_head(path, self._target, self._model)
        return self._loaded_feature[1]

    def missing(self, exit_layers: Iterable[int]) -> tuple[int, ...]:
        """Return the layers of `exit_layers` that have no head, ascending."""
        return tuple(layer for layer in sorted(set(exit_layers)) if not (self.folder / head_name(layer)).exists())

    def num_trained_on(self, exit_layers: Iterable[int], prompts: PromptTokenIds, *, feature_head: bool = False) -> int:
        """Return how many of `prompts` the heads of these exits, or the `feature_head` too, were trained on, each counted once."""
        existing = self._existing(exit_layers, feature_head)
        training_prompts = {sha256 for facts in existing for sha256 in _training_prompts(facts)}
        return sum(prompt_sha256(tuple(prompt)) in training_prompts for prompt in prompts)

    def distillation_seconds(self, exit_layers: Iterable[int], *, feature_head: bool = False) -> float:
        """Return the seconds that the heads of these exits, or the `feature_head` too, took to distil.

        Heads of one distillation count once.
        """
        existing = self._existing(exit_layers, feature_head)
        runs = {(each.training.seconds, each.training.steps) for each in existing if each.training}
        return sum(seconds for seconds, _ in runs)

    def get(self, draft: EarlyExit) -> ExitHead:
        """Return the loaded head of `draft`, which must have one; raise `ExitHeadError` if its file is missing or differs."""
        assert draft.head is not None, "an exit without a head needs none"
        assert draft.head_sha256 is not None, "a draft with a head has its hash"
        key = draft.exit_layer, draft.head, draft.head_sha256
        head = self._loaded.pop(key) if key in self._loaded else self._read(*key)
        self._loaded[key] = head  # last, as the one used latest
        if len(self._loaded) > MAX_LOADED:
            del self._loaded[next(iter(self._loaded))]
        return head

    def copy_beside(self, draft: DraftT, profile: Path) -> DraftT:
        """Copy the head of `draft`, if it has one, beside `profile`, named after it, and return the draft with the new names.

        The hash in each name keeps later runs from overwriting the files of this profile, or of an older one. Raises
        `ExitHeadError` if a file cannot be read or written, or is not the one that was measured.
        """
        head = draft.trained_head
        if head is None:
            return draft
        source = self.folder / head.file
        name = f"{profile.stem}.{source.stem}.{head.sha256[:8]}{source.suffix}"
        check_head_file(source, head.sha256)
        try:
            content = source.read_bytes()
        except OSError as cause:
            raise ExitHeadError(f"cannot read the exit head {source}: {cause.strerror or cause}") from None
        write_atomically(profile.parent / name, content, what="the exit head", error=ExitHeadError)
        return draft.model_copy(update={"head": name})

    @cached_property
    def _model(self) -> Fingerprint:
        return fingerprint(self._target.model)

    def _own_facts(self, path: Path) -> HeadFacts:
        """Return the metadata of a head of the target; raise `ExitHeadError` for one of another model."""
        facts = read_facts(path)
        if (facts.config_sha256, facts.weights_sha256) != (self._model.config_sha256, self._model.weights_sha256):
            raise ExitHeadError(
                f"the {facts.noun} {path} belongs to another model: name another folder with --heads, or one to distil into"
            )
        return facts

    def _existing(self, exit_layers: Iterable[int], feature_head: bool) -> list[HeadFacts]:
        known = [self.facts(layer) for layer in exit_layers] + ([self.feature_facts()] if feature_head else [])
        return [facts for facts in known if facts is not None]

    def _read(self, exit_layer: int, name: str, sha256: str) -> ExitHead:
        check_head_file(self.folder / name, sha256)
        return load_exit_head(self.folder / name, self._target, exit_layer, self._model)


def list_feature_head(folder: Path) -> HeadFacts | None:
    """Return the metadata of the feature head in `folder`, of any model, or None if there is none."""
    path = folder / FEATURE_HEAD
    return read_facts(path) if path.exists() else None


def list_heads(folder: Path, *, required: bool = True) -> dict[int, HeadFacts]:
    """Return the metadata of all exit heads in `folder`, of any model, by exit layer.

    Raises `ExitHeadError` if there are none and they are `required`.
    """
    found = [read_facts(path) for path in folder.glob(head_name(0).replace("0", "*"))]
    if not found and required:
        raise ExitHeadError(f"there is no exit head in {folder}: `sdtune distill --out {folder}` makes them")
    return {facts.exit_layer: facts for facts in sorted(found, key=lambda facts: facts.exit_layer)}


def _training_prompts(facts: HeadFacts) -> frozenset[str]:
    return frozenset(facts.training.prompts_sha256 if facts.training else ())


def refuse_if_trained_on(held_out: PromptTokenIds, path: Path) -> None:
    """Raise `ExitHeadError` for a head trained on a prompt of `held_out`, whose figures it would inflate."""
    _refuse_overlap(held_out, path, read_facts(path))


def _refuse_overlap(held_out: PromptTokenIds, path: Path, facts: HeadFacts) -> None:
    training_prompts = _training_prompts(facts)
    num_seen = sum(prompt_sha256(tuple(prompt)) in training_prompts for prompt in held_out)
    if num_seen:
        raise ExitHeadError(
            f"the exit head {path} was trained on {num_seen} of the {len(held_out)} held-out prompts: distil with the same "
            "--dataset, --seed, --tuning-prompts and --held-out-prompts as the search, which keep them apart"
        )
