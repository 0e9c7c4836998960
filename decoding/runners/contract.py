"""The contract of a runner, which executes forward passes of the model or its parts.

A runner knows shapes, cache slots and devices. The computation belongs to the part: a runner calls `compute` with
tensors, any number of times, and may pad them, record the computation and replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from decoding.acceptance import accept_greedy, most_likely
from decoding.cache.kv_cache import KVCache, Storage
from decoding.confidence import entropy, top_probability
from decoding.runners.buckets import Buckets
from decoding.runners.features import SpeedFeatures
from decoding.runners.masks import MaskKinds

BlockCall = Callable[[nn.Module, Tensor, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a block on hidden states [.., width, hidden] and the block's other arguments."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a pass."""

    token_ids: Tensor
    """[batch, width]."""
    positions: Tensor
    """[batch, width]: positions in the sequence."""
    cache: KVCache
    logits_to_keep: int | Tensor
    """Number of final positions that get logits (0 means all), or their indices [n]."""
    states: Tensor | None = None
    """Known states [.., batch, width or width - 1, hidden] that a part resumes from."""
    last: Tensor | None = None
    """Index of the last position that is not padding: [1], or one per sequence; None without padding."""
    masks: tuple[Tensor, ...] = ()
    """One mask [batch, 1, width, num_slots] per kind of layer; empty if the model makes its own."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of a pass.

    `logits` are [width or fewer, vocabulary], `states` [.., width, hidden] the states at the part's tap, if any. A
    recorded pass computes the rest too, so that the host need not launch it: see `Judged`.
    """

    logits: Tensor
    states: Tensor | None
    judged: Judged | None = None

    @property
    def choices(self) -> Tensor:
        """The most likely token ids [width or fewer]."""
        return most_likely(self.logits) if self.judged is None else self.judged.choices

    @property
    def confidence(self) -> Tensor | None:
        """The confidence [2] of the first position, if the pass has computed it."""
        return None if self.judged is None or self.judged.confidence is None else self.judged.confidence[0]

    def of_row(self, row: int, width: int, *, last_only: bool) -> Outputs:
        """Return the logits of the first `width` positions of one sequence in a batch, or of the last of them.

        The states are still the whole batch's.
        """
        logits = self.logits[row, width - 1 if last_only else 0 : width]
        return Outputs(logits, self.states, self.judged and self.judged.of_row(row, width, last_only=last_only))

    def copied(self) -> Outputs:
        """Return a copy in separate memory."""
        return Outputs(_copied(self.logits), _copied(self.states), self.judged.copied() if self.judged else None)


@dataclass(frozen=True, slots=True)
class Judged:
    """Consequences of a pass's logits, computed within the pass.

    `choices` [width or fewer] are the most likely token ids. `verdict` [2 + width - 1] judges the tokens of the pass
    after the first as greedy drafts (see `decoding.acceptance.accept_greedy`). `confidence` [width or fewer, 2] are the
    top probability and the entropy (see `decoding.confidence`). Each of these two is None if it was not asked for.
    """

    choices: Tensor
    verdict: Tensor | None = None
    confidence: Tensor | None = None

    def copied(self) -> Judged:
        """Return a copy in separate memory."""
        return Judged(_copied(self.choices), _copied(self.verdict), _copied(self.confidence))

    def of_row(self, row: int, width: int, *, last_only: bool) -> Judged:
        """Return what belongs to the first `width` positions of one sequence, or to the last of them."""
        kept = slice(width - 1 if last_only else 0, width)
        return Judged(
            self.choices[row, kept],
            None if self.verdict is None else self.verdict[row, : width + 1],
            None if self.confidence is None else self.confidence[row, kept],
        )


def judge(logits: Tensor, token_ids: Tensor, last: Tensor | None, *, drafted: bool, looks: bool) -> Judged:
    """Judge a pass over `token_ids` [batch, width] by its logits [batch, width or 1, vocabulary].

    `last` is the index of the last token without padding: [1], one per sequence, or None without padding. `drafted`
    asks for the verdict on the tokens after the first, `looks` for the confidence.
    """
    choices = most_likely(logits)
    return Judged(
        choices,
        accept_greedy(token_ids[:, 1:], choices, last) if drafted else None,
        confidence(logits) if looks else None,
    )


def confidence(logits: Tensor) -> Tensor:
    """Return the top probability and the entropy in nats, [.., 2], of the softmax of `logits` [.., vocabulary]."""
    log_probabilities = logits.float().log_softmax(dim=-1)
    return torch.stack([top_probability(log_probabilities), entropy(log_probabilities)], dim=-1)


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that a part drafted one after another.

    `token_ids` are [n], `states` [.., n, hidden] the states at the part's tap, if any. `confidence` [n, 2] is as in
    `Judged`, if it was asked for.
    """

    token_ids: Tensor
    states: Tensor | None
    confidence: Tensor | None = None

    def copied(self) -> Written:
        """Return a copy in separate memory."""
        return Written(_copied(self.token_ids), _copied(self.states), _copied(self.confidence))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a round that was run as a whole."""

    values: Tensor
    """[2 + num_tokens]; see `decoding.acceptance`."""

    def copied(self) -> Verdict:
        """Return a copy in separate memory."""
        return Verdict(_copied(self.values))


@overload
def _copied(values: Tensor) -> Tensor: ...


@overload
def _copied(values: Tensor | None) -> Tensor | None: ...


