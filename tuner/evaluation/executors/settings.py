"""`sdtune evaluate executors`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFile
from tuner.fields import Seed

if TYPE_CHECKING:
    from tuner.progress import Progress


class ExecutorsEvaluation(Evaluation):
    """Compare a search on several Ray devices with the same search in one process, while nodes are killed.

    A small search with planted costs runs in this process, then on a Ray cluster that is started on this machine, whose nodes count
    as devices, and then once more while nodes are killed at random moments and new ones take their place. Each search must end with
    the same winner, without a failed trial, and with each trial on record once. At the end, short trials that measure nothing
    run on 1, 2, 4 ... devices, to tell how many a second a search can hand out. Needs the extra `ray`. Exit status 1 if any of this
    fails.

    \b
    Example:
      sdtune evaluate executors --out executors.json
    """

    devices: int = Field(2, ge=2, description="Nodes, each of which is a device.", json_schema_extra=EVALUATION)
    kills: int = Field(2, ge=0, description="Nodes that are killed.", json_schema_extra=EVALUATION)
    load_trials: int = Field(
        1000, ge=0, description="Short trials on each number of devices.", json_schema_extra=EVALUATION
    )
    most_devices: int = Field(16, ge=1, description="Most devices of the short trials.", json_schema_extra=EVALUATION)
    seed: Seed = 0
    out: ResultsFile = None

    def run(self, progress: Progress) -> Report:
        """Run the searches, write the JSON file if one is named, and return the table."""
        from tuner.evaluation.executors.run import run_and_write

        return run_and_write(self, progress)
