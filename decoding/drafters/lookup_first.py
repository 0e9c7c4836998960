"""A lookup before another drafter: a copy costs no draft pass, so it is tried first (our formulation).

Rounds drafted by the lookup have up to its own `max_tokens` tokens. The draft-length rule is not asked: its threshold or posterior
describes the other drafter. The whole target verifies these rounds, because they leave no boundary states.

With a `choice`, a copy that was found opens the round only where copies have paid in this sequence (`decoding.drafters.chooser`).
"""

from __future__ import annotations

from decoding.drafters.cascade import CascadeDrafter, CopyStage, ModelStage
from decoding.drafters.contract import Drafter
from decoding.drafts import FirstLookup


class LookupFirst(CascadeDrafter):
    """The cascade of a lookup and the drafter `fallback`."""

    def __init__(self, fallback: Drafter, lookup: FirstLookup) -> None:
        source = lookup.with_choice(None)
        # As there is one drafter, it verifies every round, and need not be told to keep the states of its head.
        super().__init__([CopyStage(source, lookup.max_tokens)], [ModelStage(fallback)], lookup.choice)
