"""What drafts would do on texts that the target has written: recorded in a pass or two each, without decoding.

Our formulation. The target reads every text once. A draft that skips sublayers is then run over rounds that begin every few
tokens of the texts, all at once and with the text's own tokens for drafts: each round finds the target's keys and values in
front of it and the draft's own within it, as in decoding. SWIFT (arXiv 2410.06916) rates a skip set by one pass in which the
draft reads its own keys and values throughout, which decoding never does. Early exits are recorded from the states that the
target's pass leaves: in the blocks they run, draft and target are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from decoding.cache.rounds_cache import RoundsCache
from decoding.drafters.prompt_lookup import copied, find_copy
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PromptLookup
from decoding.exit_heads import ExitHeads
from decoding.target import Target
from decoding.text import TokenSequence
from studies.prediction.replay import Copies, Recording, TargetText, draws

DEPTH = 4
"""Tokens of a recorded round: about what drafts come to, so that the draft reads as much of its own as it would."""

SurveyedDraft = LayerSkip | EarlyExit


@dataclass(frozen=True)
class _Read:
    """A text that the target has read: all its tokens but the last, which nothing follows."""

    token_ids: Tensor
    """[1, length]"""
    first: int
    """Place of the prefill's token: from there on a draft would have drafted the next one."""
    continuation: tuple[int, ...]
    target: TargetText


