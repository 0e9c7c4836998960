"""`sdtune evaluate suite`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from decoding.documents.strict_yaml import Duration
from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFolder

if TYPE_CHECKING:
    from tuner.progress import Progress


class SuiteEvaluation(Evaluation):
    """Measure methods on models and tasks, and put them into one table.

    A YAML file names models, precisions, tasks (data sets), methods (searches) and baselines; docs/suite.md describes it.
    Every method is searched for on every task. Then plain decoding, the baselines and the drafts of all methods continue the
    same held-out prompts in turns, in one process: decode and end-to-end speed-ups by task and overall (geometric mean),
    acceptance length, identical sequences. `transfer` names methods whose drafts are measured on the other tasks too.

    Each search and each comparison is a cell with a process and a record of its own. A cell that fails is reported, and the
    others go on. The same command resumes: finished cells are not run again, and a search goes on where it stopped. The
    folder then holds suite.txt, suite.csv (one line per task and method) and suite.json. Exit status 1 if a cell has no result.

    \b
    Examples:
      sdtune evaluate suite --config configs/suites/demo.yaml --out suite
      sdtune evaluate suite --config configs/suites/real_model.yaml --out real --dry-run
    """

    is_resumable: ClassVar[bool] = True

    config: Path = Field(description="YAML file of the suite.", json_schema_extra={**EVALUATION, "metavar": "FILE"})
    only: tuple[str, ...] = Field(
        (),
        description="Cells to run, such as '*/float32/math/*'; repeatable; default: all.",
        json_schema_extra={**EVALUATION, "metavar": "PATTERN"},
    )
    sitting: Duration | None = Field(
        None,
        description="Begin no further cell after this time, e.g. 2h; the same command goes on later.",
        json_schema_extra={**EVALUATION, "metavar": "DURATION"},
    )
    dry_run: bool = Field(
        False, description="Show the cells with an estimate of their time; run nothing.", json_schema_extra=EVALUATION
    )
    in_process: bool = Field(
        False,
        description="Run the cells in this process: faster for tiny models, but memory adds up.",
        json_schema_extra=EVALUATION,
    )
    out: ResultsFolder = Path("suite")

    @property
    def results(self) -> Path | None:
        """See `Evaluation.results`: a dry run writes nothing."""
        return None if self.dry_run else self.out

    def run(self, progress: Progress) -> Report:
        """Run the cells without a result and return the tables of all."""
        from tuner.evaluation.suite.run import run_and_write

        shown, width, succeeded = run_and_write(self, progress)
        return Report(shown, width=width, succeeded=succeeded)
