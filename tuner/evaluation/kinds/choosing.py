"""The rows of the table: the best setting of each family and combination by prediction on the tuning prompts."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from decoding.drafts import BitWidth, Draft
from studies.contract import Candidate
from studies.prediction.contract import Prediction
from studies.prediction.pools import best_with_tree, lookups_before
from studies.prediction.predictor import COPYING, Predictor
from tuner.evaluation.kinds.document import KindRow
from tuner.evaluation.kinds.families import LEAVES, LOOKUP, DraftFamily, Offer, families_of, precision_name
from tuner.evaluation.kinds.figures import mean_over_tasks
from tuner.progress import Progress
from tuner.search.task import Task

SHORTLIST = 3
"""Drafts of a family that are predicted on all tuning texts, after a rating on a part of them."""
NUM_QUANTISED = 2
"""Drafts of a family that are tried in each precision: each takes a recording of its own."""


@dataclass(frozen=True)
class RowChooser:
    """Chooses settings by prediction. `rating` has read a part of the tuning texts that `predictor` has read."""

    task: Task
    offer: Offer
    bits: Sequence[BitWidth]
    only: Collection[str]
    """Kinds that a row may use; empty for all."""
    rating: Predictor
    predictor: Predictor
    tasks: Mapping[str, Sequence[int]]
    """Indices of the tuning texts of each task."""

    def rows(self, progress: Progress) -> list[KindRow]:
        """Return a row for each family, alone and combined."""
        alone: list[KindRow] = []
        for family in families_of(self.offer):
            progress.stage(f"choosing settings by prediction: {family.name}")
            alone += self._alone(family)
        progress.stage("choosing settings by prediction: combinations")
        looked_up = [self._after_lookup(row) for row in alone if row.candidate.draft.takes_lookup]
        found = looked_up if self._wants({LOOKUP}) else []
        leaves = [row for rows in (alone, found) for row in self._with_leaves(rows)] if self._wants({LEAVES}) else []
        return [*alone, *found, *leaves]

    def _wants(self, uses: Collection[str]) -> bool:
        return not self.only or set(uses) <= set(self.only)

    def _alone(self, family: DraftFamily) -> Iterator[KindRow]:
        """Yield the best draft of a family, and the best in each precision."""
        if not self._wants(family.uses):
            return
        start = time.perf_counter()
        drafts = self._shortlist(family.propose(self.rating))
        rating_seconds = time.perf_counter() - start
        if drafts and not family.only_quantised:
            yield self._row(family.name, family.uses, drafts, rating_seconds)
        for bits in self.bits:
            uses = family.uses | {precision_name(bits)}
            quantised = [draft.with_bits(bits) for draft in drafts[:NUM_QUANTISED] if draft.takes_bits]
            if quantised and self._wants(uses):
                name = precision_name(bits) if family.only_quantised else f"{precision_name(bits)} {family.name}"
                yield self._row(name, uses, quantised)

    def _shortlist(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Return the best few drafts by the rating; copies are predicted without passes, so all of them are returned."""
        if len(drafts) <= SHORTLIST or not all(draft.runs_model for draft in drafts):
            return list(drafts)
        self.rating.record(drafts)
        return [each.draft for each in self.rating.best_first(drafts)[:SHORTLIST]]

    def _after_lookup(self, row: KindRow) -> KindRow:
        start = time.perf_counter()
        (draft,) = lookups_before(self.predictor, [row.candidate.draft], 1)
        seconds = time.perf_counter() - start
        return self._row(f"lookup, {row.name}", {*row.uses, LOOKUP}, [draft], seconds)

    def _with_leaves(self, rows: Sequence[KindRow]) -> Iterator[KindRow]:
        """Yield the row with the best prediction that takes side leaves, with the leaves that promise most."""
        takers = [row for row in rows if row.candidate.draft.takes_tree]
        if not takers or not (self.predictor.takes_trees and self.offer.target.takes_trees):
            return
        best = max(takers, key=lambda row: row.predicted)
        start = time.perf_counter()
        found = best_with_tree(self.predictor, best.candidate.draft)
        yield self._row(f"{best.name}, leaves", {*best.uses, LEAVES}, [found.draft], time.perf_counter() - start)

    def _row(self, name: str, uses: Collection[str], drafts: Sequence[Draft], seconds: float = 0.0) -> KindRow:
        """Return the row of the best of `drafts` with its best rule; `seconds` were spent on finding them."""
        start = time.perf_counter()
        self.predictor.record(drafts)
        best = self.predictor.best_first(drafts)[0]
        seconds += time.perf_counter() - start
        by_task = self._by_task(best)
        return KindRow(
            name=name,
            uses=tuple(sorted(uses)),
            candidate=Candidate(draft=best.draft, draft_length=best.rule),
            predicted=mean_over_tasks(by_task.values()),
            predicted_by_task=by_task,
            predicted_tokens_per_round=best.replayed.tokens / best.replayed.rounds,
            draft_step=self.predictor.costs(best.draft).draft_step if best.draft.runs_model else COPYING,
            choosing_seconds=seconds,
            distillation_seconds=self._distillation_seconds(best.draft),
        )

    def _by_task(self, prediction: Prediction) -> dict[str, float]:
        parts = self.predictor.parts
        return {
            task: prediction.replayed.speedup_on([part for index in indices for part in parts[index]])
            for task, indices in self.tasks.items()
        }

    def _distillation_seconds(self, draft: Draft) -> float:
        """Return the seconds that the head of a draft took to train; heads that were trained together share them."""
        if not draft.has_head:
            return 0.0
        folder = self.task.head_folder
        layers = [layer for layer, head in self.offer.heads.items() if set(head.files) & set(draft.files)]
        return folder.distillation_seconds(layers, feature_head=draft.drafts_on)


def to_measure(rows: Sequence[KindRow], num_combinations: int) -> list[KindRow]:
    """Return every kind alone, and the combinations with the best predictions.

    For each kind the best combination without it is among them, so that what the kind adds can be measured.
    """
    combined = sorted((row for row in rows if row.is_combined), key=lambda row: -row.predicted)
    wanted = {row.name for row in combined[:num_combinations]}
    if num_combinations:
        for kind in {use for row in rows for use in row.uses}:
            without = next((row.name for row in combined if kind not in row.uses), None)
            wanted |= {without} if without else set()
    return [row for row in rows if not row.is_combined or row.name in wanted]
