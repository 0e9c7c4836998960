"""Recordings of drafts on sequences that the target has written: one or two passes per draft, without decoding.

Our formulation. The target reads every sequence once. A draft that skips sublayers then runs all rounds at once, a round
starting every few tokens, with the sequence's own tokens as drafts: within a round it reads its own keys and values, before it
the target's, as in decoding. SWIFT (arXiv 2410.06916) rates a skip set by one pass in which the draft reads its own keys and values
throughout, which never happens in decoding. Early exits are recorded from the hidden states of the target's pass: up to the
exit, draft and target are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from decoding.cache.known_prompt import KnownPrompt
from decoding.cache.kv_cache import KVCache
from decoding.cache.rounds_cache import MemoryLimits, RoundsCache
from decoding.drafts import Draft, EarlyExit, LayerSkip
from decoding.drafts.history import RequestHistory
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.target import DraftView, Target
from decoding.target.lm_heads import LEFT_OUT
from decoding.target.states import cache_after, exit_logits, exit_states
from decoding.target.views import DraftStatesView
from decoding.text import TokenSequence
from studies.prediction.predictors import exits_of, predictor_of
from studies.prediction.replay import Copies, Guessed, Recording, TargetText, draws

DEPTH = 4
"""Tokens per recorded round: the usual draft length, so that a draft reads as many of its own keys as in decoding."""

Guess = Callable[[TokenSequence, int], list[int] | None]
"""Maps a sequence and `num_tokens` to one to that many tokens after it, or to None; runs no model."""

Exits = Mapping[int, bool]
"""Exit layers; True for those whose states of the prompt are read, too."""


@dataclass(frozen=True)
class _Read:
    """A sequence that the target has read: all its tokens but the last."""

    token_ids: Tensor
    """[1, length]"""
    first: int
    """Position of the prefill's token: the first after which a draft would start."""
    continuation: tuple[int, ...]
    target: TargetText
    known: KnownPrompt | None


@dataclass(frozen=True)
class _States:
    """Hidden states of the target at one exit."""

    of_texts: list[Tensor]
    """[1, length, hidden] of each sequence; without `has_prompt` from the prefill's token on."""
    has_prompt: bool
    """True if a head attends to the prompt: it is most of a sequence, and the states of many exits would fill the memory."""


