"""Lookups as documents: n-gram lengths, suffix matches, and the lookup of either kind that comes before another draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, model_validator
from pydantic_core import CoreSchema, core_schema

from decoding.copying.contract import CopyIndex
from decoding.copying.history import RequestHistory
from decoding.copying.ngrams import NgramCopies
from decoding.copying.suffix_copies import SuffixCopies
from decoding.documents.strict_yaml import Document

# Longer n-grams hardly ever repeat, and each length costs an index of the sequence.
LONGEST_NGRAM = 32
MOST_COPIED = 64

MaxNgram = Annotated[
    int, Field(ge=1, le=LONGEST_NGRAM, description="longest n-gram at the end of the sequence to look up")
]
MinNgram = Annotated[int, Field(ge=1, le=LONGEST_NGRAM, description="shortest n-gram; the longest one found counts")]


MaxCopied = Annotated[
    int, Field(ge=1, le=MOST_COPIED, description="most tokens to copy; the draft-length rule is not asked")
]
MinMatch = Annotated[
    int, Field(ge=1, le=LONGEST_NGRAM, description="shortest suffix that must occur earlier; the longest one counts")
]
MaxSpecFactor = Annotated[float, Field(gt=0, le=64, description="most tokens to copy per token of the match")]
MinTokenProb = Annotated[
    float, Field(ge=0, le=1, description="estimated probability of all copied tokens below which the copy ends")
]
MIN_MATCH, MAX_SPEC_FACTOR, MIN_TOKEN_PROB = 1, 2.0, 0.3
"""Chosen by replay on greedy answers of SmolLM2-135M to Spec-Bench and HumanEval."""


class FirstLookup(Document):
    """A lookup before another draft: what is copied, and at most how many tokens (`max_tokens`)."""

    method_name: ClassVar[str]
    """Name of the kind of lookup, for readers."""
    reads_history: ClassVar[bool] = False
    """True if tokens may also be copied from earlier answers."""
    if TYPE_CHECKING:  # each kind declares it after its own keys
        max_tokens: int

    @property
    def ngram_lengths(self) -> tuple[int, int] | None:
        """Longest and shortest n-gram of a prompt lookup; None for a lookup of another kind."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Return one short phrase for tables."""

    @abstractmethod
    def new_index(self, token_ids: Sequence[int], history: RequestHistory | None = None) -> CopyIndex:
        """Return the index that finds the copies (`decoding.copying.contract.CopySource`)."""


class Lookup(FirstLookup):
    """Prompt lookup before another draft: what followed an earlier occurrence of the last n-gram is copied."""

    method_name: ClassVar[str] = "n-grams"
    max_ngram: MaxNgram = 3
    min_ngram: MinNgram = 1
    max_tokens: MaxCopied = 10

    @model_validator(mode="after")
    def _ngrams_are_ordered(self) -> Lookup:
        check_ngrams(self.max_ngram, self.min_ngram)
        return self

    @property
    def ngram_lengths(self) -> tuple[int, int] | None:
        """Longest and shortest n-gram."""
        return self.max_ngram, self.min_ngram

    def describe(self) -> str:
        """Return one short phrase for tables."""
        return f"lookup ({self.max_ngram}-{self.min_ngram}, {self.max_tokens})"

    def new_index(self, token_ids: Sequence[int], history: RequestHistory | None = None) -> CopyIndex:
        """Return an index of n-grams."""
        return NgramCopies(token_ids, max_ngram=self.max_ngram, min_ngram=self.min_ngram)


class SuffixLookup(FirstLookup):
    """Suffix automaton before another draft: the most frequent continuation of the longest suffix match is copied."""

    method_name: ClassVar[str] = "suffix automaton"
    method: Literal["suffix_automaton"] = "suffix_automaton"
    min_match: MinMatch = MIN_MATCH
    max_spec_factor: MaxSpecFactor = MAX_SPEC_FACTOR
    min_token_prob: MinTokenProb = MIN_TOKEN_PROB
    max_tokens: MaxCopied = 10
    reads_history: ClassVar[bool] = True

    def describe(self) -> str:
        """Return one short phrase for tables."""
        return f"suffix automaton ({describe_match(self)}, {self.max_tokens})"

    def new_index(self, token_ids: Sequence[int], history: RequestHistory | None = None) -> CopyIndex:
        """Return a suffix automaton."""
        return suffix_index(self, token_ids, history)


def _lookup(value: Any) -> Any:
    """Return the lookup that `value` describes: a document, or a mapping whose `method`, if any, is not of n-grams."""
    if value is None or isinstance(value, FirstLookup):
        return value
    has_method = isinstance(value, dict) and "method" in value
    return (SuffixLookup if has_method else Lookup).model_validate(value)


class _ByMethod:
    """Validates a lookup as the document of its method; errors name the keys of that document alone."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(_lookup)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(TypeAdapter(AnyLookup | None).core_schema)


AnyLookup = Lookup | SuffixLookup
LOOKUP_METHODS = (Lookup.method_name, SuffixLookup.method_name)
# Left out of a document without a lookup: most drafts have none.
LookupBefore = Annotated[
    AnyLookup | None,
    _ByMethod(),
    Field(
        exclude_if=lambda lookup: lookup is None,
        description="prompt lookup or suffix automaton, tried before the model drafts",
    ),
]


def check_ngrams(max_ngram: int, min_ngram: int) -> None:
    """Raise ValueError unless `min_ngram` is at most `max_ngram`."""
    if min_ngram > max_ngram:
        raise ValueError(f"min_ngram must be at most max_ngram, got {min_ngram} and {max_ngram}")


def describe_after(lookup: FirstLookup | None, draft: str) -> str:
    """Return the phrase of a draft with the lookup before it, if there is one."""
    return f"{lookup.describe()}, then {draft}" if lookup else draft


def lookup_columns(lookup: Document | None) -> dict[str, Any]:
    """Return the columns of a lookup in the table of trials; none without a lookup."""
    settings = lookup.model_dump(exclude={"kind"}) if lookup else {}
    return {f"lookup.{key}": value for key, value in settings.items()}


class SuffixSettings(Protocol):
    """The settings that decide what a suffix automaton copies."""

    @property
    def min_match(self) -> int:
        """Shortest match in tokens."""

    @property
    def max_spec_factor(self) -> float:
        """Most tokens to copy per token of the match."""

    @property
    def min_token_prob(self) -> float:
        """Least estimated probability of a copy."""


def suffix_index(
    settings: SuffixSettings, token_ids: Sequence[int], history: RequestHistory | None = None
) -> SuffixCopies:
    """Return the suffix automaton of `token_ids` with these settings, and of the answers in `history`."""
    return SuffixCopies(
        token_ids,
        min_match=settings.min_match,
        max_spec_factor=settings.max_spec_factor,
        min_token_prob=settings.min_token_prob,
        history=history,
    )


def describe_match(settings: SuffixSettings) -> str:
    """Return the settings of a suffix automaton for tables: shortest match, tokens per token, least probability."""
    return f"{settings.min_match}, x{settings.max_spec_factor:g}, {settings.min_token_prob:g}"
