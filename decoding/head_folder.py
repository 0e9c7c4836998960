"""A folder of trained heads for one target: which exits have a head, the drafts that use them, and the loaded modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from decoding.documents.atomic_write import write_atomically
from decoding.drafts import DraftDocument, EarlyExit
from decoding.errors import ExitHeadError
from decoding.exit_heads import (
    HeadFacts,
    check_head_file,
    file_sha256,
    head_name,
    load_exit_head,
    prompt_sha256,
    read_facts,
)
from decoding.fingerprint import Fingerprint, fingerprint
from decoding.target import Target

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
        self._loaded: dict[tuple[str, str, int], nn.Module] = {}

    def facts(self, exit_layer: int) -> HeadFacts | None:
        """Return the metadata of an exit's head, or None if the folder has no head for it."""
        path = self.folder / head_name(exit_layer)
        facts = self._own_facts(path)
        if facts is not None and facts.exit_layer != exit_layer:
            raise ExitHeadError(f"the exit head {path} is for exit layer {facts.exit_layer}, whatever its name says")
        return facts

    def drafts(self, exit_layers: Iterable[int], *, held_out: PromptTokenIds = ()) -> dict[int, EarlyExit]:
        """Return the draft of each of `exit_layers` that has a head, by exit layer.

        Raises `ExitHeadError` also for a head trained on a prompt of `held_out`, whose figures it would inflate.
        """
        known = {exit_layer: self.facts(exit_layer) for exit_layer in exit_layers}
        return {
            exit_layer: EarlyExit(exit_layer=exit_layer, **self._keys(head_name(exit_layer), facts, held_out))
            for exit_layer, facts in known.items()
            if facts is not None
        }

    def _keys(self, name: str, facts: HeadFacts, held_out: PromptTokenIds) -> dict[str, Any]:
        """Return what a document says about its head."""
        path = self.folder / name
        _refuse_overlap(held_out, path, facts)
        return {"head": name, "head_sha256": file_sha256(path)}

    def get(self, draft: EarlyExit) -> nn.Module:
        """Return the loaded head of `draft`, which must have one; raise `ExitHeadError` if its file is missing or differs."""
        head = draft.trained_head
        assert head is not None, "an exit without a head needs none"
        key = head.file, head.sha256, draft.exit_layer
        loaded = self._loaded.pop(key, None)
        if loaded is None:
            path = self.folder / head.file
            check_head_file(path, head.sha256)
            loaded = load_exit_head(path, self._target, draft.exit_layer, self._model)
        self._loaded[key] = loaded  # last, as the one used latest
        if len(self._loaded) > MAX_LOADED:
            del self._loaded[next(iter(self._loaded))]
        return loaded

    def missing(self, exit_layers: Iterable[int]) -> tuple[int, ...]:
        """Return the layers of `exit_layers` that have no head, ascending."""
        return tuple(layer for layer in sorted(set(exit_layers)) if not (self.folder / head_name(layer)).exists())

    def num_trained_on(self, exit_layers: Iterable[int], prompts: PromptTokenIds) -> int:
        """Return how many of `prompts` the heads of these exits were trained on, each counted once."""
        existing = self._existing(exit_layers)
        training_prompts = {sha256 for facts in existing for sha256 in _training_prompts(facts)}
        return sum(prompt_sha256(tuple(prompt)) in training_prompts for prompt in prompts)

    def distillation_seconds(self, exit_layers: Iterable[int]) -> float:
        """Return the seconds that the heads of these exits took to distil; heads of one distillation count once."""
        existing = self._existing(exit_layers)
        runs = {(each.training.seconds, each.training.steps) for each in existing if each.training}
        return sum(seconds for seconds, _ in runs)

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

    def _own_facts(self, path: Path) -> HeadFacts | None:
        """Return the metadata of a head of the target, None without one; raise `ExitHeadError` for one of another model."""
        if not path.exists():
            return None
        facts = read_facts(path)
        if (facts.config_sha256, facts.weights_sha256) != (self._model.config_sha256, self._model.weights_sha256):
            raise ExitHeadError(
                f"the exit head {path} belongs to another model: name another folder with --heads, or one to distil into"
            )
        return facts

    def _existing(self, exit_layers: Iterable[int]) -> list[HeadFacts]:
        return [facts for facts in map(self.facts, exit_layers) if facts is not None]


def list_heads(folder: Path) -> dict[int, HeadFacts]:
    """Return the metadata of all exit heads in `folder`, of any model, by exit layer; raise `ExitHeadError` if there are none."""
    found = [read_facts(path) for path in folder.glob(head_name(0).replace("0", "*"))]
    if not found:
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
