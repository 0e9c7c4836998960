"""The contract of a draft-length rule: frozen settings, and a controller per sequence.

A rule may look at past tokens and at the draft's *distribution*, never at the token sampled from it: this keeps
sampling exact. Rules know nothing of Optuna; the range in which a parameter is worth searching is declared with the
parameter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field
from pydantic.fields import FieldInfo

from decoding.documents.strict_yaml import Document

if TYPE_CHECKING:  # profiles are read without torch
    from torch import Tensor

IDLE_AGEING = 0.25
"""Ageing of evidence in a round without drafts, as a power of the forgetting in a drafted round (our formulation).

A drafted round brings new evidence, so old evidence can fade quickly and changes in the sequence are noticed. A round
without drafts brings none: it forgets only so that the draft is tried again, and each trial of a useless draft costs
time.
"""


class Decision(Enum):
    """What to do with the distribution that the draft has just computed."""

    CONTINUE = auto()
    """Draw a token from it and keep drafting."""
    LAST = auto()
    """Draw a token from it, then verify."""
    STOP = auto()
    """Draw no token from it; verify the tokens drafted so far."""


Read = Callable[[Any], list[Any]]
"""Copies a tensor [n] to the host, in one transfer."""


class DraftDistribution:
    """The draft's distribution over the next token, and the statistics that a rule may query.

    The first query of each waits for the device. `scores` [vocabulary] are processed logits, `read` copies a tensor to
    the host. If the pass has computed both statistics, `known` [2] holds them, and they are read together.
    """

    def __init__(self, scores: Tensor | None, read: Read | None = None, known: Any = None) -> None:
        self._scores, self._read, self._known = scores, read, known

    @classmethod
    def of(cls, top_probability: float, entropy: float) -> Self:
        """Return a distribution whose statistics are on the host already."""
        return cls(None, list, (top_probability, entropy))

    @cached_property
    def entropy(self) -> float:
        """Shannon entropy in nats."""
        return self._number(entropy(self._log_probabilities)) if self._known is None else self._numbers[1]

    @cached_property
    def top_probability(self) -> float:
        return self._number(top_probability(self._log_probabilities)) if self._known is None else self._numbers[0]

    @cached_property
    def _log_probabilities(self) -> Tensor:
        assert self._scores is not None, "given unless both statistics are known"
        return self._scores.float().log_softmax(dim=-1)

    @cached_property
    def _numbers(self) -> list[float]:
        return self._known.tolist() if self._read is None else self._read(self._known)

    def _number(self, statistic: Tensor) -> float:
        return float(statistic) if self._read is None else self._read(statistic.reshape(1))[0]


class Controller:
    """The state of a rule for one sequence.

    The base class drafts up to `max_tokens` every round. The drafter calls `limit` once per round and `decide` once
    per distribution; the loop calls `observe` after the verification. Rounds drafted by a prompt lookup that precedes
    the draft make none of these calls. A controller must not touch the model, the cache or the sampling's random
    stream.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    @property
    def looks_at_drafts(self) -> bool:
        """True if `decide` may end a draft.

        If not, `limit` fixes the length before the first pass, and the draft can be computed without waiting for any
        of its tokens.
        """
        return type(self).decide is not Controller.decide

    @property
    def may_stop(self) -> bool:
        """True if `decide` may answer STOP, so that a pass has run whose token is not drafted."""
        return self.looks_at_drafts

    @property
    def may_pause(self) -> bool:
        """True if `limit` may be 0 while tokens could be drafted, so that several rounds in a row may draft nothing."""
        return type(self).limit is not Controller.limit

    def limit(self) -> int:
        """Return the most tokens to draft in the coming round; 0 makes it a plain step."""
        return self.max_tokens

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        """Decide on drawing from `distribution`, after `num_drafted` tokens were drawn in this round."""
        return Decision.CONTINUE

    def length_of_copy(self, limit: int) -> int:
        """Return how many of `limit` copied tokens to draft: each has probability 1."""
        certain = DraftDistribution.of(top_probability=1.0, entropy=0.0)
        limit = min(limit, self.limit())
        for num_drafted in range(limit):
            decision = self.decide(num_drafted, certain)
            if decision is not Decision.CONTINUE:
                return num_drafted + (decision is Decision.LAST)
        return limit

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Update the state with the number of the round's drafts that the target accepted."""

    def adapted_rule(self) -> DraftLengthRule | None:
        """Return the rule with the current state as its initial one, or None without state."""
        return None


class Looking(Controller):
    """Drafts to the limit but queries every token's distribution, to time what the queries cost."""

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        return Decision.CONTINUE if distribution.top_probability >= 0.0 else Decision.STOP


def tunable(default: Any = ..., *, low: float, high: float, ge: float, le: float, log: bool = False, why: str) -> Any:
    """Declare a parameter with its allowed range [ge, le], search range [low, high] and description `why`.

    Rules that share a parameter declare it without a default in an `Annotated` type, and give the default themselves.
    """
    search: Any = {"low": low, "high": high, "log": log}
    return Field(default, ge=ge, le=le, description=why, json_schema_extra={"search": search})


