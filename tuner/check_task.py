"""What the tuner's checks of itself have in common: how they begin, what they say of the task, and how results are written.

A check works on the task of a search: the same configuration, the same prompts, the same exit heads. It makes no heads, stores no
trials and writes no profile, only its results into a folder of its own.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rich.console import Console, RenderableType

from decoding.files import write_whole
from decoding.profile import EarlyExit
from decoding.target import Target
from studies.random_candidates import RandomCandidates
from studies.skip_space import SkipSpace
from tuner.config import SearchConfig
from tuner.environment import device_name, versions
from tuner.errors import ConfigError
from tuner.heads import find_heads
from tuner.task import Task, prepare, refuse_batches
from tuner.watcher import Progress

TEXT_WIDTH = 110


def prepare_check(config: SearchConfig, out: Path, progress: Progress) -> Task:
    """Load and check all that a check of this configuration works on; its results will lie in the folder `out`.

    That is made when the first result is written. Raises `ConfigError` if nothing could be written there, and what
    `tuner.task.prepare` raises.
    """
    refuse_batches(config, "this check")
    place = check_results_folder(out)
    # Heads are taken as they are, and no profile is written: a place is named where one could be.
    return prepare(config.model_copy(update={"distill": "never", "out": place / "profile.yaml"}), progress)


def check_results_folder(out: Path) -> Path:
    """Raise `ConfigError` if results could not be written into the folder `out`; where that is or will be made."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"cannot write results into {out}: it is a file; name a folder")
    place = out if out.is_dir() else out.parent
    try:
        with TemporaryFile(dir=place):
            pass
    except OSError as cause:
        raise ConfigError(f"cannot write results into {out}: {place}: {cause.strerror}") from None
    return place


def head_drafts(task: Task) -> dict[int, EarlyExit]:
    """All exits whose head lies in the folder of heads, whether a study wants them or not; by exit layer.

    Raises `ExitHeadError` for heads that do not belong to the task.
    """
    found = find_heads(task.config.heads, range(1, task.target.num_layers), task.model, task.prompts.held_out)
    return {exit_layer: head.draft for exit_layer, head in found.items()}


def random_candidates(
    target: Target, heads: Mapping[int, EarlyExit], rules: tuple[str, ...], max_tokens: int
) -> RandomCandidates:
    """Random configurations of the task's model."""
    return RandomCandidates(SkipSpace.of(target), target.num_layers, heads, rules, max_tokens)


def facts_of(task: Task) -> dict[str, Any]:
    """What a reader must know to place the figures of a check. Models and data are named by their last part, wherever they lie."""
    config = task.config
    return {
        "model": public_name(config.model),
        "dataset": public_name(config.dataset),
        "prompts": task.prompts.fingerprint,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "prefix_reuse": config.prefix_reuse,
        "runner": task.target.runner.name,
        "exact_width": task.target.runner.exact_width,
        "seed": config.seed,
        "device": device_name(task.target.device),
        "dtype": str(task.target.dtype).removeprefix("torch."),
        "versions": versions(),
    }


def public_name(place: str) -> str:
    """The last part of an absolute path, anything else as it is: where things lie on this machine is nobody's business."""
    return Path(place).name if Path(place).is_absolute() else place


def write_json(out: Path, name: str, document: Mapping[str, Any]) -> None:
    """All figures and samples, whole or not at all; `ConfigError` if that fails."""
    write_result(out, f"{name}.json", json.dumps(document, indent=1))


def write_text(out: Path, name: str, *shown: RenderableType, width: int = TEXT_WIDTH) -> None:
    """What the command shows at its end, as plain text of `width` columns; `ConfigError` if that fails."""
    text = io.StringIO()
    console = Console(width=width, color_system=None, file=text)
    for each in shown:
        console.print(each, highlight=False)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    write_result(out, f"{name}.txt", "\n".join(lines) + "\n")


def write_result(out: Path, name: str, content: str | bytes) -> None:
    """One file of the results, whole or not at all; `ConfigError` if that fails."""
    whole = content.encode() if isinstance(content, str) else content
    try:
        out.mkdir(exist_ok=True)
    except OSError as cause:
        raise ConfigError(f"cannot make the folder {out}: {cause.strerror}") from None
    write_whole(out / name, whole, what="the results", error=ConfigError)
