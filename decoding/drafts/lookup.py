"""Copying as documents: how a lookup finds what to copy, and the lookup of either kind that comes before another draft."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, model_validator
from pydantic_core import CoreSchema, core_schema

from decoding.documents.strict_yaml import Document
from decoding.drafts.copies import NgramCopies, SuffixCopies
from decoding.drafts.history import RequestHistory

# Longer n-grams hardly ever repeat, and each length costs an index of the sequence.
LONGEST_NGRAM = 32
MOST_COPIED = 64
MIN_MATCH, MAX_SPEC_FACTOR, MIN_TOKEN_PROB = 1, 2.0, 0.3
"""Chosen by replay on greedy answers of SmolLM2-135M to Spec-Bench and HumanEval."""

MaxCopied = Annotated[
    int, Field(ge=1, le=MOST_COPIED, description="most tokens to copy; the draft-length rule is not asked")
]


CopyIndex = NgramCopies | SuffixCopies
"""What was read of one growing sequence, which may grow but not change otherwise."""


class CopySettings(Document):
    """How to find what to copy. Equal settings make equal indexes, so that a sequence keeps one for each."""

    reads_history: ClassVar[bool] = False
    """True if tokens may also be copied from earlier answers."""

    @property
    def ngram_lengths(self) -> tuple[int, int] | None:
        """Longest and shortest n-gram of a prompt lookup; None for another way."""
        return None

    @property
    @abstractmethod
    def match(self) -> str:
        """The settings for tables."""

    @abstractmethod
    def new_index(self, token_ids: Sequence[int], history: RequestHistory | None = None) -> CopyIndex:
        """Return an index of `token_ids`, and of the earlier requests in `history` if these settings read them."""


class NgramMatch(CopySettings):
    """What followed an earlier occurrence of the last n-gram is copied."""

    max_ngram: int = Field(
        3, ge=1, le=LONGEST_NGRAM, description="longest n-gram at the end of the sequence to look up"
    )
    min_ngram: int = Field(1, ge=1, le=LONGEST_NGRAM, description="shortest n-gram; the longest one found counts")

    @model_validator(mode="after")
    def _ngrams_are_ordered(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram must be at most max_ngram, got {self.min_ngram} and {self.max_ngram}")
        return self

    @property
    def ngram_lengths(self) -> tuple[int, int]:
        return self.max_ngram, self.min_ngram

    @property
    def match(self) -> str:
        shorter = f" to {self.min_ngram}" if self.min_ngram < self.max_ngram else ""
        return f"n-grams of {self.max_ngram}{shorter}"

    def new_index(self, token_ids: Sequence[int], history: RequestHistory | None = None) -> CopyIndex:
        return NgramCopies(token_ids, max_ngram=self.max_ngram, min_ngram=self.min_ngram)


class SuffixMatch(CopySettings):
    """The most frequent continuation of the longest suffix match is copied."""

    reads_history: ClassVar[bool] = True
    min_match: int = Field(
        MIN_MATCH, ge=1, le=LONGEST_NGRAM, description="shortest suffix that must occur earlier; the longest one counts"
    )
    max_spec_factor: float = Field(
        MAX_SPEC_FACTOR, gt=0, le=64, description="most tokens to copy per token of the match"
    )
    min_token_prob: float = Field(
        MIN_TOKEN_PROB,
        ge=0,
        le=1,
        description="estimated probability of all copied tokens below which the copy ends",
    )

    @property
    def match(self) -> str:
        return f"matches from {self.min_match}, factor {self.max_spec_factor:g}, probability {self.min_token_prob:g}"

    def new_index(self, token_ids: Sequence[int], history: RequestHistory | None = None) -> CopyIndex:
        return SuffixCopies(
            token_ids,
            min_match=self.min_match,
            max_spec_factor=self.max_spec_factor,
            min_token_prob=self.min_token_prob,
            history=history,
        )


class FirstLookup(CopySettings):
    """A lookup before another draft: what is copied, and at most how many tokens (`max_tokens`)."""

    method_name: ClassVar[str]
    """Name of the kind of lookup, for readers."""

    @property
    def checks_copies(self) -> bool:
        """True if the other draft is to check copies after short n-grams."""
        return False

    if TYPE_CHECKING:  # each kind declares it after its own keys
        max_tokens: int

    @abstractmethod
    def describe(self) -> str:
        """Return one short phrase for tables."""


class Lookup(NgramMatch, FirstLookup):
    """Prompt lookup before another draft, and, with `direct_from`, within it.

    The model verifies copies after long n-grams at once. Those after shorter ones are right too seldom for that: the draft checks
    them, several tokens in one cheap pass, and goes on after the first that it would not have written itself. A vertical cascade
    (CAS-Spec, arXiv 2510.26843; ML-SpecQD) of a self-draft.
    """

    method_name: ClassVar[str] = "n-grams"
    max_tokens: MaxCopied = 10
    direct_from: int | None = Field(
        None,
        ge=2,
        le=LONGEST_NGRAM,
        exclude_if=lambda length: length is None,
        description="shortest n-gram whose copy the model verifies at once; the draft checks copies after shorter ones, if it is "
        "greedy and of fixed length, has no head and decodes one sequence",
    )

    @model_validator(mode="after")
    def _both_are_possible(self) -> Self:
        if self.direct_from is not None and not self.min_ngram < self.direct_from <= self.max_ngram:
            raise ValueError(
                f"direct_from must be above min_ngram and at most max_ngram, got {self.direct_from} for {self.match}"
            )
        return self

    @property
    def checks_copies(self) -> bool:
        return self.direct_from is not None

    @property
    def ngram_lengths(self) -> tuple[int, int]:
        """Lengths whose copies are verified at once: what engines can do."""
        return self.max_ngram, self.direct_from or self.min_ngram

    def new_index(self, token_ids: Sequence[int], history: RequestHistory | None = None) -> NgramCopies:
        return NgramCopies(token_ids, max_ngram=self.max_ngram, min_ngram=self.min_ngram, direct_from=self.direct_from)

    def describe(self) -> str:
        checked = "" if self.direct_from is None else f", below {self.direct_from} checked by the draft"
        return f"prompt lookup ({self.match}{checked}, {self.max_tokens} tokens)"


class SuffixLookup(SuffixMatch, FirstLookup):
    """Suffix automaton before another draft."""

    method_name: ClassVar[str] = "suffix automaton"
    method: Literal["suffix_automaton"] = "suffix_automaton"
    max_tokens: MaxCopied = 10

    def describe(self) -> str:
        return f"suffix automaton ({self.match}, {self.max_tokens} tokens)"


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
# Left out of a document without a lookup: most drafts have none.
LookupBefore = Annotated[
    AnyLookup | None,
    _ByMethod(),
    Field(
        exclude_if=lambda lookup: lookup is None,
        description="prompt lookup or suffix automaton, tried before the model drafts",
    ),
]


def lookup_columns(settings: CopySettings) -> dict[str, Any]:
    return {f"lookup.{key}": value for key, value in settings.model_dump(exclude={"kind"}).items()}
