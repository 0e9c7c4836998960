"""The registry of draft kinds, and document keys that hold a draft of any of them.

Each entry joins a draft document with its drafter and its predictor, which are named as `module:name` and imported at their first
use, so that this package imports neither torch nor `studies`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from decoding.drafts.contract import DraftDocument
from decoding.drafts.early_exit import EarlyExit
from decoding.drafts.layer_skip import LayerSkip
from decoding.drafts.prompt_lookup import PromptLookup, SuffixDraft


class PlainDecoding(DraftDocument):
    """No draft: nothing that was tried is faster than plain decoding."""

    kind: Literal["none"] = "none"
    drafts: ClassVar[bool] = False
    name: ClassVar[str] = "plain decoding"
    phrase: ClassVar[str] = "plain decoding"


@dataclass(frozen=True)
class DraftKind:
    """A kind of draft: its document, and what drafts and predicts with it."""

    document: type[DraftDocument]
    drafter: str
    """`module:name` of a function that builds a `decoding.drafters.contract.Drafter`, or None for plain decoding.

    It is called with the target, the draft without the lookup before it, `Decoding` and `heads`; `prefix_reuse` is off in bit-exact
    mode. Raises ValueError for layers that the target does not have, and `ExitHeadError` for a head that `heads` does not hold.
    """
    predictor: str
    """`module:name` of a class that implements `studies.prediction.predictors.DraftPredictor`."""

    def load_drafter(self) -> Any:
        return resolve_name(self.drafter)

    def load_predictor(self) -> Any:
        return resolve_name(self.predictor)


KINDS: dict[str, DraftKind] = {
    "layer_skip": DraftKind(
        LayerSkip, "decoding.drafters.layer_skip:new_drafter", "studies.prediction.predictors:SkipPredictor"
    ),
    "early_exit": DraftKind(
        EarlyExit, "decoding.drafters.early_exit:new_drafter", "studies.prediction.predictors:ExitPredictor"
    ),
    "prompt_lookup": DraftKind(
        PromptLookup, "decoding.drafters.prompt_lookup:new_drafter", "studies.prediction.predictors:CopyPredictor"
    ),
    "suffix_automaton": DraftKind(
        SuffixDraft, "decoding.drafters.prompt_lookup:new_drafter", "studies.prediction.predictors:CopyPredictor"
    ),
    "none": DraftKind(
        PlainDecoding, "decoding.drafters.build:no_drafter", "studies.prediction.predictors:PlainPredictor"
    ),
}
"""The draft kinds by name."""


def infer_kind(keys: Collection[str]) -> str:
    """Return the kind whose document has most of `keys`; the first registered one among equals."""
    return max(KINDS, key=lambda name: len(KINDS[name].document.model_fields.keys() & set(keys)))


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
