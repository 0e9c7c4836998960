"""`sdtune evaluate gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFolder
from tuner.evaluation.gpu.packages import refusal
from tuner.fields import DECODING

if TYPE_CHECKING:
    from tuner.progress import Progress


class GpuEvaluation(Evaluation):
    """Run the whole benchmark of one GPU in ten minutes.

    \b
       1. Compilation, then replays: passes of every shape against eager ones, on a tiny model and on the demo model widened to
          8B sizes.
       2. Plain decoding against the memory roofline and against transformers' `generate`.
       3. The switch to a new candidate: seconds and recordings.
       4. A whole search on the widened model, and its profile against `generate`, alone and in batches of 4 and 16.
       5. Losslessness on the demo model in float32 and bfloat16, by every runner.
       6. Each kind of draft, alone and in batches of 4 and 16: lookup, suffix automaton, exit, feature head, side leaves, skip
          set, int8, int4.
       7. Each speed feature of the static runner, off and on, and the attention backends.
       8. `generate` with a static cache, which transformers compiles as a whole: in the time that is left, or by the next run.

    The steps run in this order in one process, which makes the widened model once; a step that fails is reported, and the
    others go on. Each result is on disk as its step ends: the same command runs the steps that failed or had no time. The
    folder then holds gpu.json, gpu.txt and worker.log. Exit status 1 if a step has no result. To be run in a checkout: it
    reads configs/demo, and nothing from the network.

    \b
    Example (on any machine, to try the command out):
      sdtune evaluate gpu --device cpu --preset demo --stretch 6
    """

    device: str = Field("cuda", description="cuda, cuda:1, or cpu to try the plan.", json_schema_extra=DECODING)
    preset: Literal["demo", "250m", "5b", "llama-8b-like"] = Field(
        "llama-8b-like", description="Sizes of the widened model.", json_schema_extra=EVALUATION
    )
    step: tuple[str, ...] = Field(
        (), description="Steps to run; repeatable; default: all.", json_schema_extra=EVALUATION
    )
    seconds: float = Field(555.0, gt=0, description="Seconds of all steps together.", json_schema_extra=EVALUATION)
    stretch: float = Field(
        1.0,
        gt=0,
        description="Factor on all limits, for devices slower than the one the plan is for.",
        json_schema_extra=EVALUATION,
    )
    out: ResultsFolder = Path("gpu")

    @model_validator(mode="after")
    def _packages_are_there(self) -> GpuEvaluation:
        if reason := refusal():
            raise ValueError(reason)
        return self

    def run(self, progress: Progress) -> Report:
        """Run the unfinished steps and return the table of all of them."""
        from tuner.evaluation.gpu.run import WIDTH, run_and_write

        shown, succeeded = run_and_write(self, progress)
        return Report(shown, width=WIDTH, succeeded=succeeded)
