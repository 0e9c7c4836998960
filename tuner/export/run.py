"""One export, from the profile to the folder on disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, cast

import torch
from transformers.utils import cached_file

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.deploy import load_decoder
from decoding.deploy.mismatch import check_target
from decoding.head_folder import HeadFolder
from decoding.profile import DraftProfile
from decoding.target import Target
from decoding.text import Ending
from studies.prediction.survey import Survey
from tuner.errors import DatasetError, ExportError
from tuner.export.checkpoint import check_draft, copy_tokenizer, write_checkpoint
from tuner.export.engines.registry import load_engine
from tuner.export.folder import check_out, new_folder, write_model_folder
from tuner.export.losses import LOSSES, MEBIBYTE, Agreement, DraftCost, losses_text
from tuner.export.plan import DRAFT_FOLDER, Plan, plan_for
from tuner.export.schedule import read_schedule
from tuner.export.settings import FOLDER
from tuner.export.shape import reduced
from tuner.fields import PromptSettings
from tuner.inputs.held_out import find_prompts
from tuner.inputs.models import Loaded, load_target

if TYPE_CHECKING:
    from decoding.drafts import DraftDocument, EarlyExit
    from tuner.export.engines.contract import Engine
    from tuner.export.settings import ExportSettings
    from tuner.progress import Progress

PROFILE, README = "profile.yaml", "README.md"
GENERATION_CONFIG = "generation_config.json"
GATE_TOKENS = 48
AGREEMENT_PROMPTS, AGREEMENT_TOKENS = 4, 32
"""On which a draft with keys of its own is compared with the tuned one."""
USUAL_TEXT = (
    "def add(left, right):\n    return left + right\n\nThe quick brown fox jumps over the lazy dog, and then it sleeps."
)
"""On which the exported draft is compared with the profile's: any text shows other weights."""
EXECUTABLE = 0o755


@dataclass(frozen=True)
class Exported:
    out: Path
    files: tuple[str, ...]
    """Files at its top, and the draft folder, in order."""
    plan: Plan | None
    """What was written for an engine; None for a model folder."""


@dataclass(frozen=True)
class Source:
    profile: DraftProfile
    folder: Path
    """Folder of the profile, where the draft's files lie."""
    loaded: Loaded
    model_folder: Path


def export(settings: ExportSettings, progress: Progress, *, loaded: Loaded | None = None) -> Exported:
    """Write the export that `settings` describe, or nothing. A model that is `loaded` already is not loaded again.

    Raises `ExportError` for a profile that the engine cannot express, with the nearest thing that can, and other `SdtuneError`s
    for a wrong profile, model or dataset.
    """
    check_out(settings.out, overwrite=settings.overwrite)
    source = _open(settings, progress, loaded)
    write = _write_folder if settings.to == FOLDER else _write_for_engine
    with new_folder(settings.out.absolute()) as building:
        plan = write(settings, source, building, progress)
        source.profile.save(building / PROFILE)
        files = tuple(sorted(path.name for path in building.iterdir()))
    return Exported(settings.out, files, plan)


def _write_folder(settings: ExportSettings, source: Source, building: Path, progress: Progress) -> None:
    """Write a model folder that decodes with the profile; raise `ExportError` for settings that change a draft."""
    if settings.drop or settings.draft_tokens is not None or settings.schedule is not None:
        raise ExportError(
            "--to folder keeps the whole profile: --drop, --draft-tokens and --schedule are for other engines"
        )
    progress.stage("writing the folder")
    write_model_folder(source.profile, source.folder, source.model_folder, building, copy_weights=settings.copy_weights)


def _write_for_engine(settings: ExportSettings, source: Source, building: Path, progress: Progress) -> Plan:
    """Write draft, settings and losses for an engine, and return its plan; raise `ExportError` for what it cannot express."""
    if settings.copy_weights:
        raise ExportError("--copy-weights is for --to folder: an engine reads the model's own folder")
    engine = load_engine(settings.to)
    draft = reduced(source.profile.draft, settings.drop, keeps_bits=engine.quantises)
    plan = _plan(settings, source, engine, draft)
    cost = write_draft(plan, engine, source, draft, building, progress) if plan.needs_draft_folder else None
    _write_settings(plan, engine, building, losses_text(plan, engine, cost, settings.drop))
    return plan


def _open(settings: ExportSettings, progress: Progress, loaded: Loaded | None) -> Source:
    profile = DraftProfile.load(settings.profile)
    if not profile.draft.drafts:
        raise ExportError(f"profile {profile.name!r} says to decode plainly: there is no draft to export")
    load_decoder(profile, folder=settings.profile.parent)  # checks the draft's files
    name, revision = settings.model or profile.target.model, profile.target.revision
    if loaded is None:
        progress.stage(f"loading {name}")
        loaded = load_target(profile, settings)
    check_target(profile, loaded.model)
    return Source(profile, settings.profile.parent, loaded, model_folder_of(name, revision))


def model_folder_of(name: str, revision: str | None) -> Path:
    """Return the folder of a model that has been loaded: its own, or the one in the hub's cache."""
    if Path(name).is_dir():
        return Path(name).absolute()
    config = cached_file(name, "config.json", revision=revision)
    assert config is not None, "the model has been loaded"
    return Path(config).parent


