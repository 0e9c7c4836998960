"""The contract of a draft document: frozen settings that answer every question about their draft.

Callers ask the document and never test its class. The defaults of `DraftDocument` describe a draft that runs no part of the
target and has no head. What drafts of several kinds may have, such as bits and a lookup before them, are `Parts`: a kind
that takes one has the field of that name, and everything else about parts is here.

A quantised draft runs the model's own linear layers with rounded weights, and shares the target's keys and values; the whole
model verifies with its own weights (the idea of QuantSpec, arXiv 2502.10424, and of QSpec, arXiv 2410.11305; our formulation).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.drafts.lookup import CopySettings, FirstLookup, lookup_columns

if TYPE_CHECKING:
    from decoding.drafts.layer_skip import LayerSkip

BitWidth = Literal[8, 4]
"""The precisions of a quantised draft."""

Bits = Annotated[
    BitWidth | None,
    Field(
        exclude_if=lambda bits: bits is None,
        description="bits of the draft's weights (8 or 4); the model's own weights without it",
    ),
]
"""A document key that most drafts leave out: they run the model's own weights."""


IdsBelow = Annotated[
    int | None,
    Field(
        ge=1,
        exclude_if=lambda below: below is None,
        description="with bits: the draft chooses from the token ids below this and from those of the text; from all without it",
    ),
]
"""A document key that most drafts leave out."""


def label_quantised(bits: BitWidth | None, label: str) -> str:
    """Return the label of a draft, such as `quantised exit`; `label` itself without bits."""
    return f"quantised {label}" if bits else label


@dataclass(frozen=True, slots=True)
class Parts:
    """What a draft has beside the settings of its kind."""

    bits: BitWidth | None = None
    """Bits of the draft's weights; None for the model's own weights."""
    lookup: FirstLookup | None = None
    """Prompt lookup or suffix automaton that is tried before the draft."""
    ids_below: int | None = None
    """Token ids below this, and those of the text, are what a quantised draft chooses from; None for all."""


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The trained head of a draft."""

    file: str
    sha256: str
    rereads: bool = False
    """True if the head reads all verified positions of a round again, with states of the target."""


class DraftDocument(Document):
    """The settings of a draft; `kind` is its key in `decoding.drafts.KINDS`."""

    kind: str
    drafts: ClassVar[bool] = True
    """False for plain decoding alone."""
    runs_model: ClassVar[bool] = False
    """True if drafting runs a part of the target."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the kind in tables, such as `exit with head`."""

    @property
    @abstractmethod
    def phrase(self) -> str:
        """One short phrase for tables, without the parts."""

    @property
    def own_columns(self) -> dict[str, Any]:
        """The columns of the draft in the table of trials, kind and parts apart."""
        return {} if self.copying is None else lookup_columns(self.copying)

    @property
    def trained_head(self) -> DraftHead | None:
        """The trained head that drafts, or None."""
        return None

    def check(self, num_layers: int) -> None:
        """Raise ValueError unless a target with `num_layers` blocks can run the draft."""

    def skipped(self, num_layers: int) -> LayerSkip:
        """Return what the draft skips in a target with `num_layers` blocks, in its precision, without head and lookup.

        Raises ValueError for a draft that runs no part of the target.
        """
        raise ValueError(f"{self.describe()} runs no part of the model: it has no draft pass to predict")

    def has_targets_keys(self, num_layers: int) -> bool:
        """Return True if a copy of the draft's blocks computes the target's keys and values: they are its first ones, or none."""
        if not self.runs_model:
            return True
        skipped = self.skipped(num_layers)
        return {*range(self.num_shared_blocks, num_layers)} <= {*skipped.skip_attention} & {*skipped.skip_mlp}

    @property
    def num_shared_blocks(self) -> int:
        """Number of leading blocks that the draft computes exactly as the target does."""
        return 0

    @property
    def parts(self) -> Parts:
        """The parts that the draft has; None for one that its kind does not take."""
        return Parts(**{name: part for name, part in self if name in PARTS})

    @property
    def takes(self) -> frozenset[str]:
        """Names of the parts that the kind may have."""
        return PARTS & type(self).model_fields.keys()

    def having(self, **parts: Any) -> Self:
        """Return the draft with other parts: `having(bits=8, lookup=None)`.

        Raises ValueError for a part that the kind does not take.
        """
        replace(self.parts, **parts)  # TypeError for an unknown part
        for name, part in parts.items():
            if part is not None and name not in self.takes:
                raise ValueError(f"a draft of kind {self.kind!r} takes no {name}")
        return self.model_copy(update={name: part for name, part in parts.items() if name in self.takes})

    @property
    def label(self) -> str:
        """Name of the kind in tables, with the precision."""
        return label_quantised(self.parts.bits, self.name)

    def describe(self) -> str:
        """Return one short phrase for tables."""
        parts = self.parts
        draft = f"{self.phrase} in int{parts.bits}" if parts.bits else self.phrase
        draft = f"{draft} from ids below {parts.ids_below:,} and the text's" if parts.ids_below else draft
        return f"{parts.lookup.describe()}, then {draft}" if parts.lookup else draft

    def columns(self) -> dict[str, Any]:
        """Return the columns of the draft in the table of trials, `kind` apart."""
        bits, lookup = self.parts.bits, self.parts.lookup
        columns = self.own_columns | ({"bits": bits} if bits else {}) | (lookup_columns(lookup) if lookup else {})
        return columns | ({"ids_below": self.parts.ids_below} if self.parts.ids_below else {})

    @property
    def copying(self) -> CopySettings | None:
        """How a draft that copies alone finds what to copy; None for another draft."""
        return self if isinstance(self, CopySettings) else None

    @property
    def reads_history(self) -> bool:
        """True if tokens may also be copied from earlier answers."""
        return any(each is not None and each.reads_history for each in (self.copying, self.parts.lookup))

    @property
    def files(self) -> Mapping[str, str]:
        """SHA-256 of each file that lies beside the profile, by file name."""
        return {} if (head := self.trained_head) is None else {head.file: head.sha256}


PARTS = frozenset(Parts.__dataclass_fields__)
