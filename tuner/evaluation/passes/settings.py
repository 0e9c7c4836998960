"""`sdtune evaluate passes`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Evaluation, LongestDraft, Report, ResultsFolder
from tuner.fields import PROBLEM, Device, ProfileDtype, ProfileModel, Seed

if TYPE_CHECKING:
    from tuner.progress import Progress

PartName = Literal["widths", "contexts", "readiness"]


class PassesEvaluation(Evaluation):
    """Measure what single passes and rounds cost.

    \b
      widths      a pass of the whole model by its number of positions, with each runner in turns
      contexts    rounds of the profile's draft after short and long contexts, in plain passes after the same context
      readiness   the first sequence of a new candidate against its second, with the static runner

    Contexts may be longer than the model was made for, if its rotary embedding can be extended: the text is then
    meaningless, but costs what it would. Acceptance is therefore not reported; rounds of a given length are compared.

    \b
    Examples:
      sdtune evaluate passes --profile profile.yaml --contexts 512 --contexts 4096
      sdtune evaluate passes --model configs/demo/model --part widths --part readiness
    """

    profile: Path | None = Field(
        None,
        description="Profile whose draft makes the rounds of the part `contexts`.",
        json_schema_extra={**PROBLEM, "metavar": "FILE"},
    )
    model: ProfileModel = None
    part: tuple[PartName, ...] = Field(
        (),
        description="Parts to measure; repeatable; default: all, contexts with --profile only.",
        json_schema_extra=EVALUATION,
    )
    sweeps: int = Field(24, ge=2, description="Timings of each width.", json_schema_extra=EVALUATION)
    contexts: tuple[int, ...] = Field(
        (512, 4096), min_length=2, description="Context lengths in tokens; repeatable.", json_schema_extra=EVALUATION
    )
    max_tokens: LongestDraft = 8
    seconds: float = Field(
        60.0, ge=0, description="Seconds of measuring after each context.", json_schema_extra=EVALUATION
    )
    candidates: int = Field(6, ge=1, description="Random skip sets to make ready.", json_schema_extra=EVALUATION)
    dtype: ProfileDtype = None
    device: Device = "auto"
    seed: Seed = 0
    out: ResultsFolder = Path("evaluate_passes")

    def run(self, progress: Progress) -> Report:
        """Measure the parts, write passes.json and passes.txt, and return the tables."""
        from tuner.evaluation.passes.run import run_and_write

        return Report(run_and_write(self, progress))
