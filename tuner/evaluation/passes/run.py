"""`sdtune evaluate passes` from its settings to its results on disk: one loaded model, one JSON file, a key per part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType

from decoding.profile import DraftProfile
from tuner.errors import ConfigError
from tuner.evaluation.passes import contexts, readiness, widths
from tuner.evaluation.passes.settings import PassesEvaluation
from tuner.inputs.models import load
from tuner.progress import Progress
from tuner.results import check_results_folder, public_name, stamped, write_json, write_text

NAME = "passes"


@dataclass(frozen=True)
class PassesTask:
    """A loaded model, and the profile if one is given."""

    settings: PassesEvaluation
    model: Any
    profile: DraftProfile | None


@dataclass(frozen=True)
class PassEvaluation:
    """How one part is measured, and how its part of the document is shown."""

    measure: Callable[[PassesTask], dict[str, Any]]
    show: Callable[[Mapping[str, Any]], RenderableType]


PARTS: Mapping[str, PassEvaluation] = MappingProxyType(
    {
        "widths": PassEvaluation(lambda task: widths.measure(task.model, task.settings), widths.show),
        "contexts": PassEvaluation(
            lambda task: contexts.measure(task.model, _profile(task), task.settings), contexts.show
        ),
        "readiness": PassEvaluation(lambda task: readiness.measure(task.model, task.settings), readiness.show),
    }
)


def run_and_write(settings: PassesEvaluation, progress: Progress) -> RenderableType:
    """Measure the parts and return their tables; what is done is on disk before the next part begins.

    Raises `ConfigError` for a model, device or folder that cannot be used, and for `contexts` without a draft.
    """
    check_results_folder(settings.out)
    profile = DraftProfile.load(settings.profile) if settings.profile else None
    task = _load(settings, profile, progress)
    names: Iterable[str] = settings.part or (name for name in PARTS if name != "contexts" or profile is not None)
    document = _facts(task)
    tables: list[RenderableType] = []
    for name in dict.fromkeys(names):
        progress.stage(f"measuring {name}")
        document[name] = PARTS[name].measure(task)
        tables.append(PARTS[name].show(document[name]))
        write_text(settings.out, NAME, *tables)
        write_json(settings.out, NAME, stamped(document, task.model.device))
    return Group(*tables)


def _load(settings: PassesEvaluation, profile: DraftProfile | None, progress: Progress) -> PassesTask:
    name = settings.model or (profile.target.model if profile else None)
    if name is None:
        raise ConfigError("which model? give --model or --profile")
    dtype = settings.dtype or (profile.target.dtype if profile else "auto")
    progress.stage(f"loading {name}")
    return PassesTask(settings, load(name, dtype=dtype, device=settings.device).model, profile)


def _profile(task: PassesTask) -> DraftProfile:
    if task.profile is None:
        raise ConfigError("--part contexts compares rounds of a draft: give --profile")
    return task.profile


def _facts(task: PassesTask) -> dict[str, Any]:
    return {
        "model": public_name(task.model.config._name_or_path),
        "dtype": str(task.model.dtype).removeprefix("torch."),
        "seed": task.settings.seed,
    }