def _plan(settings: ExportSettings, source: Source, engine: Engine, draft: DraftDocument) -> Plan:
    name = settings.model or source.profile.target.model
    if settings.schedule is not None and settings.draft_tokens is not None:
        raise ExportError("--schedule says how many tokens to draft: give it without --draft-tokens")
    return plan_for(
        source.profile,
        engine,
        draft,
        source.loaded.model.config,
        model=str(source.model_folder) if Path(name).is_dir() else name,
        dtype=str(source.loaded.model.dtype).removeprefix("torch."),
        out=settings.out.absolute(),
        asked=settings.draft_tokens,
        schedule=None if settings.schedule is None else read_schedule(settings.schedule),
    )


def write_draft(
    plan: Plan,
    engine: Engine,
    source: Source,
    draft: DraftDocument,
    building: Path,
    progress: Progress,
) -> DraftCost:
    """Write the draft folder and compare it with the draft; raise `ExportError` if they differ."""
    assert plan.shape is not None, "there is a draft to write"
    target = Target(source.loaded.model)
    head = None
    if draft.trained_head is not None:
        head = HeadFolder(target, source.folder).get(cast("EarlyExit", draft))
    progress.stage("writing the draft")
    folder = building / DRAFT_FOLDER
    num_bytes = write_checkpoint(target, plan.shape, head, folder)
    copy_tokenizer(source.model_folder, folder)
    generation = folder / GENERATION_CONFIG
    if added := engine.draft_generation(plan):
        values = json.loads(generation.read_text(encoding="utf-8")) if generation.exists() else {}
        generation.write_text(json.dumps(values | added, indent=2) + "\n", encoding="utf-8")
    progress.stage("comparing its logits")
    text = source.loaded.tokenizer(USUAL_TEXT)["input_ids"][:GATE_TOKENS]
    cache_bytes = check_draft(target, plan.shape, head, folder, text)
    progress.say(
        f"draft: {plan.shape.describe()}, {num_bytes / MEBIBYTE:.1f} MiB; logits equal at {len(text)} positions "
        "(max difference 0)"
    )
    agreement = None if draft.has_targets_keys(target.num_layers) else _agreement(target, source, draft)
    return DraftCost(num_bytes, cache_bytes, len(text), agreement)


@torch.inference_mode()
def _agreement(target: Target, source: Source, draft: DraftDocument) -> Agreement:
    """Return how often a draft agrees with the target, with keys of its own and with the target's.

    On held-out prompts of the search, if they are found.
    """
    tokenizer, facts = source.loaded.tokenizer, source.profile.measured and source.profile.measured.dataset
    prompts: list[Sequence[int]] = [tokenizer(USUAL_TEXT)["input_ids"]]
    if facts:
        with suppress(DatasetError):  # it is not here: any text shows the difference
            found, _ = find_prompts(
                facts.name,
                tokenizer,
                facts,
                PromptSettings(),
                num_tuning=None,
                num_held_out=min(AGREEMENT_PROMPTS, facts.held_out_prompts),
                max_new_tokens=AGREEMENT_TOKENS,
                context_length=target.context_length,
                seed=0,
            )
            prompts = [prompt.token_ids for prompt in found.held_out]
    decoder = plain_decoder(target)
    texts = [decoder.generate(Request(tuple(prompt), Ending(AGREEMENT_TOKENS))).tokens for prompt in prompts]
    alone = draft.having(lookup=None)
    tuned, copied = (
        [each.matches for each in Survey(target, prompts, texts, own_keys=own).record(alone)] for own in (False, True)
    )
    positions = sum(map(len, tuned))
    return Agreement(sum(map(sum, tuned)) / positions, sum(map(sum, copied)) / positions, positions)


def _write_settings(plan: Plan, engine: Engine, building: Path, losses: str) -> None:
    relative = replace(plan, out=Path())
    files = {name: _movable(text, name, plan) for name, text in engine.files(relative).items()}
    for name, text in {**files, LOSSES: losses, README: "\n".join(_readme(plan, engine, files))}.items():
        path = building / name
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(EXECUTABLE)


def _movable(text: str, name: str, plan: Plan) -> str:
    """Return a file of settings; a script runs in its own folder, and the variable MODEL may name its model."""
    if not name.endswith(".sh"):
        return text
    model = quote(plan.model)
    by_variable = f'"${{MODEL:-{plan.model}}}"' if re.fullmatch(r"[\w./ -]+", plan.model) else model
    return text.replace(model, by_variable).replace("set -eu\n", 'set -eu\ncd "$(dirname "$0")"\n', 1)


def _readme(plan: Plan, engine: Engine, files: Mapping[str, str]) -> Iterator[str]:
    yield f"# {plan.profile.name} for {engine.title}\n"
    if "convert.sh" in files:
        yield "* `LLAMA_CPP=DIR ./convert.sh` makes the GGUF files, once; DIR is the absolute path of llama.cpp's sources."
    if "launch.sh" in files:
        yield "* `./launch.sh` starts the engine's server with the draft; flags are passed on."
        yield "* If the model lies elsewhere, set `MODEL` to its absolute path, or its hub id, for the scripts."
    if "example.py" in files:
        yield "* `python example.py` continues a text with the draft."
    yield f"* {LOSSES} says what of the profile survives here. The folder may be moved.\n"
