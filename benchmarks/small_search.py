"""A small search with planted costs, in a process of its own that may be killed, or meet a fault.

Trials really decode, and are charged fixed prices in place of seconds. A search of short trials is told all skip sets beforehand,
and what it tries else is drawn: its winner depends on prices alone, whichever process measures what.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import torch
from optuna.trial import TrialState
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.faults import Fault
from benchmarks.planted_model import VOCABULARY_SIZE, planted, prompts
from decoding.draft_length import Fixed
from decoding.drafts import Draft, LayerSkip
from decoding.errors import SdtuneError
from decoding.profile import DraftProfile
from decoding.rounds import Round
from studies.contract import Candidate, TrialRecord
from tuner.config import SearchConfig
from tuner.measuring.contender import PriceList
from tuner.progress import Progress
from tuner.search import several
from tuner.search.decision import WINNERS
from tuner.search.outcome import write_stored
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
SHORT_TRIALS = "random"
"""The study of a search of many short trials, which several processes run together: it waits for no trial's result."""
STORES = ("trials", "tracking", "profile")
"""What a search writes: trials, MLflow's runs and the profile."""
REFUSED = 2
LIMIT_SECONDS = 900
"""After this a search counts as hanging, also on a busy machine."""
PRELOADED = ["benchmarks.small_search", "benchmarks.late_imports"]
"""What the server imports once from which processes are forked."""

Records = Mapping[tuple[str, int], TrialRecord]
"""Finished trials by study and number."""


@dataclass
class CheckOutcome:
    """Cases of one check: their number, and a line for each that went wrong."""

    name: str
    num_cases: int = 0
    failures: list[str] = field(default_factory=list)

    def count(self, failure: str | None = None, *, of: str = "") -> None:
        """Count a case, with what went wrong in it, if anything."""
        self.num_cases += 1
        if failure is not None:
            self.failures.append(f"{of}: {failure}" if of else failure)

    @property
    def row(self) -> dict[str, Any]:
        return {"check": self.name, "cases": self.num_cases, "failures": len(self.failures)}


@dataclass(frozen=True)
class SearchPlace:
    """A folder with a model and prompts, and the folders in which searches write."""

    folder: Path
    stores: Mapping[str, Path]
    """Folders of what a search writes, by their names in `STORES`."""
    short_trials: int | None = None
    """Trials of a search that drafts one token; None for the few of `STUDIES`."""
    storage: str | None = None
    """Database of the trials; default: a SQLite file."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of all searches."""

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

    @property
    def tracking_url(self) -> str:
        return f"sqlite:///{self.database('tracking')}"

    def profile(self, name: str) -> Path:
        return self.stores["profile"] / f"{name}.yaml"

    @property
    def studies(self) -> Mapping[str, dict[str, Any]]:
        if self.short_trials is None:
            return STUDIES
        space = {"kinds": ["skip_set"], "whole_blocks": True, "bits": []}
        space |= {"rules": ["fixed"], "max_tokens": 1, "candidates": skip_sets()[: self.short_trials]}
        return {SHORT_TRIALS: {**space, "max_trials": self.short_trials}}

    @property
    def storage_url(self) -> str:
        return self.storage or f"sqlite:///{self.database('trials')}"

    def config(self, name: str, **changes: Any) -> SearchConfig:
        """Return the configuration of the search `name`, with other settings."""
        return SearchConfig.model_validate(
            {
                "model": str(self.folder / "model"),
                "dataset": str(self.folder / "prompts.jsonl"),
                "max_new_tokens": 10,
                "tuning_prompts": 6,
                "held_out_prompts": 4,
                "prompts_per_trial": 3 if self.short_trials is None else 2,
                "finalists": 2 if self.short_trials is None else 4,
                "study": list(self.studies),
                "studies": dict(self.studies),
                "distill": "never",
                "stock": False,
                "threads": 1,
                "dtype": "float32",
                "heads": self.folder / "heads",
                "experiment": name,
                "storage": self.storage_url,
                "tracking_uri": self.tracking_url,
                "out": self.profile(name),
                **self.changes,
                **changes,
            }
        )

    def said(self, name: str) -> str:
        """Return what the last run of the search wrote on stdout and stderr."""
        path = self.folder / f"{name}.txt"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def records(self, name: str) -> Records:
        if self.storage is None and not self.database("trials").exists():
            return {}
        return finished_trials(self.storage_url, name, tuple(self.studies))

    def start(self, name: str, *, said: str | None = None, after: int = 0, fault: Fault | None = None) -> BaseProcess:
        """Start the search in a process of its own, which meets a `fault` when it has finished `after` trials.

        `said` names what it writes, where several processes run one search.
        """
        progress = Progress() if fault is None else Disturbed(after, fault)
        return self.process(said or name, planted_search, self.config(name), progress)

    def process(self, said: str, work: Callable[..., object], *arguments: Any) -> BaseProcess:
        """Start a process that does `work`; what it writes is `said`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(target=_run, args=(self.folder / f"{said}.txt", work, *arguments))
        process.start()
        return process

    def finish(self, name: str) -> str | None:
        """Run the search to its end; return what went wrong."""
        process = self.start(name)
        return self.failure(name, status_of(process))

    def failure(self, name: str, ended: int | None) -> str | None:
        """Return how a search failed that ended with the status `ended`, or None."""
        if ended is None:
            return f"no end after {LIMIT_SECONDS} s"
        return None if ended == 0 else f"status {ended}: {self.said(name)[-300:]}"

    def winner(self, name: str) -> Any:
        return winner_of(self.profile(name))

    def difference(self, name: str, known: Records, undisturbed: str) -> str | None:
        """Return how a resumed search differs from the `undisturbed` one, or None.

        `known` are its trials that were finished before.
        """
        records, wanted = self.records(name), (self.records(undisturbed), self.winner(undisturbed))
        stores = self.storage_url, self.tracking_url, name
        return difference(known, records, self.winner(name), *wanted, *stores)


class Disturbed(Progress):
    """Progress of a search that meets a fault after a number of finished trials."""

    def __init__(self, after: int, fault: Fault) -> None:
        self._left, self._fault = after, fault

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Count the trial; begin the fault after the last one before it."""
        self._left -= 1
        if self._left == 0:
            self._fault()


