"""The contract of a draft-length rule: frozen settings, and a controller that holds the state of one text.

A rule may look at past text and at the draft's *distribution*, never at the token sampled from it: that is what keeps
sampling exact. Rules know nothing of Optuna; the range in which a parameter is worth searching is declared beside it.
"""

from __future__ import annotations

from abc import abstractmethod
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field
from pydantic.fields import FieldInfo

from decoding.documents.strict_yaml import Document
from decoding.draft_length.costs import RoundCosts

if TYPE_CHECKING:  # profiles are read without torch
    from torch import Tensor

IDLE_AGEING = 0.25
"""How fast evidence ages in a round that drafts nothing, as a power of the forgetting in one that does (our formulation).

A round that drafts brings fresh evidence, so that old evidence can go quickly and a change of the text is seen. One that does
not brings none: it forgets only to have the draft tried again, and each trial of a useless draft costs time.
"""


class Decision(Enum):
    """What to do with the distribution the draft has just computed."""

    CONTINUE = auto()
    """Draw a token from it and go on drafting."""
    LAST = auto()
    """Draw a token from it, then verify."""
    STOP = auto()
    """Draw nothing from it, verify what there is."""


class DraftDistribution:
    """The draft's distribution over the next token, and the facts a rule may ask of it (each asked fact waits for the device)."""

    def __init__(self, scores: Tensor) -> None:
        self._scores = scores  # [vocabulary], processed logits

    @cached_property
    def _log_probabilities(self) -> Tensor:
        return self._scores.float().log_softmax(dim=-1)

    @cached_property
    def entropy(self) -> float:
        """Shannon entropy in nats."""
        log_probabilities = self._log_probabilities
        # exp(-inf) * -inf is nan where a processor has removed a token; its share of the entropy is 0.
        terms = log_probabilities.exp() * log_probabilities
        return float(-terms.nan_to_num(nan=0.0).sum())

    @cached_property
    def top_probability(self) -> float:
        """Probability of the likeliest token."""
        return float(self._log_probabilities.max().exp())


class Controller:
    """The state of a rule while it steers one text; the base class drafts up to `max_tokens` every round.

    The drafter calls `limit` once a round and `decide` once for each distribution; the loop calls `observe` after the
    verification. It is neither asked about a round that a prompt lookup in front of the draft has drafted, nor told of it. A
    controller must not touch the model, the cache or the sampling's random stream.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    @property
    def looks_at_drafts(self) -> bool:
        """Whether `decide` has a say in how long a draft is. If not, `limit` says it before the first pass, and the draft can be
        written without waiting for any token of it.
        """
        return type(self).decide is not Controller.decide

    def limit(self) -> int:
        """The most tokens to draft in the coming round; 0 makes it a plain step."""
        return self.max_tokens

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        """Whether to draw from `distribution`, `num_drafted` tokens having been drawn in this round already."""
        return Decision.CONTINUE

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learn how many of the round's drafts the target agreed with."""

    def adapted_rule(self) -> DraftLengthRule | None:
        """The rule with what has been learnt as its starting state, or None if it learns nothing."""
        return None


class Looking(Controller):
    """Drafts as long as it may, but looks at each token's distribution as other rules do: for timing what that takes."""

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        """Waits for the device, and goes on."""
        return Decision.CONTINUE if distribution.top_probability >= 0.0 else Decision.STOP


def tunable(default: float, *, low: float, high: float, ge: float, le: float, log: bool = False, why: str) -> Any:
    """A parameter with its allowed range [ge, le], the range worth searching [low, high] and what it does."""
    search: Any = {"low": low, "high": high, "log": log}
    return Field(default, ge=ge, le=le, description=why, json_schema_extra={"search": search})


class DraftLengthRule(Document):
    """The settings of a rule. `persistent` keeps the controller's state from one generation to the next."""

    rule: str
    max_tokens: int = tunable(8, low=1, high=16, ge=1, le=64, why="most tokens drafted in a round (K)")
    persistent: bool = Field(False, description="keep what was learnt across generations instead of starting afresh")

    @abstractmethod
    def controller(self) -> Controller:
        """A fresh controller, to steer one text (or, if `persistent`, one after another)."""

    def describe(self) -> str:
        """The rule and its tunable parameters in one short phrase for tables."""
        shown = [name for name, field in type(self).model_fields.items() if _is_tunable(field)]
        return f"{self.rule} ({', '.join(f'{name} {getattr(self, name):.3g}' for name in shown)})"


class CostAwareRule(DraftLengthRule):
    """A rule that learns how many tokens are accepted and weighs them against what a round costs on the device at hand.

    Its random stream is its own, apart from torch's and from that of token sampling.
    """

    forgetting: float = tunable(
        0.97, low=0.95, high=1.0, ge=0.5, le=1.0, why="share of the evidence kept from round to round (g)"
    )
    seed: int = Field(0, ge=0, description="of the rule's own random stream")
    costs: RoundCosts | None = Field(
        None, description="measured on the device at hand; the decoder measures them if the profile has none"
    )

    def with_costs(self, costs: RoundCosts) -> Self:
        """The same rule for a device with these costs."""
        return self.model_copy(update={"costs": costs})

    def known_costs(self) -> RoundCosts:
        """The costs; `ValueError` if they have not been measured yet."""
        if self.costs is None:
            raise ValueError(
                f"the rule {self.rule!r} has no costs: give them by "
                "with_costs(decoding.timing.round_costs.measure_round_costs(...)), "
                "or decode through decoding.decoder.Decoder, which measures them"
            )
        return self.costs

    def memory(self, num_drafted: int) -> float:
        """Share of the evidence kept over a round that drafted `num_drafted` tokens; a round without any ages it less."""
        return self.forgetting if num_drafted else self.forgetting**IDLE_AGEING


def _is_tunable(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and "search" in field.json_schema_extra
