"""The Calibration variant of EESD's Thompson-sampling controller (arXiv 2406.03853): one acceptance per level of confidence.

Of the paper we know the abstract, which names the method; every formula here is our formulation.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, field_validator

from decoding.draft_length.contract import Controller, CostAwareRule, Decision, DraftDistribution
from decoding.draft_length.posteriors import UNIFORM, BetaPosterior, BetaPrior, GainPosterior, GainPrior, warm_start

# Denser near 1, where drafts of a good model lie and where a little more certainty is worth many more tokens.
EDGES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 0.99)
BINS = tuple(zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
"""(low, high) of the draft's top-1 probability; a bin holds its low end."""

PRIOR_TOKENS = 3.0
AS_CONFIDENT: tuple[BetaPrior, ...] = tuple(
    (round(PRIOR_TOKENS * (low + high) / 2, 4), round(PRIOR_TOKENS * (1 - (low + high) / 2), 4)) for low, high in BINS
)
"""The draft is right as often as it believes to be, worth `PRIOR_TOKENS` tested tokens a bin."""

NO_GAIN = GainPrior()
PRIOR_ROUNDS = 3.0  # drafted rounds, as fast as plain decoding, that the rate begins with


class CalibratedThompson(CostAwareRule):
    """Learn how often the draft is right at each level of its top-1 probability; go on while one more token pays.

    *Whether to draft* in a round, decided before its first pass: a mean gain is drawn from the posterior of the gain of drafted
    rounds, n_a + 1 - cost(n_d) / cost(0), the tokens beyond those of plain decoding in the same time. Not above 0 is a plain step.

    *How long*: each bin's theta_b is drawn once a round. With the bins of the tokens drafted so far, S_i = theta_b1 ... theta_bi,
    and a the mean acceptance over all tested tokens remembered, the guess for the next one, drafting goes on while

        S_i a / (cost(i + 1) - cost(i)) > rate,

    rate being the mean of this round's, (1 + S_1 + ... + S_i) / cost(i), and that of the drafted rounds remembered, never taken
    to be below plain decoding's. This round's alone stops a round that begins well too early: its tokens are rated against
    themselves. The others' alone goes on with every theta drawn too high. The token whose pass is paid is always verified.

    Evidence fades as in `BetaThompson`, towards `AS_CONFIDENT` and `NO_GAIN`; the bins forget in drafted rounds only, so that a
    draft tried again is not taken at its own word. With the default g = 0.97 a useless draft costs less than 3 %.
    """

    rule: Literal["calibrated_thompson"] = "calibrated_thompson"
    prior: tuple[BetaPrior, ...] = Field(AS_CONFIDENT, description="(A, B) of each bin at the start of a text")
    gain: GainPrior = Field(NO_GAIN, description="gain of a drafted round as believed at the start of a text")

    @field_validator("prior")
    @classmethod
    def _one_a_bin(cls, prior: tuple[BetaPrior, ...]) -> tuple[BetaPrior, ...]:
        if len(prior) != len(BINS):
            raise ValueError(f"must hold one pair (A, B) for each of the {len(BINS)} bins, got {len(prior)}")
        return prior

    def controller(self) -> CalibratedThompsonController:
        """A controller that believes the priors; `ValueError` if the costs are not known."""
        return CalibratedThompsonController(self)


@dataclass(slots=True)
class _RoundSoFar:
    """What was drawn for the round, and what has been drafted in it."""

    thetas: list[float]
    bins: list[int] = field(default_factory=list)
    survival: float = 1.0
    tokens: float = 1.0
    """Expected of a round that ends here, the target's own token among them."""


class CalibratedThompsonController(Controller):
    """Posteriors of each bin, of all tokens and of the gain of drafting, the rate of the drafted rounds, and a random stream."""

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

    def limit(self) -> int:
        """0 if drafting does not seem to pay at present, else all that `decide` may want."""
        self._round = self._new_round()
        return self.max_tokens if self.gain.draw(self._stream) > 0.0 else 0

    def decide(self, num_drafted: int, distribution: DraftDistribution) -> Decision:
        """Go on if the token after this one is worth its time; this one is verified in any case."""
        now, length = self._round, num_drafted + 1
        place = bisect_right(EDGES, distribution.top_probability)
        now.bins.append(place)
        now.survival *= now.thetas[place]
        now.tokens += now.survival
        tokens = now.survival * self.overall.mean
        cost = self._costs[length + 1] - self._costs[length]
        return (
            Decision.CONTINUE if tokens > cost * self._rate_to_beat(now.tokens / self._costs[length]) else Decision.LAST
        )

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Credit the bins of the accepted tokens and of the first rejected one; those behind it were not tested."""
        memory = self._rule.memory(num_drafted)
        self.gain.forget(NO_GAIN, memory)
        if num_drafted == 0:
            return
        for posterior, prior in zip(self.acceptance, AS_CONFIDENT, strict=True):
            posterior.forget(prior, memory)
        self.overall.forget(UNIFORM, memory)
        for index, place in enumerate(self._round.bins[: num_accepted + 1]):
            for posterior in (self.acceptance[place], self.overall):
                posterior.learn(accepted=int(index < num_accepted), rejected=int(index == num_accepted))
        tokens, cost = num_accepted + 1, self._costs[num_drafted]
        self.gain.learn(tokens - cost / self._costs[0])
        self._tokens, self._cost = memory * self._tokens + tokens, memory * self._cost + cost

    def adapted_rule(self) -> CalibratedThompson:
        """The rule, starting at the posteriors reached, with little enough evidence to stay adaptive."""
        prior = warm_start(self.acceptance, AS_CONFIDENT)
        return self._rule.model_copy(update={"prior": prior, "gain": self.gain.warm_start(NO_GAIN)})

    def _new_round(self) -> _RoundSoFar:
        return _RoundSoFar(thetas=[posterior.draw(self._stream) for posterior in self.acceptance])

    def _rate_to_beat(self, rate_of_round: float) -> float:
        """Tokens per unit of cost."""
        rate_before = max(self._tokens / self._cost, 1.0 / self._costs[0])
        return (rate_of_round + rate_before) / 2


def _overall(prior: tuple[BetaPrior, ...]) -> BetaPosterior:
    """What the bins' prior says of all tokens: the evidence in it alone, as nobody knows in advance which bins texts will meet."""
    overall = BetaPosterior(*UNIFORM)
    for (accepted, rejected), (accepted_before, rejected_before) in zip(prior, AS_CONFIDENT, strict=True):
        overall.learn(max(accepted - accepted_before, 0.0), max(rejected - rejected_before, 0.0))
    return overall
