"""A feature head in memory: one block that drafts on from the target's last hidden states (after EAGLE, arXiv 2401.15077).

The head reads the state of a position beside the embedding of the token after it, and predicts the token after that. Its own output
is the state that its next step reads, so that no block of the target runs while it drafts. As in EAGLE one linear layer joins both
inputs, which are normalised first, as in EAGLE-3 (arXiv 2503.01840). The layer begins as the sum of both, and the block as a copy
of the target's last one (our formulation). Adding the joined inputs to the state in place of replacing it learned more slowly on
the demo model: the state says what the last token is, and the head has to say what follows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from decoding.target.draft_vocabulary import DraftVocabulary
from decoding.target.parts import shallow_copy
from decoding.target.stand_ins import PassState, StandIn, first_of

if TYPE_CHECKING:
    from decoding.target.target import Target

EPSILON = 1e-6


class FeatureBlock(nn.Module):
    """Joins states and token embeddings, and runs `block`, one of the model's own class, on the result."""

    def __init__(self, block: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.state_norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.token_norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.join = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block
        with torch.no_grad():
            self.join.weight.copy_(torch.eye(hidden_size).repeat(1, 2))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block where there is none here: families read some in their loop."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "block":
                raise
            return getattr(self.block, name)

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run on `inputs` [.., width, 2 * hidden]: the state of each position before, then the embedding of its token."""
        states, tokens = inputs.chunk(2, dim=-1)
        joined = self.join(torch.cat([self.state_norm(states), self.token_norm(tokens)], dim=-1))
        return self.block(joined, *args, **kwargs)

    def around(self, block: nn.Module) -> FeatureBlock:
        """Return a copy around another block, which shares everything else."""
        twin = cast(FeatureBlock, shallow_copy(self))
        twin.block = block
        return twin


@dataclass(frozen=True, eq=False)
class FeatureHead:
    """A head between the target's last hidden states and its own final norm and LM head."""

    block: FeatureBlock
    """Has keys and values of its own."""
    vocabulary: DraftVocabulary | None = None
    """Tokens that it drafts from; None for all."""


class Join(StandIn):
    """Runs a feature head on the pass's known states and the incoming embeddings, and records its output states."""

    def __init__(self, block: nn.Module, current: PassState) -> None:
        super().__init__(block)
        self.__dict__["current"] = current

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run on the embeddings `hidden_states` [.., width, hidden] and the block's other arguments."""
        current = self.current
        assert current.states is not None, "a feature head is given the states"
        states = current.states.to(hidden_states.device)
        output = self.block(torch.cat([states, hidden_states], dim=-1), *args, **kwargs)
        current.tapped.append(first_of(output))
        return output


def states_before(states: Tensor) -> Tensor:
    """Return for each position of `states` [.., width, hidden] the state of the position before it; zeros for the first."""
    return torch.cat([torch.zeros_like(states[..., :1, :]), states[..., :-1, :]], dim=-2)


def new_feature_head(target: Target, vocabulary: DraftVocabulary | None = None) -> FeatureHead:
    """Return a new head around a copy of the last block, in its precision, which drafts from `vocabulary`, or from all tokens."""
    block = copy.deepcopy(target.blocks[-1])
    like = next(block.parameters())
    joining = FeatureBlock(block, target.config.hidden_size).to(like.device, like.dtype)
    return FeatureHead(joining.requires_grad_(True).eval(), vocabulary)
