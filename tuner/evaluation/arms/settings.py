"""`sdtune evaluate arms`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFile
from tuner.fields import PROBLEM, Profile, ProfileModel

if TYPE_CHECKING:
    from tuner.progress import Progress


class ArmsEvaluation(Evaluation):
    """Compare a server that chooses among arms to the same server with one arm, while text and load change.

    The phases are decoded one after another, each in rounds. In a round, plain decoding, each profile alone and the choice among
    all of them decode the same prompts with continuous batching, in turns. The choice keeps what it has learned from one round and
    phase to the next, and is told of no change. In each phase it is compared with the best single arm of that phase, without the
    first quarter of the rounds, in which it may look around, and with plain decoding, with all rounds. Exit status 1 if a text
    differs from plain decoding.

    \b
    Example:
      sdtune evaluate arms --profile code.yaml --arm prose.yaml --threads 1
        --phase prose.jsonl@1 --phase prose.jsonl@8 --phase code.jsonl@1 --phase code.jsonl@8
    """

    profile: Profile
    arm: tuple[str, ...] = Field(
        (),
        description="Further profile for the same model; repeatable.",
        json_schema_extra={**PROBLEM, "metavar": "PROFILE"},
    )
    phase: tuple[str, ...] = Field(
        min_length=1,
        description="Phase: a file with a column `prompt`, and the sequences side by side; repeatable, in order.",
        json_schema_extra={**PROBLEM, "metavar": "FILE@N"},
    )
    model: ProfileModel = None
    rounds: int = Field(8, ge=4, description="Rounds of a phase.", json_schema_extra=EVALUATION)
    prompts_per_row: int = Field(
        2,
        ge=1,
        description="Prompts of a round for each sequence side by side; at least 4.",
        json_schema_extra=EVALUATION,
    )
    max_new_tokens: int = Field(48, ge=2, description="New tokens of a prompt.", json_schema_extra=EVALUATION)
    out: ResultsFile = None

    def run(self, progress: Progress) -> Report:
        """Decode all phases and return the table."""
        from tuner.evaluation.arms.run import run_and_write

        return run_and_write(self, progress)
