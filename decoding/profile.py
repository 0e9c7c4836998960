"""The draft profile: the public document with the draft of one model and its measured figures.

Strict YAML in and out, versioned, with a JSON Schema (`DraftProfile.json_schema`). Imports neither torch nor transformers.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document, Line, dump, read_mapping, validate
from decoding.draft_length import AnyRule, Fixed
from decoding.drafts import Draft
from decoding.errors import ProfileError
from decoding.runners import PLAIN_RUNNER, RUNNERS, bit_exact_runners, check_runner_name, has_bit_exact_mode

SCHEMA = "sdtune/v1"
MOST_TIMES = 10_000
"""Highest ratio of speeds that is believed: a round yields some dozens of tokens, and a clock may stop for a while."""


Count = Annotated[int, Field(ge=0, le=10**12)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0, le=1e9)]
Seconds = Annotated[float, Field(ge=0.0, le=1e9)]
TokensPerRound = Annotated[float, Field(ge=0.0, le=1e4)]


class TargetIdentity(Document):
    """The model of the profile. The hashes are its fingerprint (see `decoding.fingerprint`); the rest is for people."""

    model: str
    revision: str | None = None
    architecture: str
    num_layers: int = Field(ge=1)
    dtype: str
    device: str | None = None
    config_sha256: str
    weights_sha256: str
    tokenizer_sha256: str | None = None


ExactWidth = Annotated[int, Field(ge=2, le=65)]


RunnerName = Annotated[
    str, AfterValidator(check_runner_name), WithJsonSchema({"type": "string", "enum": list(RUNNERS)})
]
"""Name of a registered runner."""


class Decoding(Document):
    """How sequences are decoded; `generate`'s own arguments override the temperature."""

    temperature: float = Field(0.0, ge=0.0, description="0 is greedy")
    prefix_reuse: bool = Field(
        True, description="verify from the first block that the draft changes, reusing its states before it"
    )
    runner: RunnerName = Field(
        PLAIN_RUNNER, description="how passes run: eager, or static, in fixed shapes, compiled and recorded"
    )
    exact_width: ExactWidth | None = Field(
        None,
        exclude_if=lambda width: width is None,
        description="bit-exact mode: positions of every pass of the whole model",
    )
    history: int = Field(
        0,
        ge=0,
        le=2**24,
        exclude_if=lambda num_tokens: not num_tokens,
        description="tokens of a user's earlier answers that a suffix automaton may copy from; 0 for none",
    )

    @model_validator(mode="after")
    def _runner_has_the_mode(self) -> Decoding:
        if self.exact_width is not None and not has_bit_exact_mode(self.runner):
            modes = " or ".join(bit_exact_runners())
            raise ValueError(f"the runner {self.runner!r} has no bit-exact mode (exact_width): use runner {modes}")
        return self


class Interval(Document):
    """A value with its 95 % confidence interval."""

    value: float
    ci95: tuple[float, float]

    def __format__(self, spec: str) -> str:
        """Return text such as `1.86 [1.62, 2.16]`, each figure in the format `spec`; two decimals by default."""
        spec = spec or ".2f"
        low, high = self.ci95
        return f"{self.value:{spec}} [{low:{spec}}, {high:{spec}}]"


def _is_a_ratio(interval: Interval) -> Interval:
    low, high = interval.ci95
    if not (0 < interval.value <= MOST_TIMES and 0 <= low <= interval.value <= high < math.inf):
        raise ValueError(f"must be above 0, at most {MOST_TIMES} and inside its interval (got {interval:g})")
    return interval


SpeedRatio = Annotated[Interval, AfterValidator(_is_a_ratio)]
"""A ratio of speeds or of seconds."""


class Rates(Document):
    """Decode-phase tokens per second, on the same prompts."""

    draft: Rate
    plain: Rate


class PrefillSeconds(Document):
    """Mean seconds until the first token, on the same prompts; the draft's include its own work on the prompt."""

    draft: Seconds
    plain: Seconds


class EndToEndFigures(Document):
    """Figures of whole decodings, prefill and decode phase, on the same prompts."""

    speedup: SpeedRatio
    tokens_per_second: Rates
    time_to_first_token_seconds: PrefillSeconds
    prefill_over_plain: SpeedRatio | None = Field(
        None,
        description="prefill seconds over plain decoding's: above 1 by the share of the draft, such as an exit head",
    )


class CategoryFigures(Document):
    """Figures on the prompts of one category."""

    prompts: Count
    speedup: SpeedRatio
    end_to_end_speedup: SpeedRatio | None = None


class StockFigures(Document):
    """The profile beside a way of generating that transformers offers, in turns on some of the held-out prompts."""

    prompts: Count
    profile_over_it: SpeedRatio = Field(description="speed of the profile's decode phase over it")


class Exactness(Document):
    """Number of held-out prompts with the tokens of plain decoding, and of those that differ at a numerical tie."""

    prompts: Count
    identical: Count
    ties: Count = 0

    @model_validator(mode="after")
    def _each_prompt_counts_once(self) -> Exactness:
        if self.identical + self.ties > self.prompts:
            raise ValueError(
                f"{self.identical} identical prompts and {self.ties} ties are more than {self.prompts} prompts"
            )
        return self


class SearchCost(Document):
    """Cost of the search."""

    trials: Count
    seconds: Seconds
    distillation_seconds: Seconds = Field(
        0.0, description="seconds of distilling the exit heads, apart from the search"
    )


