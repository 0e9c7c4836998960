"""Draft with the first N blocks and an exit head, verify from block N + 1 on.

Our formulation, after the abstract of EESD (arXiv 2406.03853), from which the paper is known to us. The head is one block of the
model's own class with its own keys and values. An exit without a head is the skip set of all blocks after N, and drafts as one.

The head processes the state of a position one pass later than the blocks: the last draft of a round, or the token of a round that
drafted nothing, is pending in the branch of the cache until the head's next pass.
"""

from __future__ import annotations

from torch import Tensor, nn

from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal, check_head_has_read
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafters.propose import propose
from decoding.drafts import EarlyExit
from decoding.errors import ExitHeadError
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.contract import Outputs, Written, one_token, write_by
from decoding.target import ExitView, ResumeView, TappedView, Target
from decoding.text import Request, TokenSequence


class EarlyExitDrafter(Drafter):
    """The first `exit_layer` blocks, `head`, and the target's own final norm and LM head, quantised if `bits` are given."""

    def __init__(
        self,
        target: Target,
        exit_layer: int,
        head: nn.Module,
        *,
        prefix_reuse: bool = True,
        bits: int | None = None,
    ) -> None:
        self.has_head = True
        self._exit = ExitView(target, exit_layer, head, bits=bits)
        self._whole = TappedView(target, exit_layer)
        self._is_quantised = bits is not None
        resumes = prefix_reuse and not self._is_quantised and target.checks.resumes_at(exit_layer)
        self._resume = ResumeView(target, exit_layer) if resumes else None

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Run the target over the prompt, and the head over the states at the exit."""
        logits = self.prefill_target(sequence, cache)
        self._read_pending(sequence, cache, sequence.length)
        return logits

    def prefill_target(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Run the target over the prompt; the head reads the states at the exit when it drafts."""
        check_head_has_read(cache)
        start, end = cache.length, sequence.length
        outputs = self._whole.run(sequence.span(start, end), cache, start, last_only=True)
        assert outputs.states is not None, "the exit is tapped"
        cache.branch.extend(outputs.states)  # after those of earlier turns that the head has not processed
        cache.branch.has_unread_prompt = True
        return outputs.logits

    def _read_pending(self, sequence: TokenSequence, cache: KVCache, end: int) -> None:
        """Let the head process the pending states, which reach to position `end`."""
        branch = cache.branch
        assert branch.pending is not None, "extended"
        self._exit.fill(sequence.span(branch.length, end), cache, branch.length, branch.pending)
        branch.catch_up(end)
        branch.has_unread_prompt = False

    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        """Draft token by token until the controller or `limit` stops; the first pass includes the pending tokens."""
        branch, states = cache.branch, list[Tensor]()
        if branch.has_unread_prompt and limit > 0:  # by itself, as a prompt is read
            self._read_pending(sequence, cache, cache.length)

        def step(num_drafted: int, looks: bool) -> Outputs:
            start, end = branch.length, cache.length + num_drafted + 1
            outputs = self._exit.run(sequence.span(start, end), cache, start, branch.pending, looks=looks)
            branch.catch_up(end)
            assert outputs.states is not None, "the exit is tapped"
            states.append(outputs.states)
            return outputs

        def write(num_tokens: int) -> Written:
            def piece(token_ids: Tensor, index: int) -> Written:
                if index == 0:  # by itself: it includes the pending tokens
                    return one_token(step(0, False))
                written = self._exit.write(token_ids, cache, cache.length + index, num_tokens - index)
                branch.catch_up(cache.length + num_tokens)
                assert written.states is not None, "the exit is tapped"
                states.append(written.states)
                return written

            return write_by(piece, sequence.span(cache.length, cache.length + 1), num_tokens)

        draft = propose(step, write, sequence, cache, controller, request, limit, states)
        # The head forgets what it read of drafts after the end. States of quantised blocks are not the target's: it forgets
        # those of the whole round, and reads the verification's with its next pass.
        branch.roll_back(cache.length if self._is_quantised else cache.length + draft.num_tokens + 1)
        return draft

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """Run the target over the last token and the drafts, from the exit on if the states there are known."""
        token_ids = sequence.span(cache.length, sequence.length + draft.num_tokens)
        if self._resume is None or draft.states is None:
            outputs = self._whole.run(token_ids, cache, cache.length)
        else:
            outputs = self._resume.run(token_ids, cache, cache.length, draft.states)
        assert outputs.states is not None, "the exit is tapped"
        branch = cache.branch
        branch.extend(outputs.states[..., branch.num_known - cache.length :, :])
        return outputs


def new_drafter(target: Target, draft: EarlyExit, decoding: Decoding, *, heads: HeadFolder | None) -> Drafter:
    """Return the drafter of an exit; without a head it is the skip set of all blocks after the exit.

    Raises ValueError for an exit that `target` does not have, and `ExitHeadError` for a head that `heads` does not hold.
    """
    target.check_exit_layer(draft.exit_layer)
    if draft.head is None:
        return LayerSkipDrafter(target, draft.skipped(target.num_layers), prefix_reuse=decoding.prefix_reuse)
    if heads is None:
        raise ExitHeadError(f"the draft needs the exit head {draft.head}: give the folder that holds it")
    head, reuses = heads.get(draft), decoding.prefix_reuse
    return EarlyExitDrafter(target, draft.exit_layer, head, prefix_reuse=reuses, bits=draft.bits)
