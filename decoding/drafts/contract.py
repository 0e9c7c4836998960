"""The contract of a draft document: frozen settings that answer every question about their draft.

Callers ask the document and never test its class. The defaults of `DraftDocument` describe a draft that runs no part of the
target, needs no file and comes without a lookup; a kind overrides what differs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from decoding.documents.strict_yaml import Document

if TYPE_CHECKING:
    from decoding.drafts.layer_skip import LayerSkip
    from decoding.drafts.lookup import FirstLookup
    from decoding.drafts.precision import BitWidth
    from decoding.drafts.trees import CandidateTree


class Need(StrEnum):
    """Something that the runtime must provide for a draft."""

    MODEL_PASS = "model_pass"
    """Passes over a part of the target: each drafted token costs time."""
    EXIT_HEAD = "exit_head"
    """A trained head: that of an exit, or a feature head."""


class DraftDocument(Document):
    """The settings of a draft; `kind` is its key in `decoding.drafts.registry.KINDS`."""

    kind: str
    drafts: ClassVar[bool] = True
    """False for plain decoding alone."""
    takes_lookup: ClassVar[bool] = False
    """True for a kind that may have a prompt lookup before it (`with_lookup`)."""
    takes_bits: ClassVar[bool] = False
    """True for a kind that may be quantised (`with_bits`)."""
    takes_tree: ClassVar[bool] = False
    """True for a kind whose distributions may give side leaves (`with_tree`)."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the kind in tables, such as `exit with head`."""

    @abstractmethod
    def describe(self) -> str:
        """Return one short phrase for tables."""

    @property
    def needs(self) -> frozenset[Need]:
        """Requirements on the runtime."""
        return frozenset()

    @property
    def runs_model(self) -> bool:
        """True if drafting runs a part of the target."""
        return Need.MODEL_PASS in self.needs

    @property
    def has_head(self) -> bool:
        """True if a trained head drafts."""
        return Need.EXIT_HEAD in self.needs

    @property
    def drafts_on(self) -> bool:
        """True if the head reads its own output in every step of a round but the first, as a feature head does."""
        return False

    @property
    def rereads_rounds(self) -> bool:
        """True if a head reads all verified positions of a round again, with states of the target."""
        return False

    @property
    def num_draft_tokens(self) -> int | None:
        """Size of the vocabulary that the draft chooses from; None for the model's."""
        return None

    @property
    def weight_bits(self) -> BitWidth | None:
        """Bits of the draft's weights; None for the model's own weights."""
        return None

    @property
    def files(self) -> Mapping[str, str]:
        """SHA-256 of each file that lies beside the profile, by file name."""
        return {}

    def with_file_names(self, names: Mapping[str, str]) -> Self:
        """Return the draft with its files renamed; `names` maps old names to new ones."""
        return self

    def check(self, num_layers: int) -> None:
        """Raise ValueError unless a target with `num_layers` blocks can run the draft."""

    def columns(self) -> dict[str, Any]:
        """Return the columns of the draft in the table of trials, `kind` apart."""
        return {}

    @property
    def lookup_first(self) -> FirstLookup | None:
        """Prompt lookup or suffix automaton that is tried before the draft, or None."""
        return None

    @property
    def ngram_lengths(self) -> tuple[int, int] | None:
        """Longest and shortest n-gram of a prompt lookup that drafts alone; None for another draft."""
        return None

    @property
    def longest_unsteered(self) -> int:
        """Most tokens of a round whose length the draft-length rule does not decide; 0 if it decides all."""
        return 0 if self.lookup_first is None else self.lookup_first.max_tokens

    @property
    def reads_history(self) -> bool:
        """True if tokens may be copied from earlier answers."""
        return self.lookup_first is not None and self.lookup_first.reads_history

    def without_lookup(self) -> Self:
        """Return the draft without the lookup before it."""
        return self

    def with_lookup(self, lookup: FirstLookup) -> Self:
        """Return the draft with `lookup` before it. Raises ValueError for a kind that takes none."""
        raise ValueError(f"no lookup can come before a draft of kind {self.kind!r}")

    def with_bits(self, bits: BitWidth | None) -> Self:
        """Return the draft with weights of `bits`, or with the model's own. Raises ValueError for a kind without weights."""
        raise ValueError(f"a draft of kind {self.kind!r} runs no weights that could be quantised")

    @property
    def candidate_tree(self) -> CandidateTree | None:
        """Side leaves that are verified beside the drafted chain, or None."""
        return None

    def with_tree(self, tree: CandidateTree | None) -> Self:
        """Return the draft with the side leaves of `tree`, or as a chain. Raises ValueError for a kind that takes none."""
        if tree is None:
            return self
        raise ValueError(f"a draft of kind {self.kind!r} has no distributions that could give side leaves")

    def skipped(self, num_layers: int) -> LayerSkip:
        """Return what the draft skips in a target with `num_layers` blocks, in its precision, without head, lookup and tree.

        Raises ValueError for a draft that runs no part of the target.
        """
        raise ValueError(f"{self.describe()} runs no part of the model: it has no draft pass to predict")

    @property
    def num_shared_blocks(self) -> int:
        """Number of leading blocks that the draft computes exactly as the target does."""
        return 0
