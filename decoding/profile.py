"""The draft profile: the public document that says how to decode one model faster, and what was measured when it was found.

Strict YAML in and out, versioned, with a JSON Schema (`DraftProfile.json_schema`). Knows nothing of models or tensors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from decoding.documents.atomic_write import write_whole
from decoding.documents.strict_yaml import Document, dump, read_mapping, validate
from decoding.draft_length import AnyRule, Fixed
from decoding.errors import ProfileError

SCHEMA = "sdtune/v1"

# Longer ones hardly ever repeat, and each length costs an index of the text.
LONGEST_NGRAM = 32

# Far more layers than any model has: a slip such as 12-1500000000 is refused before it is spelt out.
MOST_LAYERS = 10_000


def parse_indices(value: Any) -> Any:
    """Layer indices from `[7, 9, "12-15"]`, or the same as text `"7,9,12-15"`, ascending and without repetition."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple | set | frozenset):
        raise ValueError(f"must be a list of layer indices such as [7, 9, 12-15], got {value!r}")
    return tuple(sorted({index for part in parts for index in _expand(part)}))


def _expand(part: Any) -> range:
    if isinstance(part, int) and not isinstance(part, bool) and part < 0:
        raise ValueError(f"a layer index counts from 0, got {part}")
    written = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", str(part).strip())
    if written is None:
        raise ValueError(f"must hold layer indices such as 7 or 12-15, got {part!r}")
    first, last = int(written[1]), int(written[2] or written[1])
    if last < first:
        raise ValueError(f"the range {part!r} runs backwards")
    if last >= MOST_LAYERS:
        raise ValueError(f"a layer index is below {MOST_LAYERS}, got {part!r}")
    return range(first, last + 1)


