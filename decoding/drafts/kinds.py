"""A draft kind, the table of the registered ones, and document keys that hold a draft of any of them.

The table is filled by `decoding.drafts.registry`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from decoding.drafts.contract import DraftDocument


@dataclass(frozen=True)
class DraftKind:
    """A kind of draft: its document, and what drafts and predicts with it."""

    document: type[DraftDocument]
    drafter: str
    """`module:name` of a `decoding.drafters.contract.NewDrafter`."""
    predictor: str
    """`module:name` of a class that implements `studies.prediction.contract.DraftPredictor`."""

    def load_drafter(self) -> Any:
        return resolve_name(self.drafter)

    def load_predictor(self) -> Any:
        return resolve_name(self.predictor)


KINDS: dict[str, DraftKind] = {}
"""The draft kinds by name; see `decoding.drafts.registry`."""


class _ByKind:
    """Validates a draft as the document that `KINDS` has for its `kind`; the registry is read at each validation."""

    def __init__(self, *, may_be_plain: bool = True) -> None:
        self._may_be_plain = may_be_plain

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(self._adapter().core_schema)

    def _validate(self, value: Any) -> Any:
        return self._adapter().validate_python(value)

    def _adapter(self) -> TypeAdapter[Any]:
        documents = (kind.document for kind in KINDS.values())
        return _adapter(tuple(each for each in documents if each.drafts or self._may_be_plain))


@lru_cache
def _adapter(documents: tuple[type[DraftDocument], ...]) -> TypeAdapter[Any]:
    any_document: Any = Annotated[Union[documents], Field(discriminator="kind")]  # noqa: UP007 - built from the registry
    return TypeAdapter(any_document)


if TYPE_CHECKING:
    Draft = DraftDocument
    RealDraft = DraftDocument
else:
    Draft = Annotated[DraftDocument, _ByKind()]
    """A document key that holds a draft of any registered kind."""
    RealDraft = Annotated[DraftDocument, _ByKind(may_be_plain=False)]
    """A document key that holds a draft other than plain decoding."""
