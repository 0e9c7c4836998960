"""Thompson sampling of one acceptance probability per round (our formulation).

EESD (arXiv 2406.03853) sets the draft length by Thompson sampling. We know its abstract, and from a secondary summary the names of
its two controllers, Beta-TS and Calibration-TS. This rule has its name from Beta-TS; every formula here is ours.

Forgetting leads back to a prior, not to zero: a posterior without pseudo-counts could not be sampled from, and a draft whose
failures are never forgotten would never be tried again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from decoding.draft_length.contract import Controller, CostAwareRule

PseudoCount = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
BetaPrior = tuple[PseudoCount, PseudoCount]
"""(A, B) of a Beta distribution: pseudo-counts of accepted and rejected tokens, with mean A / (A + B)."""

UNIFORM: BetaPrior = (1.0, 1.0)

WARM_TOKENS = 24.0
"""Maximum evidence of a warm start, in tested tokens.

In replays of the demo model's output, on one kind of prompt and on two in turn, this amount was within about 1 % of
the best of 4 to 32 tokens. Simulated kinds that differ more need less: a start that fits neither kind is corrected
anew in each sequence.
"""


@dataclass(slots=True)
class BetaPosterior:
    """Posterior of an acceptance probability, as pseudo-counts of tested tokens."""

    accepted: float
    rejected: float

    def draw(self, stream: random.Random) -> float:
        return stream.betavariate(self.accepted, self.rejected)

    def learn(self, accepted: float, rejected: float) -> None:
        self.accepted += accepted
        self.rejected += rejected

    def forget(self, memory: float) -> None:
        """Keep the share `memory` of the evidence beyond `UNIFORM`."""
        self.accepted, self.rejected = self._remembered(memory)

    def warm_start(self) -> BetaPrior:
        """Return the posterior as a prior with at most `WARM_TOKENS` of evidence beyond `UNIFORM`."""
        evidence = self.accepted + self.rejected - sum(UNIFORM)
        return self._remembered(min(1.0, WARM_TOKENS / evidence) if evidence > 0.0 else 1.0)

    def _remembered(self, share: float) -> BetaPrior:
        accepted, rejected = UNIFORM
        return accepted + share * (self.accepted - accepted), rejected + share * (self.rejected - rejected)


class BetaThompson(CostAwareRule):
    """Draft the length with most tokens per cost for an acceptance probability drawn from Beta(A, B).

    With theta drawn, n = argmax over 0..K of (1 + theta + ... + theta^n) / cost(n). With n = 0, a plain step, a
    useless draft falls back to plain decoding by itself. After each round A <- 1 + g (A - 1) + n_a and B <- 1 + g (B
    - 1) + [n_a < n_d]. A round without drafts also forgets, by g^(1/4) (see `IDLE_AGEING`). Forgetting leads towards
    Beta(1, 1), not towards zero: A <- g A would take A and with it every theta to zero, and a draft once given up
    would never be tried again.

    Defaults: g = 0.97 remembers the last 1 / (1 - g) = 33 drafted rounds, or 130 rounds without drafts. A useless
    draft that costs half the target's time is then tried in about one round of 30, and decoding stays within 3 % of
    plain.
    """

    words: ClassVar[str] = "Thompson sampling of the length"
    rule: Literal["beta_thompson"] = "beta_thompson"
    prior: BetaPrior = Field(UNIFORM, description="(A, B) at the start of a sequence")

    def controller(self) -> BetaThompsonController:
        return BetaThompsonController(self)


class BetaThompsonController(Controller):
    def __init__(self, rule: BetaThompson) -> None:
        super().__init__(rule.max_tokens)
        self._rule = rule
        costs = rule.known_costs()
        self._costs = [costs.of(length) for length in range(rule.max_tokens + 1)]
        self._stream = random.Random(rule.seed)
        self.acceptance = BetaPosterior(*rule.prior)

    def limit(self) -> int:
        """Return the best length for a drawn acceptance probability; ties go to the shortest."""
        theta = self.acceptance.draw(self._stream)
        survival = tokens = 1.0
        best, best_rate = 0, 1.0 / self._costs[0]
        for length in range(1, self.max_tokens + 1):
            # A running sum, because the closed form (1 - theta^(n+1)) / (1 - theta) is undefined at 1.
            survival *= theta
            tokens += survival
            if (rate := tokens / self._costs[length]) > best_rate:
                best, best_rate = length, rate
        return best

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Forget a little, then count the accepted tokens and the first rejected one.

        Later drafts were not tested.
        """
        self.acceptance.forget(self._rule.memory(num_drafted))
        self.acceptance.learn(accepted=num_accepted, rejected=int(num_accepted < num_drafted))

    def adapted_rule(self) -> BetaThompson:
        """Return the rule with the posterior as prior, its evidence capped to stay adaptive."""
        return self._rule.model_copy(update={"prior": self.acceptance.warm_start()})