def format_indices(indices: tuple[int, ...]) -> list[int | str]:
    """The inverse of `parse_indices`: runs of three and more become `first-last`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [item for run in runs for item in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else run)]


def compact_indices(indices: tuple[int, ...]) -> str:
    """`7,9,12-15`, or `-` for none: a skip set short enough for a table."""
    return ",".join(str(item) for item in format_indices(indices)) or "-"


Layers = Annotated[
    tuple[int, ...],
    BeforeValidator(parse_indices, json_schema_input_type=list[int | str] | str),
    PlainSerializer(format_indices, return_type=list[int | str]),
]


class TargetIdentity(Document):
    """Which model the profile is for; the three hashes are the fingerprint (see `decoding.fingerprint`), the rest is for people."""

    model: str
    revision: str | None = None
    architecture: str
    num_layers: int = Field(ge=1)
    dtype: str
    device: str | None = None
    config_sha256: str
    weights_sha256: str
    tokenizer_sha256: str | None = None


MaxNgram = Annotated[int, Field(ge=1, le=LONGEST_NGRAM, description="most tokens at the end of the text to look up")]
MinNgram = Annotated[int, Field(ge=1, le=LONGEST_NGRAM, description="fewest; the longest that are found count")]


class Lookup(Document):
    """Prompt lookup in front of another draft: where the end of the text stands in it before, what followed is copied."""

    max_ngram: MaxNgram = 3
    min_ngram: MinNgram = 1
    max_tokens: int = Field(10, ge=1, le=64, description="tokens copied; the draft-length rule is not asked")

    @model_validator(mode="after")
    def _ngrams_are_ordered(self) -> Lookup:
        _check_ngrams(self.max_ngram, self.min_ngram)
        return self

    def describe(self) -> str:
        """One short phrase for tables."""
        return f"lookup ({self.max_ngram}-{self.min_ngram}, {self.max_tokens})"


class PromptLookup(Document):
    """Draft by prompt lookup alone: no model drafts, and the draft-length rule says how many tokens are copied."""

    kind: Literal["prompt_lookup"] = "prompt_lookup"
    max_ngram: MaxNgram = 3
    min_ngram: MinNgram = 1

    @model_validator(mode="after")
    def _ngrams_are_ordered(self) -> PromptLookup:
        _check_ngrams(self.max_ngram, self.min_ngram)
        return self

    def describe(self) -> str:
        """One short phrase for tables."""
        return f"prompt lookup ({self.max_ngram}-{self.min_ngram})"


def _check_ngrams(max_ngram: int, min_ngram: int) -> None:
    if min_ngram > max_ngram:
        raise ValueError(f"min_ngram must be at most max_ngram, got {min_ngram} and {max_ngram}")


# Left out of a document that has none, as of those written before there was any.
LookupInFront = Annotated[
    Lookup | None,
    Field(exclude_if=lambda lookup: lookup is None, description="prompt lookup, tried before the model drafts"),
]


def _behind(lookup: Lookup | None, draft: str) -> str:
    return f"{lookup.describe()}, then {draft}" if lookup else draft


class LayerSkip(Document):
    """Draft with these attention and MLP sublayers left out (0-based block indices)."""

    kind: Literal["layer_skip"] = "layer_skip"
    skip_attention: Layers = ()
    skip_mlp: Layers = ()
    lookup: LookupInFront = None

    @classmethod
    def blocks(cls, indices: list[int] | tuple[int, ...]) -> LayerSkip:
        """Skip whole blocks."""
        return cls(skip_attention=tuple(indices), skip_mlp=tuple(indices))

    @property
    def first_skipped(self) -> int | None:
        """The first block the draft computes otherwise than the target, or None if it skips nothing."""
        return min((*self.skip_attention, *self.skip_mlp), default=None)

    def describe(self) -> str:
        """One short phrase for tables."""
        if self.skip_attention == self.skip_mlp:
            return _behind(self.lookup, f"skip {compact_indices(self.skip_attention)}")
        skipped = f"skip attention {compact_indices(self.skip_attention)}, MLP {compact_indices(self.skip_mlp)}"
        return _behind(self.lookup, skipped)


class EarlyExit(Document):
    """Draft with the first `exit_layer` blocks: through a head of their own, or straight through the final norm and LM head."""

    kind: Literal["early_exit"] = "early_exit"
    exit_layer: int = Field(ge=1, description="how many of the target's blocks the draft runs (N)")
    head: str | None = Field(None, description="file of the exit head, beside the profile")
    head_sha256: str | None = None
    lookup: LookupInFront = None

    @field_validator("head")
    @classmethod
    def _lies_beside(cls, head: str | None) -> str | None:
        if head is not None and (not head or Path(head).name != head):
            raise ValueError("must be the name of a file beside the profile, without folders")
        return head

    @model_validator(mode="after")
    def _head_is_identified(self) -> EarlyExit:
        if (self.head is None) != (self.head_sha256 is None):
            raise ValueError("a head is given by head and head_sha256, both or neither")
        return self

    def as_layer_skip(self, num_layers: int) -> LayerSkip:
        """The blocks of a target with `num_layers` that the draft leaves out; neither its head nor its lookup is in it."""
        return LayerSkip.blocks(tuple(range(self.exit_layer, num_layers)))

    def describe(self) -> str:
        """One short phrase for tables."""
        return _behind(self.lookup, f"exit at {self.exit_layer}, {'trained head' if self.head else 'no head'}")


class PlainDecoding(Document):
    """Do not draft: nothing that was tried beats plain decoding."""

    kind: Literal["none"] = "none"

    def describe(self) -> str:
        """One short phrase for tables."""
        return "plain decoding"


Draft = Annotated[LayerSkip | EarlyExit | PromptLookup | PlainDecoding, Field(discriminator="kind")]


ExactWidth = Annotated[int, Field(ge=2, le=65)]


class Decoding(Document):
    """How the profile was measured to decode; `generate`'s own arguments win over the temperature."""

    temperature: float = Field(0.0, ge=0.0, description="0 is greedy")
    prefix_reuse: bool = Field(True, description="verify only from the first block the draft computes otherwise")
    runner: Literal["eager", "static"] = Field(
        "eager", description="how passes are executed: as they are, or in fixed shapes, compiled and recorded"
    )
    exact_width: ExactWidth | None = Field(
        None,
        exclude_if=lambda width: width is None,
        description="bit-exact mode of the static runner: on how many positions every pass of the whole model runs",
    )

    @model_validator(mode="after")
    def _mode_is_the_static_runners(self) -> Decoding:
        if self.exact_width is not None and self.runner != "static":
            raise ValueError(f"the bit-exact mode (exact_width) is the static runner's, got runner {self.runner!r}")
        return self


