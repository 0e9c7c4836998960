"""Candidate trees as documents: side leaves beside a drafted chain, which the target verifies in the same pass.

The draft decides a chain as without a tree. At each depth its distribution gives further candidates, the leaves, which are never
expanded: drafting costs what it costs without them, and only the verification is wider. The number of leaves at a depth depends on
the draft's distributions and on the tokens before that depth, never on the candidates there, which keeps sampling exact.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Union

from pydantic import Field

from decoding.documents.strict_yaml import Document

MOST_LEAVES = 32
"""Most leaves of a round, at all depths together: those of the first depths come first."""
MOST_PER_DEPTH = 9


@dataclass(frozen=True, slots=True)
class SeenDepth:
    """Facts about one depth of a drafted chain that a tree may weigh."""

    probability: float
    """The draft's probability of the token that the chain took."""
    ranked: Sequence[float]
    """The highest probabilities of the draft, in descending order."""


class CandidateTree(Document):
    """A shape of tree: how many leaves each depth has."""

    shape: str
    weighs: ClassVar[bool] = True
    """True if the numbers depend on the draft's probabilities, which the host then has to read."""

    @property
    @abstractmethod
    def most_per_depth(self) -> int:
        """Most leaves at a depth."""

    @property
    def most_leaves(self) -> int:
        """Most leaves of a round."""
        return MOST_LEAVES

    @abstractmethod
    def wanted(self, depths: Sequence[SeenDepth], *, is_greedy: bool) -> list[int]:
        """Return the number of leaves wanted at each depth, of which at most `most_leaves` in all are taken."""

    @abstractmethod
    def describe(self) -> str:
        """Return one short phrase for tables."""

    def counts(self, depths: Sequence[SeenDepth], *, is_greedy: bool) -> list[int]:
        """Return the number of leaves at each depth, the first depths served first."""
        left, counts = self.most_leaves, list[int]()
        for wanted in self.wanted(depths, is_greedy=is_greedy):
            counts.append(min(wanted, left))
            left -= counts[-1]
        return counts


class FixedLeaves(CandidateTree):
    """The same number of leaves at every depth."""

    shape: Literal["fixed"] = "fixed"
    leaves: int = Field(2, ge=1, le=MOST_PER_DEPTH, description="side leaves at each depth")
    weighs: ClassVar[bool] = False

    @property
    def most_per_depth(self) -> int:
        return self.leaves

    def wanted(self, depths: Sequence[SeenDepth], *, is_greedy: bool) -> list[int]:
        return [self.leaves] * len(depths)

    def describe(self) -> str:
        return f"{self.leaves} side {'leaf' if self.leaves == 1 else 'leaves'}"


class PublishedLeaves(CandidateTree):
    """The tree of ConfLayers' released code: fewer leaves where the draft is surer.

    One candidate is the chain's token: 3, 5, 8 or 10 candidates of greedy drafts, 1, 3, 5 or 10 of sampled ones. Where drafts are
    sampled, that code weighs the probability of the sampled token, which biases the output; here it is the highest probability.
    """

    shape: Literal["published"] = "published"

    @property
    def most_per_depth(self) -> int:
        return MOST_PER_DEPTH

    def wanted(self, depths: Sequence[SeenDepth], *, is_greedy: bool) -> list[int]:
        leaves = (2, 4, 7, 9) if is_greedy else (0, 2, 4, 9)
        return [leaves[sum(depth.ranked[0] <= bound for bound in (0.95, 0.8, 0.5))] for depth in depths]

    def describe(self) -> str:
        return "published tree"


class SizedLeaves(CandidateTree):
    """A tree as large as it pays: leaves whose expected gain in tokens is high enough (our formulation).

    The gain of a leaf is the probability that the chain reaches its depth times the probability that it is the token there, both
    by the draft. A leaf pays if its gain exceeds the cost of a verified position in plain passes times the tokens per plain pass,
    the speed-up: this product is `least_gain`. EAGLE-4 states the idea of a tree sized from measured costs.
    """

    shape: Literal["sized"] = "sized"
    least_gain: float = Field(0.05, gt=0.0, le=1.0, description="expected tokens that a leaf has to add")
    max_leaves: int = Field(8, ge=1, le=MOST_LEAVES, description="most side leaves of a round")

    @property
    def most_per_depth(self) -> int:
        return min(self.max_leaves, MOST_PER_DEPTH)

    @property
    def most_leaves(self) -> int:
        return self.max_leaves

    def wanted(self, depths: Sequence[SeenDepth], *, is_greedy: bool) -> list[int]:
        """Return the number of ranks after the first whose gain is high enough.

        Ranks, not the leaves themselves: sampled leaves must not decide about their own number.
        """
        reached, counts = 1.0, list[int]()
        for depth in depths:
            counts.append(sum(reached * p > self.least_gain for p in depth.ranked[1 : self.most_per_depth + 1]))
            reached *= depth.probability
        return counts

    def describe(self) -> str:
        return f"tree of at most {self.max_leaves} leaves (gain {self.least_gain:.3g})"


if TYPE_CHECKING:
    AnyTree = CandidateTree
else:
    AnyTree = Annotated[Union[FixedLeaves, PublishedLeaves, SizedLeaves], Field(discriminator="shape")]  # noqa: UP007

Tree = Annotated[
    AnyTree | None,
    Field(
        exclude_if=lambda tree: tree is None,
        description="side leaves that are verified beside the drafted chain; a chain alone without it",
    ),
]
"""A document key that most drafts leave out: their rounds are chains."""
