"""The drafter of a profile's draft: which class drafts which kind."""

from __future__ import annotations

from decoding.drafters.contract import Drafter
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafters.lookup_first import LookupFirst
from decoding.drafters.prompt_lookup import PromptLookupDrafter
from decoding.drafts import Draft, EarlyExit, LayerSkip, PlainDecoding, PromptLookup
from decoding.errors import ExitHeadError
from decoding.exit_heads import ExitHeads
from decoding.profile import Decoding
from decoding.target import Target


def build_drafter(
    target: Target,
    draft: Draft,
    decoding: Decoding = Decoding(),
    *,
    heads: ExitHeads | None = None,
) -> Drafter | None:
    """The drafter of `draft`, or None for plain decoding; `heads` gives the exit head of one that has a head.

    Raises ValueError for layers that the target does not have, and `ExitHeadError` for a head that is missing or another one.
    """
    if isinstance(draft, PlainDecoding):
        return None
    if isinstance(draft, PromptLookup):
        return PromptLookupDrafter(target, draft)
    # In bit-exact mode a prefix that the draft computed has other bits than the wide passes of the target.
    prefix_reuse = decoding.prefix_reuse and target.runner.exact_width is None
    drafter = _model_drafter(target, draft, prefix_reuse=prefix_reuse, heads=heads)
    return drafter if draft.lookup is None else LookupFirst(drafter, draft.lookup)


def _model_drafter(
    target: Target, draft: LayerSkip | EarlyExit, *, prefix_reuse: bool, heads: ExitHeads | None
) -> Drafter:
    """The drafter that runs a part of the model, without the lookup that may stand in front of it."""
    if isinstance(draft, LayerSkip):
        return LayerSkipDrafter(target, draft, prefix_reuse=prefix_reuse)
    target.check_exit_layer(draft.exit_layer)
    if draft.head is None:
        return LayerSkipDrafter(target, draft.skipped(target.num_layers), prefix_reuse=prefix_reuse)
    if heads is None:
        raise ExitHeadError(f"where is the exit head {draft.head}? give the folder that it lies in")
    return EarlyExitDrafter(target, draft.exit_layer, heads.get(draft), prefix_reuse=prefix_reuse)
