"""`sdtune evaluate searches`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from decoding.documents.strict_yaml import Duration
from studies.searches.registry import compared_searches
from tuner.evaluation.contract import EVALUATION, Report, ResultsFolder, SearchEvaluation
from tuner.fields import Names

if TYPE_CHECKING:
    from tuner.progress import Progress

USUAL_BUDGET = 120.0
"""Seconds of a run, unless another limit is given."""


class SearchesEvaluation(SearchEvaluation):
    """Compare searches: the same problem, the same budget, several seeds.

    Each search runs as in `sdtune search`, until its budget is spent or it ends by itself. A seed orders the tuning prompts
    and seeds the sampler. Then the best candidate of any search at any time is decoded on held-out prompts, all side by
    side: the figures are real speed-ups, not what a search believed. Preparation before the first trial counts as well.

    A search is a study with its settings (`studies:` in the file), or a method of the study skip_sets; swift_batched is
    swift, measuring after every 100 candidates only.

    The folder then holds searches.csv (one line per trial), searches.png (speed-up against budget spent) and searches.json
    (everything). Trials and samples are on disk: the same command resumes, and one with more seeds, searches, tokens or
    trials runs only what is missing. Another --budget needs another folder, as searches may plan by it.

    \b
    Example:
      sdtune evaluate searches --config configs/demo.yaml --search joint --search swift --budget 60s
    """

    is_resumable: ClassVar[bool] = True

    search: Names = Field(
        (),
        description=f"Searches to compare: {', '.join(compared_searches())}; repeatable; default: all.",
        json_schema_extra={**EVALUATION, "metavar": "NAME"},
    )
    seeds: int = Field(3, ge=1, description="Runs of each search.", json_schema_extra=EVALUATION)
    budget: Duration | None = Field(
        None,
        description="Time of each run, e.g. 90s, 10m; default: 120s, unless another limit is given.",
        json_schema_extra={**EVALUATION, "metavar": "DURATION"},
    )
    budget_tokens: int | None = Field(
        None, ge=1, description="Tokens that each run may decode.", json_schema_extra=EVALUATION
    )
    budget_trials: int | None = Field(None, ge=1, description="Trials of each run.", json_schema_extra=EVALUATION)
    out: ResultsFolder = Path("searches")

    def run(self, progress: Progress) -> Report:
        """Run what is missing, measure the best candidates, write the report, and return the table."""
        from tuner.evaluation.searches.compare import compare_searches
        from tuner.evaluation.searches.report import searches_table, write_report
        from tuner.evaluation.searches.runs import Limits

        is_unlimited = self.budget is None and self.budget_tokens is None and self.budget_trials is None
        limits = Limits(
            seconds=USUAL_BUDGET if is_unlimited else self.budget, tokens=self.budget_tokens, trials=self.budget_trials
        )
        found = compare_searches(
            self.config, self.search, num_seeds=self.seeds, limits=limits, out=self.out, progress=progress
        )
        write_report(found, self.out)
        return Report(searches_table(found), width=130)
