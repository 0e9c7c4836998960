"""The evaluation, from settings to results."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any, Self

import torch
from rich.console import Group
from rich.text import Text

from decoding.documents.atomic_write import write_atomically
from studies.contract import TrialRecord
from tuner.errors import ConfigError
from tuner.evaluation.contract import Report
from tuner.evaluation.executors.cluster import CLASS, add_node, cluster_of
from tuner.evaluation.executors.settings import ExecutorsEvaluation
from tuner.evaluation.executors.throughput import DeviceLoad, device_loads
from tuner.evaluation.hardening.priced_search import SearchPlace, planted_prices
from tuner.output_paths import check_writable
from tuner.progress import Progress, Unwatched
from tuner.results import stamped
from tuner.search.run import search
from tuner.search.task import prepare
from tuner.search.trial_run import ATTEMPTS, DEVICE
from tuner.tables import figures_table

MOST_SECONDS_LATER = 2.0
"""Seconds after a trial within which a node is killed; about those of a trial."""
SIZES: dict[str, Any] = {"max_new_tokens": 32, "prompts_per_trial": 4}
STUDIES: dict[str, dict[str, Any]] = {
    "conf_layers": {"max_trials": 5, "patience": 5},
    "exit_layer": {"max_trials": 16, "patience": None, "rules": ["fixed"], "max_tokens": 3, "num_promising": 5},
}
"""One study whose trials follow from one another, and one that proposes several at once."""


@dataclass(frozen=True)
class ExecutedSearch:
    """A search that has ended."""

    name: str
    winner: Any
    records: tuple[TrialRecord, ...]
    seconds: float

    def facts(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "winner": self.winner,
            "trials": len(self.records),
            "on_devices": dict(Counter(map(_place, self.records))),
            "redone": sum(each.notes.get(ATTEMPTS, 1) > 1 for each in self.records),
            "failed": [each.reason for each in self.records if each.measurement is None],
            "trial_seconds": sum(each.seconds for each in self.records),
            "seconds": self.seconds,
        }


def _place(record: TrialRecord) -> str:
    if record.repeat_of is not None:
        return "none, as a measurement was taken over"
    return str(record.notes.get(DEVICE, "this process"))


def run_and_write(settings: ExecutorsEvaluation, progress: Progress) -> Report:
    """Run the search in this process, on the devices, and on devices that are killed."""
    if settings.out is not None:
        check_writable(settings.out, what="the results", name="executors.json", error=ConfigError)
    with TemporaryDirectory(prefix="sdtune-executors-") as name:
        place = SearchPlace.made(Path(name))
        progress.stage("in this process")
        found = [_searched(place, "local")]
        with cluster_of(settings.devices) as (cluster, nodes):
            on_ray = {"executor": "ray", "ray_address": cluster.address, "ray_label": CLASS, "repeats": 0}
            progress.stage(f"on {settings.devices} devices")
            found.append(_searched(place, "ray", **on_ray))
            if settings.kills:
                progress.stage("on devices that are killed")
                with KillingNodes(cluster, nodes, settings.kills, settings.seed) as killing:
                    found.append(_searched(place, "ray, killed", killing, **on_ray))
        problems = [each for search in found[1:] for each in problems_of(search, found[0])]
    loads = device_loads(settings.load_trials, settings.most_devices, progress) if settings.load_trials else []
    problems += [f"{each.devices} devices: {each.wrong} trials lost or doubled" for each in loads if each.wrong]
    document = {
        "searches": {each.name: each.facts() for each in found},
        "loads": [each.facts() for each in loads],
        "problems": problems,
    }
    if settings.out is not None:
        whole = stamped(document, torch.device("cpu"))
        write_atomically(settings.out, json.dumps(whole, indent=1).encode(), what="the results", error=ConfigError)
    return Report(_shown(found, loads, problems), succeeded=not problems)


def problems_of(found: ExecutedSearch, wanted: ExecutedSearch) -> list[str]:
    """Return what is wrong with a search on devices, by comparison with the one in a process."""
    problems = []
    if found.winner != wanted.winner:
        problems.append(f"{found.name}: the winner is {found.winner}, not {wanted.winner}")
    counts = [Counter(each.study for each in search.records) for search in (found, wanted)]
    if counts[0] != counts[1]:
        problems.append(f"{found.name}: {dict(counts[0])} trials, not {dict(counts[1])}")
    for record in found.records:
        if record.measurement is None:
            problems.append(f"{found.name}: trial {record.number} of {record.study} failed: {record.reason}")
    return problems


class KillingNodes(Unwatched):
    """Progress of a search whose nodes are killed in turn, one soon after every second trial; another node takes its place.

    A context manager, at whose end all kills are over.
    """

    def __init__(self, cluster: Any, nodes: list[Any], kills: int, seed: int) -> None:
        self._cluster, self._nodes, self._num_nodes = cluster, list(nodes), len(nodes)
        self._left, self._num_trials, self._stream = kills, 0, Random(seed)
        self._killing: list[Timer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for killing in self._killing:
            killing.join()

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Have a node killed at a random moment of the next trials, if it is time and the last kill is over."""
        self._num_trials += 1
        if any(each.is_alive() for each in self._killing):
            return
        while len(self._nodes) < self._num_nodes:
            self._nodes.append(add_node(self._cluster))  # Ray starts nodes from the main thread only
        if self._left and self._num_trials % 2 == 0:
            self._left -= 1
            self._killing.append(Timer(self._stream.uniform(0.0, MOST_SECONDS_LATER), self._kill))
            self._killing[-1].start()

    def _kill(self) -> None:
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)


def _searched(place: SearchPlace, name: str, progress: Progress | None = None, **changes: Any) -> ExecutedSearch:
    """Run one search to its end."""
    folder = name.replace(", ", "-")
    config = place.config(folder, studies=STUDIES, study=list(STUDIES), **SIZES, **changes)
    shown = progress or Unwatched()
    start = time.perf_counter()
    search(replace(prepare(config, shown), prices=planted_prices()), shown)
    seconds = time.perf_counter() - start
    return ExecutedSearch(name, place.winner(folder), tuple(place.records(folder).values()), seconds)


def _shown(found: list[ExecutedSearch], loads: list[DeviceLoad], problems: list[str]) -> Group:
    table = figures_table(
        "searches with planted costs", "search", "trials", "on devices", "redone", "seconds", "winner"
    )
    for each in found:
        facts = each.facts()
        shares = ", ".join(f"{count} on {device}" for device, count in sorted(facts["on_devices"].items()))
        winner = json.dumps(each.winner["draft"])
        table.add_row(each.name, str(facts["trials"]), shares, str(facts["redone"]), f"{each.seconds:.0f}", winner)
    tables = [table]
    if loads:
        columns = ("devices", "trials", "trials/s", "processor ms/trial", "lost or doubled")
        tables.append(figures_table("short trials on devices", *columns))
        for load in loads:
            per_trial = 1000 * load.processor_seconds / load.trials
            rate = f"{load.trials_per_second:.1f}"
            tables[1].add_row(str(load.devices), str(load.trials), rate, f"{per_trial:.1f}", str(load.wrong))
    return Group(*tables, *map(Text, problems or ["no trial is missing, and all winners are equal"]))