def status_of(process: BaseProcess) -> int | None:
    """Return the exit status of a search once it has ended; None if it had to be killed, as it hung."""
    process.join(LIMIT_SECONDS)
    if process.exitcode is not None:
        return process.exitcode
    process.kill()
    process.join()
    return None


def winner_of(profile: Path) -> Any:
    """Return draft and rule of a profile."""
    return DraftProfile.load(profile).model_dump(mode="json", include={"draft", "draft_length"})


def finished_trials(storage: str, experiment: str, studies: Sequence[str] = tuple(STUDIES)) -> Records:
    """Return the finished trials of a search in a storage."""
    store = StudyStore(storage, experiment)
    try:
        found = [stored.records() for study in studies if (stored := store.find(study)) is not None]
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


def difference(
    known: Records,
    records: Records,
    winner: Any,
    wanted: Records,
    wanted_winner: Any,
    storage: str,
    tracking: str,
    experiment: str,
) -> str | None:
    """Return how a finished search differs from an undisturbed one, whose records and winner are `wanted`, or None.

    `known` are trials that were finished before the last disturbance.
    """
    if keys := lost(known, records):
        return f"finished trials are lost or changed: {keys}"
    if keys := doubled(records):
        return f"trials measured a candidate again: {keys}"
    runs = tracked_runs(tracking, experiment)
    problem = unlike(records, wanted) or unfinished(storage, experiment) or untrue(*runs, records)
    if problem is None and (count := num_results(storage, experiment)) != 1:
        return f"winners that were confirmed: {count}"
    if problem is None and winner != wanted_winner:
        return f"another winner: {winner}, undisturbed {wanted_winner}"
    return problem


def num_results(storage: str, experiment: str) -> int:
    """Return how many winners a search has confirmed."""
    store = StudyStore(storage, experiment)
    try:
        return len(store.noted(WINNERS) or [])
    finally:
        store.close()


def unfinished(storage: str, experiment: str) -> str | None:
    """Return which trials of a finished search still wait or run, or None."""
    opened = optuna.storages.RDBStorage(storage)
    states = (TrialState.WAITING, TrialState.RUNNING)
    names = [name for name in optuna.get_all_study_names(opened) if name.rpartition("/")[0] == experiment]
    left = [
        f"{name} {trial.number} ({trial.state.name})"
        for name in names
        for trial in optuna.load_study(study_name=name, storage=opened).get_trials(deepcopy=False, states=states)
    ]
    opened.remove_session()
    opened.engine.dispose()
    return f"trials that never ended: {', '.join(left)}" if left else None


