"""The search of one method on one task: a profile, and the best draft of the method, whether or not it beats plain decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config import SearchConfig
from tuner.errors import SearchError
from tuner.evaluation.suite.configurations import configuration, in_folder, wants_heads
from tuner.evaluation.suite.contract import CellSize, Place, hashed, record_of, settings_that_decide, training_settings
from tuner.evaluation.suite.result import SearchFound
from tuner.progress import Progress

if TYPE_CHECKING:
    from studies.contract import TrialRecord
    from tuner.search.outcome import SearchResult
    from tuner.search.task import Task

CANDIDATE = "candidate.yaml"
"""File of the method's best draft as a profile, beside the profile that the search wrote."""


@dataclass(frozen=True)
class SearchCell:
    """One search, as `sdtune search` runs it, with its own trials."""

    place: Place
    model: str
    precision: str
    task: str
    method: str

    @property
    def id(self) -> str:
        """See `Cell.id`."""
        return f"{self.model}/{self.precision}/{self.task}/{self.method}"

    @property
    def folder(self) -> Path:
        """Folder of its trials and profiles: another one for other settings, as trials belong to theirs."""
        return self.place.records.folder(self.id) / self.key()

    @property
    def candidate(self) -> Path:
        """Profile of the method's best draft."""
        return self.folder / CANDIDATE

    def key(self) -> str:
        """See `Cell.key`: also of the training of exit heads, for a method that drafts with them."""
        config = self._settings()
        return hashed([settings_that_decide(config), training_settings(config) if wants_heads(config) else None])

    def size(self) -> CellSize:
        """See `Cell.size`: plain decoding of all prompts, and the trials if their number is the only limit."""
        config = self._settings()
        plain = (config.tuning_prompts + config.held_out_prompts) * config.max_new_tokens
        limit, trials = config.timeout, config.trials
        if limit is None and trials is not None:
            per_trial = 2 * config.samples_per_trial * config.max_new_tokens
            return CellSize(plain + trials * len(config.study) * per_trial)
        return CellSize(plain, seconds=limit or 0.0, is_limited=limit is not None)

    def config(self) -> SearchConfig:
        """See `Cell.config`. Heads come from the cell of the model's heads, and the contest compares with stock generation."""
        config = in_folder(self._settings(), self.folder, self.id.replace("/", "-"))
        return config.model_copy(update={"distill": "never", "stock": False})

    def found(self) -> SearchFound | None:
        """Return the result, or None if the search has none."""
        record = record_of(self.place, self)
        return SearchFound.model_validate(record.result) if record is not None and record.is_done else None

    def reason(self) -> str:
        """Return why the search has no result."""
        record = record_of(self.place, self)
        return "its search has not run" if record is None else f"its search failed: {record.cause}"

    def run(self, progress: Progress) -> dict[str, Any]:
        """Run or resume the search, and write its profile and the method's best draft."""
        from tuner.search.run import InterruptedSearchError, search
        from tuner.search.task import prepare

        self.folder.mkdir(parents=True, exist_ok=True)
        task = prepare(self.config(), progress)
        if task.missing_heads and wants_heads(self._settings()):
            raise SearchError(f"exit heads are missing in {task.config.heads}: see the cell {self.model}/heads")
        try:
            result = search(task, progress)
        except InterruptedSearchError:
            raise KeyboardInterrupt from None
        return self._described(task, result).model_dump(mode="json")

    def _settings(self) -> SearchConfig:
        return configuration(self.place, self.model, self.precision, self.task, self.method)

    def _described(self, task: Task, result: SearchResult) -> SearchFound:
        """Save the method's best draft and return what was found."""
        from decoding.exit_heads import file_sha256

        best = best_of_last_study(task.config, result)
        drafts = best.candidate.draft.drafts
        if drafts:
            _save(task, best, self.candidate)
        is_winner = best.candidate.key == result.winner.candidate.key
        rule = f"; {best.candidate.draft_length.describe()}" if drafts else ""
        return SearchFound(
            study=best.study,
            draft=f"{best.candidate.draft.describe()}{rule}",
            is_measurable=drafts,
            claims_speedup=is_winner and result.profile.draft.drafts,
            confirmed=result.confirmed.speedup_interval() if is_winner else None,
            candidate_sha256=file_sha256(self.candidate) if drafts else None,
            trials=result.cost.num_trials,
            search_seconds=result.cost.search_seconds,
            distillation_seconds=result.cost.distillation_seconds,
            studies=dict(result.studies),
        )


def best_of_last_study(config: SearchConfig, result: SearchResult) -> TrialRecord:
    """Return the winner if it is of the last study, else that study's best trial. Raises `SearchError` if it has none."""
    from studies.contract import best_trials
    from tuner.search.storage import StudyStore

    study = config.study[-1]
    if result.winner.study == study:
        return result.winner
    stored = StudyStore(config.storage, config.resolved_experiment()).find(study)
    best = best_trials(stored.records() if stored is not None else [], 1)
    if not best:
        raise SearchError(
            f"no trial of the study {study} was completed: {result.studies.get(study, 'it did not begin')}"
        )
    return best[0]


def _save(task: Task, best: TrialRecord, path: Path) -> None:
    """Write a candidate as a profile, with its exit head beside it."""
    from decoding.profile import DraftProfile
    from tuner.inputs.identity import target_identity

    DraftProfile(
        name=path.stem,
        target=target_identity(task.loaded, task.target),
        draft=task.head_folder.copy_beside(best.candidate.draft, path),
        draft_length=best.candidate.draft_length,
        decoding=task.decoding,
    ).save(path)
