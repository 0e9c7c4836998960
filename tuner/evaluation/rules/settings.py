"""`sdtune evaluate rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from decoding.draft_length import RULES, check_rules
from decoding.draft_length.adaptive_threshold import HIGHEST_THRESHOLD
from tuner.errors import ConfigError
from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFile
from tuner.fields import DECODING, PROBLEM, Device, Profile, ProfileModel, Seed
from tuner.prompt_settings import PromptSettings

if TYPE_CHECKING:
    from tuner.progress import Progress


class RulesEvaluation(PromptSettings, Evaluation):
    """Compare draft-length rules on one draft with every fixed length.

    All rules decode the same prompts side by side with plain decoding. The best fixed length is found by measuring each
    length on those very prompts, which no user could have known: a rule that comes near it without being told is useful,
    and on a mixture of datasets an adaptive rule can be faster.

    Rules with a moving threshold depend on where it starts: --initial-thresholds compares several starts. AdaEDL was
    published with --max-tokens 3, 7 and 16 at --temperature 0.7, 1, 1.3 and 1.7.

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
    rules: tuple[str, ...] = Field(
        tuple(name for name in RULES if name != "fixed"),
        min_length=1,
        description="Rules to compare, beside all fixed lengths; repeat it.",
        json_schema_extra={**EVALUATION, "metavar": "NAME"},
    )
    max_tokens: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(
        (8,),
        min_length=1,
        description="Longest draft (K), in tokens; repeat it to compare rules at several.",
        json_schema_extra=EVALUATION,
    )
    initial_thresholds: tuple[Annotated[float, Field(ge=0.0, le=HIGHEST_THRESHOLD)], ...] = Field(
        (),
        description="Starts of the rules with a moving threshold; repeat it. Default: each rule's own.",
        json_schema_extra=EVALUATION,
    )
    max_new_tokens: int = Field(64, ge=9, description="Tokens to generate from each prompt.", json_schema_extra=PROBLEM)
    temperature: float | None = Field(
        None, ge=0.0, description="Sampling temperature; default: the profile's.", json_schema_extra=DECODING
    )
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Share of the probability that is sampled from.", json_schema_extra=DECODING
    )
    seed: Seed = 0
    device: Device = "auto"
    out: ResultsFile = None

    @field_validator("rules")
    @classmethod
    def _are_registered(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        return check_rules(rules)

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