def lost(before: Records, after: Records) -> list[tuple[str, int]]:
    """Return which finished trials of `before` are missing or different in `after`."""
    return [key for key, record in before.items() if after.get(key) != record]


def doubled(records: Records) -> list[tuple[str, int]]:
    """Return which trials measured a candidate that an earlier one of their study had measured."""
    first: dict[tuple[str, str], tuple[str, int]] = {}
    measured = {key: each for key, each in records.items() if each.repeat_of is None}
    return [key for key, each in measured.items() if first.setdefault((key[0], each.candidate.key), key) != key]


def unlike(records: Records, undisturbed: Records) -> str | None:
    """Return in which study the number of finished trials differs from an undisturbed search's, or None."""
    for study in {study for study, _ in undisturbed}:
        counts = [sum(each == study for each, _ in found) for found in (records, undisturbed)]
        if counts[0] != counts[1]:
            return f"{counts[0]} finished trials of {study}, and {counts[1]} undisturbed"
    return None


def untrue(parents: list[str], nested: Mapping[tuple[str, int], list[str]], records: Records) -> str | None:
    """Return what MLflow's runs of a finished search say wrongly of its trials, or None."""
    if parents != ["FINISHED"]:
        return f"parent runs in MLflow: {parents}"
    if doubled := [key for key, statuses in nested.items() if len(statuses) > 1]:
        return f"trials with more than one run in MLflow: {doubled}"
    if set(nested) != set(records):
        return f"MLflow has the trials {sorted(nested)}, the storage {sorted(records)}"
    if open_runs := [key for key, (status,) in nested.items() if status == "RUNNING"]:
        return f"runs in MLflow that never ended: {open_runs}"
    return None


def _run(said: Path, work: Callable[..., object], *arguments: Any) -> None:
    """Do the work of a process: status 0, or 2 with an error in one line."""
    with said.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        work(*arguments)
    except SdtuneError as refusal:
        sys.stderr.write(f"sdtune: {refusal}\n")
        sys.exit(REFUSED)


def planted_search(config: SearchConfig, progress: Progress) -> None:
    """Run a search with planted costs, here or on the nodes of a Ray cluster."""
    if config.ray is not None:
        with mock.patch.object(several, "_joined", _planted_on_ray):
            several.search_on_ray(config, progress)
        write_stored(config)
        return
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    search(replace(prepare(config, progress), prices=planted_prices()), progress)


def _planted_on_ray(settings: dict[str, Any], folder: str) -> None:
    os.chdir(folder)
    planted_search(SearchConfig.model_validate(settings), Progress())


def skip_sets() -> list[dict[str, Any]]:
    """Return all candidates that skip some blocks, to draft one token: the usual one, which comes anyhow, then good and bad."""
    chosen = [blocks for size in range(1, NUM_LAYERS) for blocks in combinations(range(NUM_LAYERS), size)]
    random.Random(SEED).shuffle(chosen)
    usual = tuple(range(1, NUM_LAYERS - 1, 2))
    rule = Fixed(max_tokens=1)
    found = [Candidate(draft=LayerSkip.blocks(blocks), draft_length=rule) for blocks in dict.fromkeys([usual, *chosen])]
    return [each.model_dump(mode="json") for each in found]


def planted_prices() -> PriceList:
    """Return the prices that every search with planted costs charges."""
    return PriceList(_price)


def _price(draft: Draft, record: Round) -> float:
    """Return the cost of a round in plain passes: a draft step costs half its share of the blocks, so that a draft wins.

    Blocks cost a little more the later they are: no two skip sets cost the same, so that no winner is drawn by lot.
    """
    if not draft.drafts:
        return 1.0
    skip = draft.skipped(NUM_LAYERS)
    costs = [1.0 + 2.0**block / 1000 for block in range(NUM_LAYERS)]
    skipped = sum(costs[block] for block in (*skip.skip_attention, *skip.skip_mlp)) / 2
    return 1.0 + record.num_drafted * ((1.0 - skipped / sum(costs)) / 2 + WIDENING)
