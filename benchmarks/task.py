"""The problem of a search as benchmarks use it: its configuration from the command line, its prompts and exit heads.

No heads are trained, no trials stored and no profile written.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import torch
import yaml

from decoding.drafts import EarlyExit
from studies.contract import TrialRecord
from tuner.config import SearchConfig, load_config
from tuner.errors import ConfigError
from tuner.progress import Progress
from tuner.results import public_name
from tuner.search.task import Task, token_ids


class Printed(Progress):
    """Progress as lines on standard error."""

    def stage(self, name: str, total: int | None = None) -> None:
        """See `Progress.stage`."""
        self.say(name if total is None else f"{name} ({total})")

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """See `Progress.trial`."""
        self.say(f"trial {record.number}: {record.state}")

    def say(self, line: str) -> None:
        """See `Progress.say`."""
        print(line, file=sys.stderr, flush=True)


def arguments(description: str | None, *, settings: bool = False) -> ArgumentParser:
    """Return a parser with the options of every benchmark; with `settings`, of one that takes those of a command."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of all figures and samples")
    parser.add_argument("--threads", type=_use_threads, help="CPU threads of torch")
    if settings:
        parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; repeatable")
    return parser


def _use_threads(text: str) -> int:
    torch.set_num_threads(int(text))
    return int(text)


def search_arguments(description: str | None) -> ArgumentParser:
    """Return a parser with the options of a benchmark on the problem of a search; `read_config` reads them."""
    parser = arguments(description, settings=True)
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration of a search")
    parser.add_argument("--model")
    parser.add_argument("--dataset")
    return parser


def settings_of(args: Namespace) -> dict[str, Any]:
    """Return what --set gives."""
    return {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in args.set)}


def read_config(args: Namespace, **fixed: Any) -> SearchConfig:
    """Return the configuration of the options of `search_arguments`; `fixed` settings win."""
    folder = (args.json or Path("benchmark.json")).parent
    folder.mkdir(parents=True, exist_ok=True)
    flags = {name: value for name in ("model", "dataset", "threads") if (value := getattr(args, name)) is not None}
    # Where a profile would be: checked, never written.
    own = {"distill": "never", "out": folder / "profile.yaml"}
    config = load_config(args.config, {**flags, **settings_of(args), **own, **fixed})
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.batch_size > 1:
        raise ConfigError("this benchmark decodes prompts one by one: leave out batch_size")
    return config


def facts_of(task: Task) -> dict[str, Any]:
    """Return the facts that figures depend on; models and data are named by the last part of their paths."""
    config = task.config
    return {
        "model": public_name(config.model),
        "dataset": public_name(config.dataset),
        "prompts": task.prompts.fingerprint,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "runner": task.target.runner.name,
        "exact_width": task.target.runner.exact_width,
        "seed": config.seed,
        "dtype": str(task.target.dtype).removeprefix("torch."),
    }


def head_drafts(task: Task) -> dict[int, EarlyExit]:
    """Return the drafts of all exits that have a head in the folder of heads, by exit layer.

    Raises `ExitHeadError` for heads that do not belong to the task, or were trained on held-out prompts.
    """
    return task.head_folder.drafts(range(1, task.target.num_layers), held_out=token_ids(task.prompts.held_out))
