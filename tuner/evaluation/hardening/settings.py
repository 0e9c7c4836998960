"""`sdtune evaluate hardening`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFile
from tuner.fields import Seed

if TYPE_CHECKING:
    from tuner.progress import Progress


class HardeningEvaluation(Evaluation):
    """Test that nothing breaks: bad input, damaged documents and data, random texts, threads, killed searches, failing stores.

    Bad input: garbage for every option of every command, each in a process of its own, must end with status 2 and one line, with
    nothing written. Damaged profiles, configurations and data sets must be read or refused in one line. Texts of random models,
    drafts and rules must be those of transformers' `generate`. Threads that share a decoder must write the same texts.

    Searches with planted costs are killed at random moments and resumed: no finished trial may be lost or doubled, in storage or
    MLflow, and the winner must be the undisturbed one. The same must hold when a disk is full, a folder cannot be written
    or a database is locked: the search ends with one line, or waits, and the same command resumes it. Full disks need root, who can
    mount a small one. Exit status 1 if any case fails. A number of 0 leaves a check out.

    \b
    Example:
      sdtune evaluate hardening --threads 1 --out hardening.json
    """

    command_lines: int = Field(
        1000, ge=0, description="Most command lines with bad input.", json_schema_extra=EVALUATION
    )
    documents: int = Field(
        2000, ge=0, description="Damaged profiles, and as many configurations.", json_schema_extra=EVALUATION
    )
    data_sets: int = Field(2000, ge=0, description="Damaged data sets.", json_schema_extra=EVALUATION)
    texts: int = Field(300, ge=0, description="Random texts compared with generate.", json_schema_extra=EVALUATION)
    threaded_texts: int = Field(500, ge=0, description="Texts of threads on one decoder.", json_schema_extra=EVALUATION)
    decoding_threads: int = Field(8, ge=2, description="Threads that share a decoder.", json_schema_extra=EVALUATION)
    kills: int = Field(50, ge=0, description="Kills of searches at random moments.", json_schema_extra=EVALUATION)
    faults: int = Field(
        8, ge=0, description="Most faults of disks and databases that a search meets.", json_schema_extra=EVALUATION
    )
    locked_seconds: float = Field(
        30.0, gt=0.0, le=3600.0, description="Seconds for which a database is locked.", json_schema_extra=EVALUATION
    )
    seed: Seed = 0
    out: ResultsFile = None

    def run(self, progress: Progress) -> Report:
        """Run all checks, write the JSON file if one is named, and return the table."""
        from tuner.evaluation.hardening.run import run_checks

        return run_checks(self, progress)
