"""`sdtune evaluate gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFolder
from tuner.fields import DECODING

if TYPE_CHECKING:
    from tuner.progress import Progress


class GpuEvaluation(Evaluation):
    """Run the whole benchmark of one GPU in ten minutes.

    \b
      1. Losslessness on the demo model in float32 and bfloat16: plain and drafted, eager, static (CUDA graphs) and bit-exact.
      2. The demo model widened to the size of an 8B model, in bfloat16: a small trained model at the cost of a large one.
      3. A whole `sdtune search` on it, with the static runner.
      4. The profile found, against what users would use instead, after prompts of 512 tokens.
      5. The same in batches of 4 and of 16.
      6. The readiness of new candidates.

    Each step is a command in a process of its own, as a CUDA error spoils the process that it happens in. A step that fails
    or takes too long is reported, and the others still run until the time is up. The folder then holds what the steps wrote,
    their output, and gpu_benchmark.json. Exit status 1 if a step failed. To be run in a checkout: it uses configs/demo.
    """

    device: str = Field("cuda", description="cuda, cuda:1, or cpu to try the plan.", json_schema_extra=DECODING)
    preset: str = Field("llama-8b-like", description="Preset of `sdtune evaluate widen`.", json_schema_extra=EVALUATION)
    search_seconds: int = Field(120, ge=1, description="Seconds of the search.", json_schema_extra=EVALUATION)
    seconds: float = Field(580.0, gt=0, description="Seconds of all steps together.", json_schema_extra=EVALUATION)
    out: ResultsFolder = Path("gpu_benchmark")

    def run(self, progress: Progress) -> Report:
        """Run all steps in order and return the table of steps and contenders."""
        from tuner.evaluation.gpu.plan import plan
        from tuner.evaluation.gpu.report import figures, table
        from tuner.evaluation.gpu.run import run_all
        from tuner.results import check_results_folder

        check_results_folder(self.out)
        self.out.mkdir(exist_ok=True)
        steps = plan(self.out, self.device, self.preset, self.search_seconds)
        done = run_all(steps, self.out, seconds=self.seconds, progress=progress)
        return Report(table(done, figures(self.out)), width=130, succeeded=all(step.ok for step in done))