class Interval(Document):
    """A value with its 95 % confidence interval."""

    value: float
    ci95: tuple[float, float]

    def __format__(self, spec: str) -> str:
        """`1.86 [1.62, 2.16]`, each figure by the format `spec`; two decimals if none is given."""
        spec = spec or ".2f"
        low, high = self.ci95
        return f"{self.value:{spec}} [{low:{spec}}, {high:{spec}}]"


class Rates(Document):
    """Decode-phase tokens per second, the same prompts."""

    draft: float
    plain: float


class Exactness(Document):
    """How many held-out prompts gave the tokens of plain decoding, and how many parted from it at a numerical tie."""

    prompts: int
    identical: int
    ties: int = 0


class SearchCost(Document):
    """What the search took, apart from the speed it found."""

    trials: int
    seconds: float
    distillation_seconds: float = Field(
        0.0, description="of making the exit heads that were searched with, apart from the search"
    )


class DatasetFacts(Document):
    """What it was tuned and measured on."""

    name: str
    fingerprint: str
    tuning_prompts: int
    held_out_prompts: int
    max_new_tokens: int


class Measured(Document):
    """Held-out figures of the confirmation run: real decoding, paired with plain decoding in the same process."""

    speedup: Interval
    tokens_per_second: Rates
    acceptance_rate: float
    tokens_per_round: float
    exact: Exactness
    search: SearchCost
    batch_size: int = Field(
        1,
        ge=1,
        exclude_if=lambda size: size == 1,
        description="prompts decoded in step, by the draft and plainly, in the search and for these figures",
    )
    device: str
    versions: dict[str, str]
    dataset: DatasetFacts


class Provenance(Document):
    """Where it comes from."""

    created: str
    study: str
    git_revision: str | None = None
    mlflow_run_id: str | None = None


class DraftProfile(Document):
    """A tuned draft for one model. See `load`, `save` and `decoding.deploy.custom_generate.load_decoder`."""

    schema_: Literal["sdtune/v1"] = Field("sdtune/v1", alias="schema")
    name: str
    target: TargetIdentity
    draft: Draft
    draft_length: AnyRule = Fixed()
    decoding: Decoding = Decoding()
    measured: Measured | None = None
    provenance: Provenance | None = None

    @model_validator(mode="after")
    def _layers_exist(self) -> DraftProfile:
        layers = self.target.num_layers
        if isinstance(self.draft, LayerSkip):
            highest = max((*self.draft.skip_attention, *self.draft.skip_mlp), default=0)
            if highest >= layers:
                raise ValueError(f"draft skips layer {highest}, but the target has layers 0 to {layers - 1}")
        if isinstance(self.draft, EarlyExit) and self.draft.exit_layer >= layers:
            raise ValueError(f"draft exits at layer {self.draft.exit_layer}, but it must be 1 to {layers - 1}")
        return self

    @classmethod
    def load(cls, path: str | Path) -> DraftProfile:
        """Read a profile; `ProfileError` names the file, the key and what would be right."""
        path = Path(path)
        data = read_mapping(path, what="profile", error=ProfileError)
        if (version := data.get("schema")) != SCHEMA:
            raise ProfileError(f"{path}: schema is {version!r}, this version of sdtune reads {SCHEMA!r}")
        return validate(cls, data, source=str(path), error=ProfileError)

    def save(self, path: str | Path) -> None:
        """Write the profile whole or not at all (beside the target, then renamed); `ProfileError` if the place is unwritable."""
        write_whole(Path(path), dump(self).encode(), what="the profile", error=ProfileError)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of a profile."""
        schema = cls.model_json_schema(by_alias=True)
        # Its default is for writing: `load` wants the version there.
        return {**schema, "required": ["schema", *schema["required"]]}
