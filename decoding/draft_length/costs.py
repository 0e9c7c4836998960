"""Costs of a round on the device at hand, in plain passes of the target."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from decoding.documents.strict_yaml import Document

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
