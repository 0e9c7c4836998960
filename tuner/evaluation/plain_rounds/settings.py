"""`sdtune evaluate plain-rounds`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFile
from tuner.fields import PROBLEM, Profile, ProfileModel

if TYPE_CHECKING:
    from tuner.progress import Progress


class PlainRoundsEvaluation(Evaluation):
    """Compare plain rounds of a server with a profile to a server without one: do they cost the same?

    Both decode the same prompts with continuous batching in one process, in turns, at several numbers of sequences side by side.
    The ratio is over the prompts' whole decoding, prompts included. Exit status 1 if a text differs.

    \b
    Example:
      sdtune evaluate plain-rounds --profile profile.yaml --dataset prompts.jsonl --threads 1
    """

    profile: Profile
    dataset: str = Field(
        description="Prompts: a file with a column `prompt`.", json_schema_extra={**PROBLEM, "metavar": "FILE"}
    )
    model: ProfileModel = None
    prompts: int = Field(8, ge=1, description="Prompts of each round.", json_schema_extra=EVALUATION)
    max_new_tokens: int = Field(48, ge=2, description="New tokens of a prompt.", json_schema_extra=EVALUATION)
    levels: tuple[int, ...] = Field(
        (1, 4, 8), description="Sequences side by side; repeatable.", json_schema_extra=EVALUATION
    )
    rounds: int = Field(5, ge=2, description="Rounds, in turns.", json_schema_extra=EVALUATION)
    out: ResultsFile = None

    def run(self, progress: Progress) -> Report:
        """Decode in turns and return the table."""
        from tuner.evaluation.plain_rounds.run import run_and_write

        return run_and_write(self, progress)
