"""`sdtune evaluate demo-prompts`, `demo-kinds`, `widen` and `planted-model`: prompts and models for experiments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Evaluation, Report
from tuner.fields import DECODING, OUTPUTS, Seed

if TYPE_CHECKING:
    from tuner.progress import Progress

ModelFolder = Annotated[
    Path, Field(description="Folder of the model to create.", json_schema_extra={**OUTPUTS, "metavar": "DIR"})
]
SourceFolder = Annotated[
    Path, Field(description="Folder of the trained model.", json_schema_extra={**EVALUATION, "metavar": "DIR"})
]
Size = Annotated[int | None, Field(ge=1)]


class DemoPrompts(Evaluation):
    """Cut the demo model's prompts from files of the running interpreter's standard library."""

    model: SourceFolder = Path("configs/demo/model")
    held_out: Path = Field(
        Path("configs/demo/held_out_files.json"),
        description="JSON list of the files that the model was not trained on.",
        json_schema_extra=EVALUATION,
    )
    part: Literal["held-out", "training"] = Field(
        "held-out", description="Files to cut from: held-out ones, or training files.", json_schema_extra=EVALUATION
    )
    num_prompts: int = Field(120, ge=1, description="Prompts to write.", json_schema_extra=EVALUATION)
    shortest: int = Field(64, ge=1, description="Fewest tokens of a prompt.", json_schema_extra=EVALUATION)
    longest: int = Field(512, ge=1, description="Most tokens of a prompt.", json_schema_extra=EVALUATION)
    seed: Seed = 0
    out: Path = Field(Path("configs/demo/prompts.jsonl"), description="File of the prompts.", json_schema_extra=OUTPUTS)

    def run(self, progress: Progress) -> Report:
        """Cut and write the prompts."""
        from tuner.evaluation.models.demo_prompts import write_prompts

        prompts = write_prompts(self)
        return Report(f"{len(prompts)} prompts from {len({each.file for each in prompts})} files")


class DemoKinds(Evaluation):
    """Write prompts of four further kinds for the demo model: prose.jsonl, tables.jsonl, asserts.jsonl and fills.jsonl.

    On these kinds the same draft is accepted more or less often than on code, so adaptive draft-length rules can be compared
    on a mixture with `sdtune evaluate rules`.
    """

    num_prompts: int = Field(32, ge=1, description="Prompts of each kind.", json_schema_extra=EVALUATION)
    seed: Seed = 0
    out: Path = Field(
        Path("configs/demo"), description="Folder to write into.", json_schema_extra={**OUTPUTS, "metavar": "DIR"}
    )

    def run(self, progress: Progress) -> Report:
        """Write the four files."""
        from tuner.evaluation.models.demo_kinds import write_kinds

        return Report("\n".join(f"{count} prompts in {name}" for name, count in write_kinds(self).items()))


class Widening(Evaluation):
    """Write a wider model that computes the same as a trained Llama, at the cost of a large one.

    Acceptance, entropy and redundancy stay the trained model's. Figures of a widened model are always reported as such.

    \b
    Example:
      sdtune evaluate widen --model configs/demo/model --preset 250m --heads configs/demo/heads --out widened/demo-250m
    """

    model: SourceFolder
    preset: Literal["demo", "250m", "5b", "llama-8b-like"] | None = Field(
        None,
        description="Sizes by name; flags win. llama-8b-like has every size of Llama-3.1-8B; demo is for trying out.",
        json_schema_extra=EVALUATION,
    )
    hidden_size: Size = Field(None, description="Width of the hidden states.", json_schema_extra=EVALUATION)
    intermediate_size: Size = Field(None, description="Neurons of an MLP.", json_schema_extra=EVALUATION)
    num_attention_heads: Size = Field(
        None, description="Attention heads; default: as many as fill the hidden states.", json_schema_extra=EVALUATION
    )
    num_key_value_heads: Size = Field(
        None, description="Key-value heads; default: groups as large as the source's.", json_schema_extra=EVALUATION
    )
    head_dim: Size = Field(
        None,
        description="Length of a head, a multiple of the source's; default: the source's.",
        json_schema_extra=EVALUATION,
    )
    num_hidden_layers: Size = Field(
        None, description="Layers; added ones are identities; default: the source's.", json_schema_extra=EVALUATION
    )
    vocab_size: Size = Field(
        None, description="Tokens; added ones are never chosen; default: the source's.", json_schema_extra=EVALUATION
    )
    heads: Path | None = Field(
        None,
        description="Folder of the source's exit heads, to be widened into OUT/heads.",
        json_schema_extra={**EVALUATION, "metavar": "DIR"},
    )
    dtype: Literal["bfloat16", "float32", "float16"] = Field(
        "bfloat16", description="Precision of the weights.", json_schema_extra=DECODING
    )
    device: str = Field("cpu", description="Device to build the model on: cpu, cuda ...", json_schema_extra=DECODING)
    seed: int = Field(0, description="Seed of the weights that do not matter.", json_schema_extra=EVALUATION)
    out: ModelFolder

    def run(self, progress: Progress) -> Report:
        """Widen and write the model, its tokenizer and its exit heads."""
        from tuner.evaluation.models.widen import run_and_write

        return Report(run_and_write(self, progress))


class PlantedModel(Evaluation):
    """Write a random model with planted redundancy, and planted.json, which lists the redundant sublayers."""

    num_layers: int = Field(12, ge=1, description="Blocks of the model.", json_schema_extra=EVALUATION)
    share: float = Field(0.45, ge=0, le=1, description="Share of redundant sublayers.", json_schema_extra=EVALUATION)
    seed: Seed = 0
    out: ModelFolder

    def run(self, progress: Progress) -> Report:
        """Plant the redundancy and write the model."""
        from tuner.evaluation.planted.model import write_planted

        problem = write_planted(self.out, self.num_layers, share=self.share, seed=self.seed)
        return Report(f"redundant: {problem.redundant.describe()}\ngrey: {problem.sets.grey.describe()}")
