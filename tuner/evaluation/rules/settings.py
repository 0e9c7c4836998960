"""`sdtune evaluate rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from tuner.errors import ConfigError
from tuner.evaluation.contract import EVALUATION, Evaluation, LongestDraft, Report, ResultsFile
from tuner.fields import PROBLEM, Device, Profile, ProfileModel, Seed
from tuner.prompt_settings import PromptSettings

if TYPE_CHECKING:
    from tuner.progress import Progress


class RulesEvaluation(PromptSettings, Evaluation):
    """Compare draft-length rules on one draft with every fixed length.

    All rules decode the same prompts side by side with plain decoding. The best fixed length is found by measuring each
    length on those very prompts, which no user could have known: a rule that comes near it without being told is useful,
    and on a mixture of datasets an adaptive rule can be faster.

    \b
    Example:
      sdtune evaluate rules --profile profile.yaml --dataset code.jsonl --dataset prose.jsonl
    """

    profile: Profile
    dataset: tuple[str, ...] = Field(
        min_length=1,
        description="Prompts, as in `sdtune search`; repeat it to mix datasets.",
        json_schema_extra=PROBLEM,
    )
    model: ProfileModel = None
    prompts: int = Field(24, ge=2, description="Measured prompts of each dataset.", json_schema_extra=EVALUATION)
    warm_up_prompts: int = Field(
        8,
        ge=1,
        description="Further prompts of each dataset, which warm up the adaptive rules.",
        json_schema_extra=EVALUATION,
    )
    max_tokens: LongestDraft = 8
    max_new_tokens: int = Field(64, ge=9, description="Tokens to generate from each prompt.", json_schema_extra=PROBLEM)
    seed: Seed = 0
    device: Device = "auto"
    out: ResultsFile = None

    def run(self, progress: Progress) -> Report:
        """Measure all rules, write the JSON file if one is named, and return the table."""
        from tuner.evaluation.rules.compare import compare_rules, write_json
        from tuner.evaluation.rules.report import rules_table
        from tuner.output_paths import check_writable

        if self.out is not None:
            check_writable(self.out, what="the comparison", name="comparison.json", error=ConfigError)
        comparison = compare_rules(self, progress)
        if self.out is not None:
            write_json(comparison, self.out)
        return Report(rules_table(comparison), width=80 + 20 * len(comparison.columns))
