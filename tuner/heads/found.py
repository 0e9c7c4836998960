"""The exit heads that a search may draft with: those found in its folder, checked before anything is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from decoding.documents.atomic_write import write_atomically
from decoding.drafts import DraftDocument, EarlyExit
from decoding.errors import ExitHeadError
from decoding.exit_heads import HeadFacts, check_head_file, file_sha256, head_name, prompt_sha256, read_facts
from decoding.fingerprint import Fingerprint
from tuner.inputs.prompts import Prompt

DraftT = TypeVar("DraftT", bound=DraftDocument)


@dataclass(frozen=True)
class FoundHead:
    """A head on disk: the draft that uses it, and what its file says of it."""

    draft: EarlyExit
    facts: HeadFacts


def find_heads(
    folder: Path, exit_layers: Iterable[int], model: Fingerprint, held_out: Sequence[Prompt]
) -> dict[int, FoundHead]:
    """The heads of `exit_layers` that lie in `folder`; exits whose head is missing are left out.

    Raises `ExitHeadError` for a head that is damaged or belongs to another model, and for one that was trained on a prompt of
    `held_out`: the figures of the search would flatter it.
    """
    found = {}
    for exit_layer in exit_layers:
        path = folder / head_name(exit_layer)
        if not path.exists():
            continue
        facts = read_facts(path)
        if (facts.config_sha256, facts.weights_sha256) != (model.config_sha256, model.weights_sha256):
            raise ExitHeadError(
                f"the exit head {path} belongs to another model: name another folder with --heads, or one to distil into"
            )
        if facts.exit_layer != exit_layer:
            raise ExitHeadError(f"the exit head {path} is for exit layer {facts.exit_layer}, whatever its name says")
        _refuse_if_trained_on(held_out, path, facts)
        found[exit_layer] = FoundHead(
            EarlyExit(exit_layer=exit_layer, head=path.name, head_sha256=file_sha256(path)), facts
        )
    return found


def heads_in(folder: Path) -> dict[int, HeadFacts]:
    """What the files of all exit heads in a folder say of them, by exit layer. Raises `ExitHeadError` if there are none."""
    found = [read_facts(path) for path in folder.glob(head_name(0).replace("0", "*"))]
    if not found:
        raise ExitHeadError(f"there is no exit head in {folder}: `sdtune distill --out {folder}` makes them")
    return {facts.exit_layer: facts for facts in sorted(found, key=lambda facts: facts.exit_layer)}


def missing_heads(exit_layers: Iterable[int], found: Mapping[int, FoundHead]) -> tuple[int, ...]:
    """The exits without a head, ascending."""
    return tuple(sorted(set(exit_layers) - found.keys()))


def place_beside(draft: DraftT, heads: Path, profile: Path) -> DraftT:
    """Copy the files of `draft` from the folder `heads` to beside `profile`, named after it; return the draft with the new names.

    The hash in each name keeps later runs from overwriting the files of this profile, or of an older one.

    Raises `ExitHeadError` if it cannot be read or written, or is not the one that was measured any more.
    """
    names = {}
    for name, sha256 in draft.files.items():
        source = heads / name
        names[name] = f"{profile.stem}.{source.stem}.{sha256[:8]}{source.suffix}"
        check_head_file(source, sha256)
        try:
            content = source.read_bytes()
        except OSError as cause:
            raise ExitHeadError(f"cannot read the exit head {source}: {cause.strerror or cause}") from None
        write_atomically(profile.parent / names[name], content, what="the exit head", error=ExitHeadError)
    return draft.with_file_names(names)


def num_trained_on(heads: Iterable[FoundHead], prompts: Sequence[Prompt]) -> int:
    """How many of `prompts` any of the heads was trained on."""
    learnt = {sha256 for head in heads for sha256 in _lessons(head.facts)}
    return sum(prompt_sha256(prompt.token_ids) in learnt for prompt in prompts)


def _lessons(facts: HeadFacts) -> frozenset[str]:
    return frozenset(facts.training.prompts_sha256 if facts.training else ())


def _refuse_if_trained_on(held_out: Sequence[Prompt], path: Path, facts: HeadFacts) -> None:
    lessons = _lessons(facts)
    num_seen = sum(prompt_sha256(prompt.token_ids) in lessons for prompt in held_out)
    if num_seen:
        raise ExitHeadError(
            f"the exit head {path} was trained on {num_seen} of the {len(held_out)} held-out prompts: distil with the same "
            "--dataset, --seed, --tuning-prompts and --held-out-prompts as the search, which keep them apart"
        )
