"""The contract of a runner: how one forward pass of the model, or of a part of it, is executed.

A runner knows shapes, places in the cache and devices. What is computed is the part's business: a runner calls `compute` with
tensors, again and again, and may pad them, record what happens and play it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from decoding.cache.kv_cache import KVCache, Storage

BlockCall = Callable[[nn.Module, Tensor, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a block on hidden states [.., width, hidden] and whatever else the model hands its blocks."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a pass is computed from."""

    token_ids: Tensor
    """[texts, width]."""
    positions: Tensor
    """[texts, width]: their places in the text."""
    cache: KVCache
    logits_to_keep: int | Tensor
    """How many positions from the end get logits (0 is all), or [n] which."""
    states: Tensor | None = None
    """Known states [.., texts, width or width - 1, hidden] that a part resumes from."""
    last: Tensor | None = None
    """[1], or one a text: which position is the last that is no padding; None if none is padding."""
    masks: tuple[Tensor, ...] = ()
    """[texts, 1, width, places] each: what the layers of each kind may look at; empty if the model makes its own."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What comes of a pass: logits [width or fewer, vocabulary], and the states [.., width, hidden] at the part's tap, if any."""

    logits: Tensor
    states: Tensor | None

    def copied(self) -> Outputs:
        """The same in memory of its own."""
        return Outputs(self.logits.clone(), None if self.states is None else self.states.clone())


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens [n] that a part has written one after another, and the states [.., n, hidden] at its tap, if any."""

    token_ids: Tensor
    states: Tensor | None

    def copied(self) -> Written:
        """The same in memory of its own."""
        return Written(self.token_ids.clone(), None if self.states is None else self.states.clone())


@dataclass(frozen=True, slots=True)
class PassRequest:
    """What one text asks for: `Runner.run`, not yet run."""

    token_ids: Tensor
    """[1, width]."""
    cache: KVCache
    start: int
    last_only: bool
    states: Tensor | None

    @property
    def width(self) -> int:
        """How many positions it covers."""
        return self.token_ids.shape[1]


class Part(Protocol):
    """The model, or a part of it, as a function of tensors that can be run by itself. Runners ask for nothing else."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the model is left out: what it computes decides about the text."""

    @property
    def verifies(self) -> bool:
        """Whether its logits are those of the whole model, by which drafts are judged."""

    def compute(self, inputs: Inputs) -> Outputs:
        """One pass: logits [texts, width or fewer, vocabulary]. Writes the cache where its window says."""


class Runner(Protocol):
    """Executes the passes of one model's parts."""

    @property
    def name(self) -> str:
        """Its name in `decoding.runners.RUNNERS`."""

    @property
    def exact_width(self) -> int | None:
        """Bit-exact mode: on how many positions every pass of the whole model runs behind the prompt; None in the ordinary one."""

    @property
    def block_call(self) -> BlockCall | None:
        """How a block is called in passes of fixed shapes; None if there are no such passes."""

    def new_cache(self, num_layers: int, capacity: int, num_rows: int = 1) -> KVCache:
        """An empty cache for a text of at most `capacity` tokens; or, in its `storage`, memory for several, a row each."""

    def run(
        self,
        part: Part,
        token_ids: Tensor,
        cache: KVCache,
        start: int,
        *,
        last_only: bool = False,
        states: Tensor | None = None,
    ) -> Outputs:
        """Run `part` on `token_ids` [1, width] at positions from `start`; logits of the last position alone if `last_only`."""

    def write_greedily(self, part: Part, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int) -> Written:
        """Let `part` write `num_tokens` tokens behind `token_ids` [1, 1] at `start`, each the likeliest; waits for none of them."""

    def run_shared_pass(self, part: Part, passes: Mapping[int, PassRequest], memory: Storage) -> dict[int, Outputs]:
        """Run `part` once for several texts, each at a place of its own, by their rows in `memory`: what `run` would give each.

        Their caches are these rows of `memory`, to which their prompts have been written.
        """
