"""The comparison on one task: plain decoding, the baselines and every method's draft, timed in turns in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.bench.contenders import PLAIN
from tuner.config import SearchConfig
from tuner.evaluation.suite.configurations import configuration
from tuner.evaluation.suite.contract import CellSize, Place, hashed, record_of, settings_that_decide
from tuner.evaluation.suite.document import BENCH, TUNING
from tuner.evaluation.suite.result import BenchFound
from tuner.evaluation.suite.search_cell import SearchCell
from tuner.progress import Progress

TUNED_ON = "@"
"""Between a method and the task that its draft was tuned on, in the name of a contender from another task."""
MOST_EXITS_TRIED, PROMPTS_PER_CHOICE = 6, 3


@dataclass(frozen=True)
class BenchCell:
    """One contest on the held-out prompts of a task."""

    place: Place
    model: str
    precision: str
    task: str

    @property
    def id(self) -> str:
        """See `Cell.id`."""
        return f"{self.model}/{self.precision}/{self.task}/{BENCH}"

    def key(self) -> str:
        """See `Cell.key`: also of the drafts that take part, so that a search that succeeds later is measured."""
        drafts = {name: cell.found() for name, cell in self.searches().items()}
        hashes = {name: found and found.candidate_sha256 for name, found in drafts.items()}
        return hashed([settings_that_decide(self.config()), self.baselines, hashes])

    def size(self) -> CellSize:
        """See `Cell.size`."""
        config = self.config()
        num_contenders = 1 + len(self.baselines) + len(self.searches())
        tokens = num_contenders * config.held_out_prompts * config.max_new_tokens
        if "hf-early-exit" in self.baselines:
            tokens += MOST_EXITS_TRIED * PROMPTS_PER_CHOICE * config.max_new_tokens
        return CellSize(tokens)

    def config(self) -> SearchConfig:
        """See `Cell.config`."""
        return configuration(self.place, self.model, self.precision, self.task)

    @property
    def baselines(self) -> tuple[str, ...]:
        """Contenders without a search; plain decoding by the suite's own runner takes part as `plain`."""
        return tuple(name for name in self.place.suite.baselines if name != f"{PLAIN}-{self.config().runner}")

    def searches(self) -> dict[str, SearchCell]:
        """Return the search of every contender: `method`, and `method@task` for drafts tuned on another task."""
        suite = self.place.suite
        own = {method: self._search(self._searched_task, method) for method in suite.methods}
        others = [task for task in suite.tasks if task != self.task]
        return own | {f"{m}{TUNED_ON}{task}": self._search(task, m) for m in suite.transfer for task in others}

    def found(self) -> BenchFound | None:
        """Return the result, or None if there is none."""
        record = record_of(self.place, self)
        return BenchFound.model_validate(record.result) if record is not None and record.is_done else None

    def run(self, progress: Progress) -> dict[str, Any]:
        """Hold the contest and return every sample.

        Raises `DatasetError` if a prompt that is measured is a tuning prompt of the searches.
        """
        from tuner.evaluation.suite.contest import hold

        tuned_on = [configuration(self.place, self.model, self.precision, self._searched_task)]
        found = hold(self.config(), self.baselines, dict(self._entrants()), progress, tuned_on=tuned_on)
        left_out = {**dict(self._without_result()), **found.left_out}
        same = {**found.same, **dict.fromkeys(self._kept_plain(), PLAIN)}
        return found.model_copy(update={"left_out": left_out, "same": same}).model_dump(mode="json")

    @property
    def _searched_task(self) -> str:
        """The task on which the methods are searched: this one, or the data set for all tasks."""
        return self.task if self.place.suite.tuning is None else TUNING

    def _search(self, task: str, method: str) -> SearchCell:
        precision = self.place.suite.search_precision or self.precision
        return SearchCell(self.place, self.model, precision, task, method)

    def _entrants(self) -> Iterator[tuple[str, Path]]:
        """Yield the profile of each draft that takes part."""
        for name, cell in self.searches().items():
            found = cell.found()
            if found is not None and found.is_measurable:
                yield name, cell.candidate

    def _without_result(self) -> Iterator[tuple[str, str]]:
        """Yield the contenders whose search has no result, with the reasons."""
        for name, cell in self.searches().items():
            if cell.found() is None:
                yield name, cell.reason()

    def _kept_plain(self) -> Iterator[str]:
        """Yield the contenders whose search found nothing better than plain decoding."""
        for name, cell in self.searches().items():
            found = cell.found()
            if found is not None and not found.is_measurable:
                yield name