class Survey:
    """The sequences of a search, and the recording of every draft that was asked for.

    `prompts` and `continuations` are token ids. A continuation begins with the prefill's token; continuations of a single token
    are skipped. Raises ValueError if none is left. `heads` holds the exit heads. Naming exits that will be recorded as `exits`
    saves a second pass over the sequences, as far as their states fit in `limits.kept`; by default limits follow from the size
    of the model. With `own_keys`, skip sets read keys and values of their own throughout, as an exported copy of the model does.
    Of prompts that are `known`, only states for heads are computed again.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        *,
        decoding: Decoding = Decoding(),
        seed: int = 0,
        heads: HeadFolder | None = None,
        depth: int = DEPTH,
        exits: Iterable[Draft] = (),
        limits: MemoryLimits | None = None,
        own_keys: bool = False,
        known: Mapping[tuple[int, ...], KnownPrompt] = {},
    ) -> None:
        self.target = target
        self._known = known
        self.own_keys = own_keys
        self._limits = limits = limits or MemoryLimits.beside(target.weight_bytes)
        self._decoding, self._seed, self._heads, self._depth = decoding, seed, heads, depth
        self._recordings: dict[Draft, list[Recording]] = {}
        given = list(zip(prompts, continuations, strict=True))
        self.indices = tuple(index for index, (_, continuation) in enumerate(given) if len(continuation) > 1)
        """Indices of the given sequences that are surveyed."""
        if not self.indices:
            raise ValueError("a survey needs a continuation of at least two tokens")
        self._num_written = sum(len(continuations[index]) - 1 for index in self.indices)
        self._num_read = self._num_written + sum(len(prompts[index]) for index in self.indices)
        wanted = self._first_that_fit(exits_of(exits))
        with torch.inference_mode():
            read = [self._read(*given[index], wanted) for index in self.indices]
        self._texts = [text for text, _ in read]
        self._states = {layer: _States([states[layer] for _, states in read], wanted[layer]) for layer in wanted}

    @property
    def num_positions(self) -> int:
        """Number of recorded positions of each draft."""
        return sum(text.target.num_positions for text in self._texts)

    @property
    def mean_context(self) -> float:
        """Mean number of tokens before a recorded position."""
        return sum(text.token_ids.shape[1] - text.target.num_positions / 2 for text in self._texts) / len(self._texts)

    @torch.inference_mode()
    def last_window(self, index: int, size: int) -> tuple[Tensor, KVCache]:
        """Return the last `size` tokens [1, n] that the target wrote in a sequence, and a cache that has read those before."""
        text = self._texts[index]
        token_ids = torch.tensor([text.continuation[-size:]], device=self.target.device)
        written = torch.tensor([text.continuation[:-size]], dtype=torch.long, device=self.target.device)
        before = torch.cat([text.token_ids[:, : text.first], written], dim=1)
        return token_ids, cache_after(self.target, before, token_ids.shape[1], text.known)

    def record(self, draft: Draft) -> list[Recording]:
        """Return the recordings of one draft, one per sequence."""
        return self.record_all([draft])[0]

    @torch.inference_mode()
    def record_all(self, drafts: Iterable[Draft]) -> list[list[Recording]]:
        """Return the recordings of each draft; one pass over a sequence serves as many exits among them as fit in memory."""
        missing = [draft for draft in dict.fromkeys(drafts) if draft not in self._recordings]
        for group in self._groups(missing):
            self._keep_states(exits_of(group))
            for draft in group:
                drafted = predictor_of(draft).logits(draft, self)
                self._recordings[draft] = [
                    Recording.against(
                        text.target,
                        logits,
                        self._decoding,
                        seed=self._seed + index,
                    )
                    for index, (text, logits) in enumerate(zip(self._texts, drafted, strict=True))
                ]
        return [self._recordings[draft] for draft in drafts]

    def _groups(self, drafts: Iterable[Draft]) -> Iterator[list[Draft]]:
        """Yield the drafts in groups whose exits' states fit in memory, those with states at hand first."""
        layers = {draft: sorted(exits_of([draft])) for draft in drafts}
        group: list[Draft] = []
        for draft in sorted(
            layers, key=lambda draft: ([layer not in self._states for layer in layers[draft]], layers[draft])
        ):
            if group and not self._fit(exits_of([*group, draft])):
                yield group
                group = []
            group.append(draft)
        if group:
            yield group

    def copies(self, guess: Guess, most: int) -> list[Copies]:
        """Return, for each position of each sequence, the guess of up to `most` tokens, and how many would be accepted.

        Earlier sequences of the survey are the history of later ones, if decoding keeps one.
        """
        history = RequestHistory(max_tokens=self._decoding.history) if self._decoding.history else None
        found = []
        for index, text in enumerate(self._texts):
            found.append(_copies(text, self._accepted(index), guess, most, history))
            if history is not None:
                history.add(text.continuation)
        return found

    def skip_logits(self, draft: LayerSkip) -> Iterator[Tensor]:
        """Yield the logits [positions, vocabulary] of a skip set on each sequence: few sequences' are in memory at a time."""
        view = DraftView(self.target, draft.skip_attention, draft.skip_mlp, keep_boundary=False, bits=draft.bits)
        if self.own_keys:
            return (view.alone(text.token_ids, text.first) for text in self._texts)
        cache, token_ids = self.rounds
        logits = self._of_texts(view.rounds(token_ids, cache))
        return logits if draft.ids_below is None else self._only_ids(logits, draft.ids_below)

    def _only_ids(self, logits: Iterable[Tensor], below: int) -> Iterator[Tensor]:
        """Yield the logits with only token ids `below` this and those that a text has when the round of the position begins."""
        for text, each in zip(self._texts, logits, strict=True):
            places = torch.arange(text.token_ids.shape[1], device=each.device)
            first_places = torch.full((each.shape[-1],), len(places), device=each.device)
            first_places.scatter_reduce_(0, text.token_ids[0], places, "amin")
            first_places[:below] = 0
            starts = torch.tensor(self._starts(text), device=each.device).repeat_interleave(self._depth)[: len(each)]
            yield each.masked_fill(first_places > starts[:, None], LEFT_OUT)

    def exit_logits(self, draft: EarlyExit) -> Iterator[Tensor]:
        """Yield the logits [positions, vocabulary] of an exit on each sequence: one sequence's are in memory at a time.

        The head of a quantised exit reads the target's states of the prompt and the draft's states after it. In decoding it
        reads the target's states of earlier rounds; the difference is small.
        """
        self._keep_states(exits_of([draft]))
        head, states = self._head(draft), self._states[draft.exit_layer].of_texts
        if draft.bits is not None:
            states = self._quantised_states(draft.exit_layer, draft.bits)
        for text, each in zip(self._texts, states, strict=True):
            given = text.token_ids[:, -each.shape[1] :]  # without a head, each position is by itself
            first = each.shape[1] - text.target.num_positions
            yield exit_logits(self.target, given, each, head, first=first, bits=draft.bits)[0]

    def _quantised_states(self, exit_layer: int, bits: int) -> list[Tensor]:
        """Return the states [1, length, hidden] at an exit: the target's of the prompt, a quantised draft's after it."""
        cache, token_ids = self.rounds
        rounds = DraftStatesView(self.target, exit_layer, bits=bits).rounds(token_ids, cache)
        drafted = self._of_texts([rounds.movedim((-3, -2), (0, 1))])
        return [
            torch.cat([states[..., : text.first, :], own.movedim(0, -2).unsqueeze(-3)], dim=-2)
            for text, states, own in zip(self._texts, self._states[exit_layer].of_texts, drafted, strict=True)
        ]

    def _of_texts(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield what rounds [rounds, depth, ..] have computed, some in each of `chunks`, as [positions, ..] of each sequence."""
        rows, left = iter(chunks), list[Tensor]()
        for text in self._texts:
            num_rounds = -(-text.target.num_positions // self._depth)
            while sum(map(len, left)) < num_rounds:
                left.append(next(rows))
            joined = torch.cat(left)
            yield joined[:num_rounds].flatten(0, 1)[: text.target.num_positions]
            left = [joined[num_rounds:]]

    def _accepted(self, index: int) -> list[bool]:
        """Return for each position whether the sequence's token would be accepted if guessed.

        Always if greedy; else drawn with the token's probability.
        """
        text = self._texts[index]
        if not self._decoding.temperature:
            return [True] * text.target.num_positions
        written = torch.tensor(text.continuation[1:], device=text.target.probabilities.device)
        p = text.target.probabilities.gather(1, written[:, None])[:, 0].float()
        luck = draws(len(p), self._seed + index)
        return (luck < p.cpu()).tolist()

    def _read(
        self, prompt: Sequence[int], continuation: Sequence[int], exits: Exits
    ) -> tuple[_Read, Mapping[int, Tensor]]:
        token_ids = torch.tensor([[*prompt, *continuation[:-1]]], device=self.target.device)
        first, known = len(prompt), self._known.get(tuple(prompt))
        states, logits = exit_states(self.target, token_ids, _kept_from(exits, first), first=first, known=known)
        target = TargetText.of(logits[0], self._decoding)
        return _Read(token_ids, first, tuple(continuation), target, known), states

    def _keep_states(self, exits: Exits) -> None:
        wanted = {layer: exits[layer] for layer in sorted(exits) if not self._holds(layer, exits[layer])}
        if not wanted:
            return
        if not self._fit({**{layer: each.has_prompt for layer, each in self._states.items()}, **wanted}):
            self._states = {layer: states for layer, states in self._states.items() if layer in exits}
        passes = []
        for text in self._texts:
            kept_from = _kept_from(wanted, text.first)
            states, _ = exit_states(self.target, text.token_ids, kept_from, first=text.first, known=text.known)
            passes.append(states)
        self._states |= {layer: _States([states[layer] for states in passes], wanted[layer]) for layer in wanted}

    def _fit(self, exits: Exits) -> bool:
        """Return True if the states of these exits may be kept at a time."""
        num_states = sum(self._num_read if with_prompt else self._num_written for with_prompt in exits.values())
        config: Any = self.target.config
        return num_states * config.hidden_size * self.target.dtype.itemsize <= self._limits.kept

    def _first_that_fit(self, exits: Exits) -> Exits:
        """Return the first of these exits, as many as may be kept at a time and at least one."""
        layers = sorted(exits)
        while len(layers) > 1 and not self._fit({layer: exits[layer] for layer in layers}):
            layers.pop()
        return {layer: exits[layer] for layer in layers}

    def _holds(self, layer: int, with_prompt: bool) -> bool:
        return layer in self._states and (self._states[layer].has_prompt or not with_prompt)

    def _head(self, draft: EarlyExit) -> nn.Module | None:
        if draft.head is None:
            return None
        assert self._heads is not None, "a draft with a head comes with the folder of heads"
        return self._heads.get(draft)

    @cached_property
    def rounds(self) -> tuple[RoundsCache, Tensor]:
        """The rounds that start every `depth` tokens of every sequence, and their tokens [rounds, depth]."""
        rows = []
        for text in self._texts:
            for start in self._starts(text):
                row = text.token_ids[0, start : start + self._depth]
                # The last round may be short: padding after a position does not change its logits.
                rows.append(nn.functional.pad(row, (0, self._depth - len(row))))
        logits_bytes = self._depth * self.target.config.vocab_size * self.target.dtype.itemsize
        cache = RoundsCache(self._caches(), self._depth, self._limits, output_bytes=logits_bytes)
        return cache, torch.stack(rows)

    def _caches(self) -> Iterator[tuple[KVCache, range]]:
        """Yield the cache of each sequence, read by the target, and the starts of its rounds: one cache at a time."""
        for text in self._texts:
            cache = self.target.new_cache(text.token_ids.shape[1])
            if text.known is not None:
                text.known.recall(cache)
            self.target.forward(text.token_ids[:, cache.length :], cache, cache.length, last_only=True)
            yield cache, self._starts(text)
            del cache

    def _starts(self, text: _Read) -> range:
        return range(text.first, text.token_ids.shape[1], self._depth)


class JoinedSurvey:
    """Two surveys as one, the sequences of `first` before the others; neither reads or records anything again.

    `indices` count over the sequences given to both; `num_given` is the number given to `first`.
    """

    def __init__(self, first: Survey, second: Survey, num_given: int) -> None:
        self.target, self.own_keys = first.target, first.own_keys
        self.indices = (*first.indices, *(num_given + index for index in second.indices))
        self._first, self._second = first, second

    @property
    def num_positions(self) -> int:
        """Number of recorded positions of each draft."""
        return self._first.num_positions + self._second.num_positions

    @property
    def mean_context(self) -> float:
        """Mean number of tokens before a recorded position."""
        parts = (self._first, self._second)
        return sum(part.mean_context * len(part.indices) for part in parts) / len(self.indices)

    @property
    def rounds(self) -> tuple[RoundsCache, Tensor]:
        """Rounds of the first survey: enough to compare hidden states on."""
        return self._first.rounds

    def last_window(self, index: int, size: int) -> tuple[Tensor, KVCache]:
        """See `Survey.last_window`."""
        num_first = len(self._first.indices)
        survey, own = (self._first, index) if index < num_first else (self._second, index - num_first)
        return survey.last_window(own, size)

    def record(self, draft: Draft) -> list[Recording]:
        """Return the recordings of one draft; see `Survey.record`."""
        return self.record_all([draft])[0]

    def record_all(self, drafts: Iterable[Draft]) -> list[list[Recording]]:
        """Return the recordings of each draft; see `Survey.record_all`."""
        drafts = list(drafts)
        both = zip(self._first.record_all(drafts), self._second.record_all(drafts), strict=True)
        return [[*one, *other] for one, other in both]

    def copies(self, guess: Guess, most: int) -> list[Copies]:
        """Return the accepted guesses at each position; see `Survey.copies`."""
        return [*self._first.copies(guess, most), *self._second.copies(guess, most)]


def _kept_from(exits: Exits, first: int) -> dict[int, int]:
    """Return the position from which on the states of each exit are kept: `first`, or 0 where the prompt's are read."""
    return {layer: 0 if with_prompt else first for layer, with_prompt in exits.items()}


def _copies(text: _Read, accepted: Sequence[bool], guess: Guess, most: int, history: RequestHistory | None) -> Copies:
    prompt = text.token_ids[0, : text.first].tolist()
    held = TokenSequence(prompt, text.token_ids.shape[1] + 1, torch.device("cpu"), history=history)
    copies: list[Guessed | None] = []
    for index, token in enumerate(text.continuation[:-1]):
        held.append([token])
        following = text.continuation[index + 1 : index + 1 + most]
        guessed = guess(held, len(following))
        if not guessed:
            copies.append(None)
            continue
        drafted = zip(guessed, following, accepted[index:], strict=False)
        agrees = [one == other and lucky for one, other, lucky in drafted]
        num_right = agrees.index(False) if False in agrees else len(agrees)
        copies.append(Guessed(num_right, len(guessed)))
    return copies
