"""A small search with planted costs, in a process of its own that may be killed, or meet a fault.

Trials really decode, and are charged fixed prices in place of seconds, so that undisturbed searches all end with the same winner.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import optuna
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoding.draft_length import Fixed
from decoding.drafts import Draft
from decoding.errors import SdtuneError
from decoding.rounds import Round
from studies.contract import TrialRecord
from tuner.config import SearchConfig
from tuner.evaluation.hardening.faults import Fault
from tuner.evaluation.planted.model import VOCABULARY_SIZE, planted, prompts
from tuner.measuring.clock import PriceList
from tuner.progress import Progress, Unwatched
from tuner.search.run import search
from tuner.search.storage import StudyStore
from tuner.search.task import prepare
from tuner.tracking import opened_store

NUM_LAYERS, SEED = 6, 0
NUM_PROMPTS, PROMPT_LENGTH = 14, 8
WIDENING = 0.05
"""Cost of each further verified position, in plain passes."""
STUDIES: Mapping[str, dict[str, Any]] = {
    "conf_layers": {"max_trials": 5, "patience": 5, "draft_length": Fixed(max_tokens=3).model_dump()},
    "exit_layer": {"max_trials": 4},
}
STORES = ("trials", "tracking", "profile")
"""What a search writes: trials, MLflow's runs and the profile."""
REFUSED = 2


@dataclass(frozen=True)
class SearchPlace:
    """A folder with a model and prompts, and the folders in which searches write."""

    folder: Path
    stores: Mapping[str, Path]
    """Folders of what a search writes, by their names in `STORES`."""

    @classmethod
    def made(cls, folder: Path) -> SearchPlace:
        """Write model and prompts into `folder`."""
        planted(NUM_LAYERS, seed=SEED).model.save_pretrained(folder / "model")
        words = {f"w{index}": index for index in range(VOCABULARY_SIZE)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder / "model")
        texts = [" ".join(f"w{each}" for each in prompt) for prompt in prompts(NUM_PROMPTS, PROMPT_LENGTH, SEED)]
        lines = "".join(f"{json.dumps({'prompt': text})}\n" for text in texts)
        (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")
        return cls(folder, dict.fromkeys(STORES, folder))

    def database(self, store: str) -> Path:
        """SQLite file of the `trials` or of MLflow (`tracking`)."""
        return self.stores[store] / {"trials": "trials.db", "tracking": "mlflow.db"}[store]

    def profile(self, name: str) -> Path:
        """File of the profile that the search writes."""
        return self.stores["profile"] / f"{name}.yaml"

    def config(self, name: str, **changes: Any) -> SearchConfig:
        """Return the configuration of the search `name`, with other settings."""
        return SearchConfig.model_validate(
            {
                "model": str(self.folder / "model"),
                "dataset": str(self.folder / "prompts.jsonl"),
                "max_new_tokens": 10,
                "tuning_prompts": 6,
                "held_out_prompts": 4,
                "prompts_per_trial": 3,
                "finalists": 2,
                "study": list(STUDIES),
                "studies": dict(STUDIES),
                "distill": "never",
                "stock": False,
                "threads": 1,
                "dtype": "float32",
                "heads": self.folder / "heads",
                "experiment": name,
                "storage": f"sqlite:///{self.database('trials')}",
                "tracking_uri": f"sqlite:///{self.database('tracking')}",
                "out": self.profile(name),
                **changes,
            }
        )

    def said(self, name: str) -> str:
        """Return what the last run of the search wrote on stdout and stderr."""
        path = self.said_file(name)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def said_file(self, name: str) -> Path:
        """File of what a run of the search writes on stdout and stderr."""
        return self.folder / f"{name}.txt"

    def winner(self, name: str) -> Any:
        """Return draft and rule of the profile that the search wrote."""
        from decoding.profile import DraftProfile

        profile = DraftProfile.load(self.profile(name))
        return profile.model_dump(mode="json", include={"draft", "draft_length"})

    def records(self, name: str) -> dict[tuple[str, int], TrialRecord]:
        """Return the finished trials on disk, by study and number."""
        path = self.database("trials")
        return finished_trials(f"sqlite:///{path}", name) if path.exists() else {}

    def runs(self, name: str) -> tuple[list[str], dict[tuple[str, int], list[str]]]:
        """Return the status of each parent run of the search in MLflow, and those of the nested runs by study and number."""
        return tracked_runs(f"sqlite:///{self.database('tracking')}", name)

    def start(self, name: str, *, after: int = 0, fault: Fault | None = None) -> BaseProcess:
        """Start the search in a process of its own, which meets a `fault` when it has finished `after` trials."""
        progress = Unwatched() if fault is None else Disturbed(after, fault)
        arguments = self.config(name), progress, self.said_file(name)
        process = _context().Process(target=_run, args=arguments)
        process.start()
        return process


class Disturbed(Unwatched):
    """Progress of a search that meets a fault after a number of finished trials."""

    def __init__(self, after: int, fault: Fault) -> None:
        self._left, self._fault = after, fault

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Count the trial; begin the fault after the last one before it."""
        self._left -= 1
        if self._left == 0:
            self._fault()


def finished_trials(storage: str, experiment: str) -> dict[tuple[str, int], TrialRecord]:
    """Return the finished trials of a search in a storage, by study and number."""
    store = StudyStore(storage, experiment)
    try:
        found = [stored.records() for study in STUDIES if (stored := store.find(study)) is not None]
    finally:
        store.close()
    return {(record.study, record.number): record for records in found for record in records}


def tracked_runs(uri: str, experiment: str) -> tuple[list[str], dict[tuple[str, int], list[str]]]:
    """Return the status of each parent run of a search in MLflow, and those of the nested runs by study and number."""
    parents, nested = list[str](), dict[tuple[str, int], list[str]]()
    with opened_store(uri) as mlflow:
        client = mlflow.MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(experiment)
        for run in [] if found is None else client.search_runs([found.experiment_id], max_results=1000):
            tags = run.data.tags
            if "mlflow.parentRunId" in tags:
                nested.setdefault((tags["sdtune.study"], int(tags["sdtune.trial"])), []).append(run.info.status)
            else:
                parents.append(run.info.status)
    return parents, nested


def _context() -> ForkServerContext:
    """Return a way to start processes that have imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, f"{__package__}.late_imports"])
    return context


def _run(config: SearchConfig, progress: Progress, said: Path) -> None:
    """Run a search to its end: status 0, or 2 with an error in one line."""
    with said.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        task = prepare(config, progress)
        search(replace(task, prices=planted_prices()), progress)
    except SdtuneError as refusal:
        sys.stderr.write(f"sdtune: {refusal}\n")
        sys.exit(REFUSED)


def planted_prices() -> PriceList:
    """Return the prices that every search with planted costs charges."""
    return PriceList(_price)


def _price(draft: Draft, record: Round) -> float:
    """Return the cost of a round in plain passes: a draft step costs half its share of the sublayers, so that a draft wins."""
    if not draft.drafts:
        return 1.0
    skip = draft.skipped(NUM_LAYERS)
    share = 1.0 - (len(skip.skip_attention) + len(skip.skip_mlp)) / (2 * NUM_LAYERS)
    return 1.0 + record.num_drafted * (share / 2 + WIDENING)