class DraftLengthRule(Document):
    """The settings of a rule. `persistent` keeps the controller's state from one generation to the next."""

    words: ClassVar[str] = ""
    """The rule as readers know it; default: its name."""
    rule: str
    max_tokens: int = tunable(8, low=1, high=16, ge=1, le=64, why="most tokens drafted in a round (K)")
    persistent: bool = Field(False, description="keep the adapted state across generations instead of resetting it")

    @property
    def fixed_threshold(self) -> float | None:
        """Top-1 probability below which every draft ends, if that and `max_tokens` are the whole rule; else None."""
        return None

    @property
    def is_fixed(self) -> bool:
        """True if every round drafts `max_tokens`."""
        return False

    @abstractmethod
    def controller(self) -> Controller:
        """Return a fresh controller for one sequence (or, if `persistent`, for consecutive sequences)."""

    def describe(self) -> str:
        """Return a short phrase for tables, without the parameters that `parameters` lists."""
        return f"{self.words or self.rule}, up to {self.max_tokens} tokens"

    def parameters(self) -> str:
        """Return the tunable parameters beside `max_tokens`, with their values."""
        names = [name for name, field in type(self).model_fields.items() if _is_tunable(field)]
        return ", ".join(f"{name} {getattr(self, name):.3g}" for name in names if name != "max_tokens")


Cost = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class RoundCosts(Document):
    """Round times relative to one plain one-token target pass.

    A round consists of n draft passes and the verification of n tokens.
    """

    draft_step: Cost = Field(description="one draft pass when the draft's length is fixed beforehand")
    look: float = Field(
        0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="extra cost per draft pass if a rule reads its distribution before the next pass",
    )
    verify: tuple[Cost, ...] = Field(
        min_length=2, description="verify[n]: the target's pass over the last token and n drafts; verify[0] is about 1"
    )

    def looking(self) -> RoundCosts:
        """Return the costs for a rule that queries each token's distribution."""
        return RoundCosts(draft_step=self.draft_step + self.look, verify=self.verify)

    def of(self, num_drafted: int) -> float:
        """Return the cost of a round that drafts `num_drafted` tokens; raise `ValueError` if it is negative."""
        if num_drafted < 0:
            raise ValueError(f"a round drafts 0 tokens or more, got {num_drafted}")
        return self.verify_cost(num_drafted) + num_drafted * self.draft_step

    def verify_cost(self, num_drafted: int) -> float:
        """Return the cost of verifying `num_drafted` tokens, extrapolated linearly beyond the measured widths."""
        beyond = num_drafted - (len(self.verify) - 1)
        if beyond <= 0:
            return self.verify[num_drafted]
        # A falling last step is measurement noise: extrapolated, it would make long drafts free.
        step = max(self.verify[-1] - self.verify[-2], 0.0)
        return self.verify[-1] + beyond * step


class CostAwareRule(DraftLengthRule):
    """A rule that learns the acceptance and weighs it against the device's round costs.

    It has a random stream of its own, separate from torch's and from token sampling's.
    """

    forgetting: float = tunable(
        0.97, low=0.95, high=1.0, ge=0.5, le=1.0, why="share of the evidence kept from round to round (g)"
    )
    seed: int = Field(0, ge=0, description="seed of the rule's own random stream")
    costs: RoundCosts | None = Field(
        None, description="measured on the device at hand; `load_decoder` measures them if the profile has none"
    )

    def with_costs(self, costs: RoundCosts) -> Self:
        return self.model_copy(update={"costs": costs})

    def known_costs(self) -> RoundCosts:
        if self.costs is None:
            raise ValueError(
                f"the rule {self.rule!r} has no costs: set them by "
                "with_costs(decoding.timing.round_costs.measure_round_costs(...)), "
                "or resolve them with decoding.timing.round_costs.with_measured_costs(...)"
            )
        return self.costs

    def memory(self, num_drafted: int) -> float:
        """Return the share of the evidence kept over a round that drafted `num_drafted` tokens.

        A round without drafts ages evidence less.
        """
        return self.forgetting if num_drafted else self.forgetting**IDLE_AGEING


def _is_tunable(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and "search" in field.json_schema_extra


def top_probability(log_probabilities: Tensor) -> Tensor:
    """Return the probability [..] of the most likely token, from log probabilities [.., vocabulary]."""
    return log_probabilities.amax(dim=-1).exp()


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return the Shannon entropy [..] in nats, from log probabilities [.., vocabulary]."""
    # exp(-inf) * -inf is nan where a processor has removed a token; its contribution to the entropy is 0.
    return -(log_probabilities.exp() * log_probabilities).nan_to_num(nan=0.0).sum(dim=-1)