class Survey:
    """The texts of a search as drafts would see them. A draft is recorded once and remembered.

    `prompts` and `continuations` are token ids; a continuation begins with the prefill's token, and those of a single token are
    passed over. ValueError if none is left. `heads` holds the exit heads of drafts that have one; of `exits` it is known at once
    that they will be asked for, which spares another pass over the texts.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        heads: ExitHeads | None = None,
        depth: int = DEPTH,
        exits: Iterable[int] = (),
    ) -> None:
        self.target = target
        self._temperature, self._seed, self._heads, self._depth = temperature, seed, heads, depth
        self._recordings: dict[SurveyedDraft, list[Recording]] = {}
        given = list(zip(prompts, continuations, strict=True))
        self.places = tuple(place for place, (_, continuation) in enumerate(given) if len(continuation) > 1)
        """Which of the texts given are read."""
        if not self.places:
            raise ValueError("a survey needs a text of at least two tokens behind its prompt")
        wanted = sorted(set(exits))
        with torch.inference_mode():
            read = [self._read(*given[place], wanted) for place in self.places]
        self._texts = [text for text, _ in read]
        self._states = {layer: [states[layer] for _, states in read] for layer in wanted}

    @property
    def num_positions(self) -> int:
        """Tokens that every draft is asked for."""
        return sum(text.target.num_positions for text in self._texts)

    @property
    def mean_context(self) -> float:
        """Tokens in front of a recorded position, on average."""
        return sum(text.token_ids.shape[1] - text.target.num_positions / 2 for text in self._texts) / len(self._texts)

    def record(self, draft: SurveyedDraft) -> list[Recording]:
        """The draft on each of the texts."""
        return self.record_all([draft])[0]

    @torch.inference_mode()
    def record_all(self, drafts: Iterable[SurveyedDraft]) -> list[list[Recording]]:
        """Each draft on each of the texts; exits together, as one pass over a text gives the states of all."""
        drafts = list(drafts)
        missing = [draft for draft in dict.fromkeys(drafts) if draft not in self._recordings]
        self._keep_states(draft.exit_layer for draft in missing if isinstance(draft, EarlyExit))
        for draft in missing:
            logits = self._exit(draft) if isinstance(draft, EarlyExit) else self._skip(draft)
            self._recordings[draft] = [
                Recording.against(text.target, drafted, temperature=self._temperature, seed=self._seed + index)
                for index, (text, drafted) in enumerate(zip(self._texts, logits, strict=True))
            ]
        return [self._recordings[draft] for draft in drafts]

    def copies(self, lookup: PromptLookup | Lookup, most: int) -> list[Copies]:
        """What prompt lookup would copy in a round behind each position of each text, looked at as far as `most` tokens."""
        return [_copies(text, self._accepted(index), lookup, most) for index, text in enumerate(self._texts)]

    def _accepted(self, index: int) -> list[bool]:
        """Whether the text's token at each position would be accepted if it were copied: always if greedy, else as it is likely."""
        text = self._texts[index]
        if not self._temperature:
            return [True] * text.target.num_positions
        written = torch.tensor(text.continuation[1:], device=text.target.probabilities.device)
        p = text.target.probabilities.gather(1, written[:, None])[:, 0]
        luck = draws(len(p), self._seed + index)
        return (luck < p.cpu()).tolist()

    def _read(
        self, prompt: Sequence[int], continuation: Sequence[int], exits: Sequence[int]
    ) -> tuple[_Read, Mapping[int, Tensor]]:
        token_ids = torch.tensor([[*prompt, *continuation[:-1]]], device=self.target.device)
        states, logits = self.target.exit_states(token_ids, exits, first=len(prompt))
        said = TargetText.of(logits[0], temperature=self._temperature)
        return _Read(token_ids, len(prompt), tuple(continuation), said), states

    def _keep_states(self, exit_layers: Iterable[int]) -> None:
        wanted = sorted(set(exit_layers) - self._states.keys())
        if not wanted:
            return
        passes = [self.target.exit_states(text.token_ids, wanted, first=text.first)[0] for text in self._texts]
        self._states |= {layer: [states[layer] for states in passes] for layer in wanted}

    def _exit(self, draft: EarlyExit) -> list[Tensor]:
        """Logits [positions, vocabulary] of an exit on each text."""
        head = self._head(draft)
        return [
            self.target.exit_logits(text.token_ids, states, head, first=text.first)[0]
            for text, states in zip(self._texts, self._states[draft.exit_layer], strict=True)
        ]

    def _head(self, draft: EarlyExit) -> nn.Module | None:
        if draft.head is None:
            return None
        assert self._heads is not None, "a draft with a head comes with the folder of heads"
        return self._heads.get(draft)

    def _skip(self, draft: LayerSkip) -> list[Tensor]:
        """Logits [positions, vocabulary] of a draft without some sublayers, on each text."""
        cache, token_ids = self.rounds
        view = self.target.draft_view(draft.skip_attention, draft.skip_mlp, keep_boundary=False)
        logits = view.rounds(token_ids, cache)
        logits_of_texts, row = [], 0
        for text in self._texts:
            num_rounds = -(-text.target.num_positions // self._depth)
            logits_of_texts.append(logits[row : row + num_rounds].flatten(0, 1)[: text.target.num_positions])
            row += num_rounds
        return logits_of_texts

    @cached_property
    def rounds(self) -> tuple[RoundsCache, Tensor]:
        """The rounds that begin every `depth` tokens of every text, and their tokens [rounds, depth]."""
        rounds, rows = [], []
        for text in self._texts:
            length = text.token_ids.shape[1]
            cache = self.target.new_cache(length)
            self.target.forward(text.token_ids, cache, 0, last_only=True)
            for start in range(text.first, length, self._depth):
                rounds.append((cache, start))
                row = text.token_ids[0, start : start + self._depth]
                # The last round of a text may be short: what stands behind a position does not change it.
                rows.append(nn.functional.pad(row, (0, self._depth - len(row))))
        return RoundsCache(rounds, self._depth), torch.stack(rows)


class JoinedSurvey:
    """Two surveys as one, the texts of the first in front: what either has read and recorded is not read and recorded again.

    `places` count in the texts given to both, `num_given` being those given to the first.
    """

    def __init__(self, first: Survey, second: Survey, num_given: int) -> None:
        self.target = first.target
        self.places = (*first.places, *(num_given + place for place in second.places))
        self._first, self._second = first, second

    @property
    def mean_context(self) -> float:
        """See `Survey.mean_context`."""
        parts = (self._first, self._second)
        return sum(part.mean_context * len(part.places) for part in parts) / len(self.places)

    @property
    def rounds(self) -> tuple[RoundsCache, Tensor]:
        """Those of the first texts: enough to compare states on."""
        return self._first.rounds

    def record(self, draft: SurveyedDraft) -> list[Recording]:
        """See `Survey.record`."""
        return self.record_all([draft])[0]

    def record_all(self, drafts: Iterable[SurveyedDraft]) -> list[list[Recording]]:
        """See `Survey.record_all`."""
        drafts = list(drafts)
        both = zip(self._first.record_all(drafts), self._second.record_all(drafts), strict=True)
        return [[*one, *other] for one, other in both]

    def copies(self, lookup: PromptLookup | Lookup, most: int) -> list[Copies]:
        """See `Survey.copies`."""
        return [*self._first.copies(lookup, most), *self._second.copies(lookup, most)]


def _copies(text: _Read, accepted: Sequence[bool], lookup: PromptLookup | Lookup, most: int) -> Copies:
    prompt = text.token_ids[0, : text.first].tolist()
    held = TokenSequence(prompt, text.token_ids.shape[1] + 1, torch.device("cpu"))
    copies: list[int | None] = []
    for place, token in enumerate(text.continuation[:-1]):
        held.append([token])
        found = find_copy(held, lookup)
        if found is None:
            copies.append(None)
            continue
        behind = text.continuation[place + 1 : place + 1 + most]
        drafted = zip(copied(held.token_ids, found, len(behind)), behind, accepted[place:], strict=False)
        agrees = [one == other and lucky for one, other, lucky in drafted]
        copies.append(agrees.index(False) if False in agrees else len(agrees))
    return copies