def _copied(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.clone()


@dataclass(frozen=True, slots=True)
class PassRequest:
    """The arguments of a pending `Runner.run` of one sequence."""

    token_ids: Tensor
    """[1, width]."""
    cache: KVCache
    start: int
    last_only: bool
    states: Tensor | None
    looks: bool = False

    @property
    def width(self) -> int:
        """Number of positions of the pass."""
        return self.token_ids.shape[1]


class Part(Protocol):
    """The model, or a part of it, as a function of tensors."""

    @property
    def is_whole(self) -> bool:
        """True if no part of the model is skipped, so that its logits determine the output."""

    @property
    def verifies(self) -> bool:
        """True if its logits are the whole model's, by which drafts are judged."""

    def compute(self, inputs: Inputs) -> Outputs:
        """Compute logits [batch, width or fewer, vocabulary] in one pass, writing the cache at its window."""


class RunnerClass(Protocol):
    """Class of a runner as its entry in `decoding.runners.RUNNERS` names it."""

    has_bit_exact_mode: bool
    """True if the runner takes `exact_width`, the width at which it runs every pass of the whole model."""

    def __call__(self, mask_kinds: MaskKinds, device: torch.device, **settings: Any) -> Runner:
        """Return the runner of one model, whose layers attend as `mask_kinds` says, on `device`."""


class Runner(Protocol):
    """Executes the passes of one model's parts."""

    @property
    def name(self) -> str:
        """Name in `decoding.runners.RUNNERS`."""

    @property
    def exact_width(self) -> int | None:
        """Width of every whole-model pass after the prompt in bit-exact mode; None in normal mode."""

    @property
    def features(self) -> SpeedFeatures:
        """The optional features that are on; none with a runner that has none."""

    @property
    def block_call(self) -> BlockCall | None:
        """How a block is called in fixed-shape passes; None if the runner has none."""

    @property
    def buckets(self) -> Buckets | None:
        """The shapes to which passes are padded; None if each pass runs in its own shape."""

    @property
    def attends_by_position(self) -> bool:
        """True if layers attend by the CPU kernel, and get positions in place of masks in fixed-shape passes."""

    @property
    def reads_all_slots(self) -> bool:
        """True if the number of slots that a fixed-shape pass reads is data, so that one shape serves all contexts."""

    @property
    def records(self) -> bool:
        """True if each shape of pass is recorded at its first run."""

    def new_cache(self, num_layers: int, capacity: int, num_rows: int = 1) -> KVCache:
        """Return an empty cache for a sequence of at most `capacity` tokens.

        With `num_rows` above 1 its `storage` is the memory of several sequences, one row each.
        """

    def reserve(self, num_layers: int, capacity: int, num_rows: int = 1) -> None:
        """Make memory now for the caches that `new_cache` will be asked for.

        A runner that prepares passes for fixed memory would have to prepare them again when a longer sequence comes.
        """

    def drop_recordings(self) -> None:
        """Prepare every pass again when it is next run, in new memory: weights were moved or changed."""

    def temporary_memory(self) -> AbstractContextManager[None]:
        """Drop, at the end of the context, the memory of caches that was made in it, and none that was there before."""

    def run(
        self,
        part: Part,
        token_ids: Tensor,
        cache: KVCache,
        start: int,
        *,
        last_only: bool = False,
        states: Tensor | None = None,
        looks: bool = False,
    ) -> Outputs:
        """Run `part` on `token_ids` [1, width] at positions from `start`.

        `last_only` restricts the logits to the last position. `states` are known states for parts that resume. `looks`
        announces that the confidence of the logits will be read.
        """

    def run_tree(self, part: Part, token_ids: Tensor, cache: KVCache, start: int, positions: Sequence[int]) -> Outputs:
        """Run `part` on a chain and its side leaves, `token_ids` [1, width], in the slots from `start`.

        `positions` are those in the sequence: ascending from `start` on the chain, then each leaf's. A token sees the slots before
        its position, and itself. Return the outputs of all of them. `start` must be after the prompt.
        """

    def write_greedily(
        self, part: Part, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int, *, looks: bool = False
    ) -> Written:
        """Let `part` draft `num_tokens` greedy tokens after `token_ids` [1, 1] at `start`.

        `looks` asks for their confidence. Does not wait for the device.
        """

    def run_round(
        self, draft: Part, whole: Part, token_ids: Tensor, cache: KVCache, start: int, num_tokens: int
    ) -> Tensor:
        """Let `draft` write `num_tokens` greedy tokens after `token_ids` [1, 1] at `start`, and let `whole` judge them.

        Return the verdict [2 + num_tokens] (see `decoding.acceptance`). Does not wait for the device.
        """

    def run_shared_pass(self, part: Part, passes: Mapping[int, PassRequest], memory: Storage) -> dict[int, Outputs]:
        """Run `part` once for several sequences, keyed by their rows in `memory`.

        Return what `run` would return for each. The sequences' caches must be rows of `memory`, their prompts already
        written.
        """

    def write_together(
        self, part: Part, passes: Mapping[int, PassRequest], memory: Storage, num_tokens: int
    ) -> dict[int, Written]:
        """Let `part` draft greedy tokens for several sequences, each after the single token of its request.

        Every sequence gets the same number of tokens: at least one, at most `num_tokens`. Does not wait for the device.
        """


RunnerFactory = Callable[[MaskKinds, torch.device], Runner]
"""Makes the runner of a model whose layers attend as the first argument says."""
