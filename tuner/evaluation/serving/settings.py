"""`sdtune evaluate serving`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFolder
from tuner.fields import PROBLEM, Profile, ProfileModel, Seed

if TYPE_CHECKING:
    from tuner.progress import Progress


class ServingEvaluation(Evaluation):
    """Drive `sdtune serve` with the openai client: is every answer right, does it stay small, and how fast is it?

    First, mixed requests: streamed and not, of many lengths, with stop strings, up to the limit of the context; clients that
    cancel, clients that vanish, bodies that are wrong. Each greedy answer is compared with plain decoding by this process, each
    sample with a second one of the same seed. Memory is read after the first tenth of the requests and after the last.

    Then throughput: streams side by side, against the same server with --plain, and against `transformers serve` with
    --stock. The servers take turns, and ratios are over rounds. Needs the openai package. Exit status 1 for any wrong answer.

    \b
    Examples:
      sdtune evaluate serving --profile profile.yaml --dataset prompts.jsonl --threads 1
      sdtune evaluate serving --profile profile.yaml --dataset prompts.jsonl --stock --rounds 5
    """

    profile: Profile
    dataset: str = Field(
        description="Prompts: a file with a column `prompt`.", json_schema_extra={**PROBLEM, "metavar": "FILE"}
    )
    model: ProfileModel = None
    prompts: int = Field(32, ge=1, description="Prompts to use.", json_schema_extra=EVALUATION)
    requests: int = Field(500, ge=0, description="Mixed requests.", json_schema_extra=EVALUATION)
    streams: int = Field(16, ge=1, description="Mixed requests at a time.", json_schema_extra=EVALUATION)
    max_new_tokens: int = Field(48, ge=2, description="Most new tokens of a request.", json_schema_extra=EVALUATION)
    levels: tuple[int, ...] = Field(
        (1, 4, 8, 16), description="Streams side by side; repeatable.", json_schema_extra=EVALUATION
    )
    rounds: int = Field(3, ge=0, description="Rounds of the throughput; 0 leaves it out.", json_schema_extra=EVALUATION)
    stock: bool = Field(False, description="Measure `transformers serve` too.", json_schema_extra=EVALUATION)
    seed: Seed = 0
    out: ResultsFolder = Path("evaluate_serving")

    def run(self, progress: Progress) -> Report:
        """Start the servers, drive them, and return the tables."""
        from tuner.evaluation.serving.run import run_and_write

        return run_and_write(self, progress)
