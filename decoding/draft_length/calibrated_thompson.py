"""Thompson sampling of one acceptance probability per level of confidence (our formulation).

EESD (arXiv 2406.03853) sets the draft length by Thompson sampling. We know its abstract, and from a secondary summary the names of
its two controllers, Beta-TS and Calibration-TS. This rule has its name from Calibration-TS; every formula here is ours.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from decoding.draft_length.contract import Controller, CostAwareRule, Decision, DraftDistribution
from decoding.draft_length.posteriors import UNIFORM, BetaPosterior, BetaPrior, GainPosterior, GainPrior, warm_start

# Denser near 1, where a good draft's probabilities are and where a little more certainty is worth many more tokens.
EDGES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 0.99)
BINS = tuple(zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
"""(low, high) of the draft's top-1 probability; the low end is included."""

PRIOR_TOKENS = 3.0
AS_CONFIDENT: tuple[BetaPrior, ...] = tuple(
    (round(PRIOR_TOKENS * (low + high) / 2, 4), round(PRIOR_TOKENS * (1 - (low + high) / 2), 4)) for low, high in BINS
)
"""A calibrated draft, right as often as its top-1 probability says, worth `PRIOR_TOKENS` tested tokens per bin."""

NO_GAIN = GainPrior()
PRIOR_ROUNDS = 3.0  # weight of the rate's prior, in drafted rounds that are as fast as plain decoding


class CalibratedThompson(CostAwareRule):
    """Learn the acceptance at each level of top-1 probability; draft on while one more token pays.

    *Whether to draft* is decided before the round's first pass: a mean gain is drawn from the posterior of the gain
    of drafted rounds, n_a + 1 - cost(n_d) / cost(0), the tokens beyond plain decoding's in the same time. A gain of
    at most 0 means a plain step.

    *How long*: each bin's theta_b is drawn once per round. Let S_i = theta_b1 ... theta_bi over the bins of the
    tokens drafted so far, and a, the mean acceptance over all remembered tested tokens, the estimate for the next
    one. Drafting continues while

        S_i a / (cost(i + 1) - cost(i)) > rate,

    where rate is the mean of this round's rate, (1 + S_1 + ... + S_i) / cost(i), and the rate of the remembered
    drafted rounds, the latter at least plain decoding's. This round's rate alone would stop a promising round too
    early, because its tokens are compared with themselves. The other rate alone would continue whenever every drawn
    theta is too high. A token whose pass is paid for is always verified.

    Evidence fades as in `BetaThompson`, towards `AS_CONFIDENT` and `NO_GAIN`. The bins forget in drafted rounds only,
    so that a draft tried again after a pause does not get the prior's confidence back. With the default g = 0.97 a
    useless draft costs less than 3 %.
    """

    words: ClassVar[str] = "Thompson sampling of the gain"
    rule: Literal["calibrated_thompson"] = "calibrated_thompson"
    prior: tuple[BetaPrior, ...] = Field(AS_CONFIDENT, description="(A, B) of each bin at the start of a sequence")
    gain: GainPrior = Field(NO_GAIN, description="prior gain of a drafted round at the start of a sequence")

    @field_validator("prior")
    @classmethod
    def _one_a_bin(cls, prior: tuple[BetaPrior, ...]) -> tuple[BetaPrior, ...]:
        if len(prior) != len(BINS):
            raise ValueError(f"must hold one pair (A, B) for each of the {len(BINS)} bins, got {len(prior)}")
        return prior

    def controller(self) -> CalibratedThompsonController:
        return CalibratedThompsonController(self)


@dataclass(slots=True)
class _RoundSoFar:
    """The thetas drawn for the current round, and its drafts so far."""

    thetas: list[float]
    bins: list[int] = field(default_factory=list)
    survival: float = 1.0
    tokens: float = 1.0
    """Expected tokens of a round that ends here, including the target's own."""


class CalibratedThompsonController(Controller):
    """Posteriors of acceptance and of the gain of drafting, and a random stream.

    Acceptance is learned per bin and over all tokens. The controller also remembers the rate of drafted rounds.
    """

    def __init__(self, rule: CalibratedThompson) -> None:
        super().__init__(rule.max_tokens)
        self._rule = rule
        costs = rule.known_costs().looking()
        self._costs = [costs.of(length) for length in range(rule.max_tokens + 2)]
        self._stream = random.Random(rule.seed)
        self.acceptance = [BetaPosterior(*prior) for prior in rule.prior]
        self.overall = _overall(rule.prior)
        self.gain = GainPosterior.of(rule.gain)
        self._tokens, self._cost = PRIOR_ROUNDS, PRIOR_ROUNDS * self._costs[0]  # of the drafted rounds, faded
        self._round = self._new_round()

    @property
    def may_stop(self) -> bool:
        """False: the token after which drafting does not pay is verified too."""
        return False

    def limit(self) -> int:
        """Return 0 if drafting does not seem to pay at present, else `max_tokens`."""
        self._round = self._new_round()
        return self.max_tokens if self.gain.draw(self._stream) > 0.0 else 0

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        """Continue if the token after this one is worth its time.

        This one is verified in any case.
        """
        now, length = self._round, num_drafted + 1
        bin_index = bisect_right(EDGES, distribution.top_probability)
        now.bins.append(bin_index)
        now.survival *= now.thetas[bin_index]
        now.tokens += now.survival
        tokens = now.survival * self.overall.mean
        cost = self._costs[length + 1] - self._costs[length]
        return (
            Decision.CONTINUE if tokens > cost * self._rate_to_beat(now.tokens / self._costs[length]) else Decision.LAST
        )

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Update the bins of the accepted tokens and of the first rejected one.

        Later drafts were not tested.
        """
        memory = self._rule.memory(num_drafted)
        self.gain.forget(NO_GAIN, memory)
        if num_drafted == 0:
            return
        for posterior, prior in zip(self.acceptance, AS_CONFIDENT, strict=True):
            posterior.forget(prior, memory)
        self.overall.forget(UNIFORM, memory)
        for index, bin_index in enumerate(self._round.bins[: num_accepted + 1]):
            for posterior in (self.acceptance[bin_index], self.overall):
                posterior.learn(accepted=int(index < num_accepted), rejected=int(index == num_accepted))
        tokens, cost = num_accepted + 1, self._costs[num_drafted]
        self.gain.learn(tokens - cost / self._costs[0])
        self._tokens, self._cost = memory * self._tokens + tokens, memory * self._cost + cost

    def adapted_rule(self) -> CalibratedThompson:
        prior = warm_start(self.acceptance, AS_CONFIDENT)
        return self._rule.model_copy(update={"prior": prior, "gain": self.gain.warm_start(NO_GAIN)})

    def _new_round(self) -> _RoundSoFar:
        return _RoundSoFar(thetas=[posterior.draw(self._stream) for posterior in self.acceptance])

    def _rate_to_beat(self, rate_of_round: float) -> float:
        rate_before = max(self._tokens / self._cost, 1.0 / self._costs[0])
        return (rate_of_round + rate_before) / 2


def _overall(prior: tuple[BetaPrior, ...]) -> BetaPosterior:
    """Return the posterior over all tokens from the evidence in the bins' prior.

    The prior's own pseudo-counts are left out, because the bins that a sequence will use are not known in advance.
    """
    overall = BetaPosterior(*UNIFORM)
    for (accepted, rejected), (accepted_before, rejected_before) in zip(prior, AS_CONFIDENT, strict=True):
        overall.learn(max(accepted - accepted_before, 0.0), max(rejected - rejected_before, 0.0))
    return overall
