"""What is kept with each request: its draft-length rule's state, and the index of its text for copies. Knows nothing of vLLM."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from decoding.draft_length import Controller, Decision, DraftDistribution, DraftLengthRule
from decoding.drafts import DraftDocument
from decoding.drafts.lookup import CopyIndex, CopySettings


@dataclass
class DraftingRequest:
    """One request: its tokens so far, and what its drafts depend on."""

    controller: Controller
    token_ids: list[int] = field(default_factory=list)
    index: CopyIndex | None = None
    is_steered: bool = False
    """True if the rule steered the latest draft: a lookup before the draft is none of its business."""
    num_drafted: int = 0
    """Tokens of the latest draft, without padding."""


@dataclass
class Turn:
    """A request that drafts in this step, with the model's drafts so far."""

    row: int
    """Its row in the batch."""
    request: DraftingRequest
    most: int
    """Tokens that it may draft."""
    tokens: list[int] = field(default_factory=list)

    def take(self, token: int, distribution: DraftDistribution) -> bool:
        """Draft a token as the rule decides; return True if another pass is wanted."""
        decision = self.request.controller.decide(len(self.tokens), distribution)
        if decision is not Decision.STOP:
            self.tokens.append(token)
        return decision is Decision.CONTINUE and len(self.tokens) < self.most


class DraftingRequests:
    """The requests of one engine, and how each drafts: by a copy, by the model, or not at all."""

    def __init__(self, draft: DraftDocument, rule: DraftLengthRule) -> None:
        self._draft, self._rule = draft, rule
        self._first = draft.parts.lookup
        self._copies: CopySettings | None = draft if isinstance(draft, CopySettings) else self._first
        self._known: dict[str, DraftingRequest] = {}

    def begin(self, name: str, row: int, text: Sequence[int], verified: int, accepted: int, room: int) -> Turn:
        """Tell a request what became of its draft, and begin the next one, of at most `room` tokens; it may be complete.

        `text` are all its tokens, `verified` of the last draft were verified, and `accepted` of these accepted. A turn that wants
        passes of the model has `most` above the number of its tokens.
        """
        request = self._known.get(name)
        if request is None:
            request = self._known[name] = DraftingRequest(self._rule.controller())
            if self._copies is not None:
                request.index = self._copies.new_index(request.token_ids)
        if request.is_steered:
            verified = min(verified, request.num_drafted)
            request.controller.observe(verified, min(accepted, verified))
        request.token_ids.extend(map(int, text[len(request.token_ids) :]))
        if room <= 0:
            request.is_steered = False
            return Turn(row, request, 0)
        if not self._draft.runs_model:
            return self._copied_alone(row, request, room)
        if self._first is not None and request.index is not None:
            copied = request.index.copy(min(room, self._first.max_tokens))
            if copied:
                request.is_steered = False
                return Turn(row, request, len(copied), copied)
        request.is_steered = True
        return Turn(row, request, min(room, request.controller.limit()))

    def _copied_alone(self, row: int, request: DraftingRequest, room: int) -> Turn:
        assert request.index is not None, "a draft without a model copies"
        copied = request.index.copy(min(room, request.controller.max_tokens))
        request.is_steered = copied is not None
        tokens = [] if copied is None else copied[: request.controller.length_of_copy(len(copied))]
        return Turn(row, request, len(tokens), tokens)

    def drafts(self, turns: Sequence[Turn], padded_to: int | None = None) -> dict[int, list[int]]:
        """Return the finished drafts by row, padded to one length if it is given and any request drafts.

        Padding repeats the last token of the text: it is verified as any draft is, and hardly ever accepted.
        """
        for turn in turns:
            turn.request.num_drafted = len(turn.tokens)
        if padded_to is None or not any(turn.tokens for turn in turns):
            return {turn.row: turn.tokens for turn in turns}
        return {turn.row: turn.tokens + turn.request.token_ids[-1:] * (padded_to - len(turn.tokens)) for turn in turns}

    def end(self, names: Collection[str]) -> None:
        """Forget requests; the next one goes on with the state of a rule that is `persistent`."""
        for name in names:
            request = self._known.pop(name, None)
            if request is not None and self._rule.persistent:
                self._rule = request.controller.adapted_rule() or self._rule