class DatasetFacts(Document):
    """The data of tuning and measuring."""

    name: str
    fingerprint: str
    tuning_prompts: Count
    held_out_prompts: Count = Field(description="of the split; `exact.prompts` of them were measured")
    max_new_tokens: Count
    seed: int | None = Field(
        None, exclude_if=lambda seed: seed is None, description="of the split; None in profiles of earlier versions"
    )
    held_out_sha256: tuple[str, ...] = Field(
        (),
        exclude_if=lambda hashes: not hashes,
        description="hashes of the token ids of the held-out prompts, in order; empty in profiles of earlier versions",
    )


class Measured(Document):
    """Figures of the confirmation on held-out prompts: real decoding, paired with plain decoding in one process."""

    speedup: SpeedRatio = Field(description="of the decode phase: all tokens over all seconds, over plain decoding's")
    tokens_per_second: Rates
    end_to_end: EndToEndFigures | None = Field(
        None, exclude_if=lambda figures: figures is None, description="None in profiles of earlier versions"
    )
    categories: dict[str, CategoryFigures] = Field(
        {}, exclude_if=lambda figures: not figures, description="by category of the prompts, if they have any"
    )
    stock: dict[str, StockFigures] = Field(
        {},
        exclude_if=lambda figures: not figures,
        description="by name: transformers' `generate` (`hf`) and its prompt lookup; empty if they were not compared",
    )
    draft_acceptance_rate: Share = Field(description="accepted over drafted tokens")
    mean_acceptance_length: TokensPerRound | None = Field(
        None,
        exclude_if=lambda length: length is None,
        description="1 + accepted drafted tokens per round; None in profiles of earlier versions",
    )
    tokens_per_round: TokensPerRound
    noise: tuple[str, ...] = Field(
        (),
        exclude_if=lambda signs: not signs,
        description="signs that other work disturbed the measurement, in words: the speed-up is to be measured again",
    )
    exact: Exactness
    confirmations: int = Field(
        1,
        ge=1,
        exclude_if=lambda count: count == 1,
        description="winners that runs of the search have confirmed on these prompts so far, this one included",
    )
    search: SearchCost
    batch_size: int = Field(
        1,
        ge=1,
        exclude_if=lambda size: size == 1,
        description="prompts decoded in lockstep, in the search and for these figures",
    )
    device: str = Field(
        description="name of the accelerator, or of the processor with the threads: `AMD EPYC (1 thread)`"
    )
    versions: dict[str, str]
    dataset: DatasetFacts

    @property
    def threads(self) -> int | None:
        """Threads of the processor that was measured; None for an accelerator."""
        found = re.search(r"\((\d+) threads?\)$", self.device)
        return None if found is None else int(found[1])

    @model_validator(mode="before")
    @classmethod
    def _earlier_names(cls, data: Any) -> Any:
        """Accept `acceptance_rate`, the earlier name of `draft_acceptance_rate`: the demo's profile has it."""
        if isinstance(data, dict) and "acceptance_rate" in data and "draft_acceptance_rate" not in data:
            data = {**data, "draft_acceptance_rate": data["acceptance_rate"]}
            del data["acceptance_rate"]
        return data


class EngineFacts(Document):
    """The engine that a search raced and confirmed its finalists in: all figures of the profile are its own."""

    name: str
    version: str
    command: str = Field(
        description="its server with the profile's draft, or for plain decoding if that is the verdict"
    )


class ProfileOrigin(Document):
    """The origin of a profile."""

    created: str
    study: str
    origin: str | None = Field(
        None,
        exclude_if=lambda origin: origin is None,
        description="the method that proposed the draft, in a study with several",
    )
    git_revision: str | None = None
    mlflow_run_id: str | None = None
    engine: EngineFacts | None = Field(
        None,
        exclude_if=lambda engine: engine is None,
        description="the engine in which the figures were measured; without it, sdtune's own decoder",
    )


class DraftProfile(Document):
    """A tuned draft for one model; `decoding.deploy.load_decoder` decodes with it."""

    schema_: Literal["sdtune/v1"] = Field("sdtune/v1", alias="schema")
    name: Line
    target: TargetIdentity
    draft: Draft
    draft_length: AnyRule = Fixed()
    decoding: Decoding = Decoding()
    measured: Measured | None = None
    provenance: ProfileOrigin | None = None

    @model_validator(mode="after")
    def _layers_exist(self) -> DraftProfile:
        self.draft.check(self.target.num_layers)
        return self

    @property
    def longest_draft(self) -> int:
        """Most tokens that a round drafts or copies."""
        lookup = self.draft.parts.lookup
        return max(self.draft_length.max_tokens, 0 if lookup is None else lookup.max_tokens)

    @classmethod
    def load(cls, path: str | Path) -> DraftProfile:
        """Read a profile. Raises `ProfileError` with the file, the wrong key and the valid values."""
        path = Path(path)
        data = read_mapping(path, what="profile", error=ProfileError)
        if (version := data.get("schema")) != SCHEMA:
            raise ProfileError(f"{path}: schema is {version!r}, this version of sdtune reads {SCHEMA!r}")
        return validate(cls, data, source=str(path), error=ProfileError)

    def save(self, path: str | Path) -> None:
        """Write the profile atomically. Raises `ProfileError` if it cannot be written."""
        write_atomically(Path(path), dump(self).encode(), what="the profile", error=ProfileError)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        schema = cls.model_json_schema(by_alias=True)
        # The default is for writing: `load` requires the version.
        return {**schema, "required": ["schema", *schema["required"]]}
