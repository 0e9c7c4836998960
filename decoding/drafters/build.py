"""Building the drafter of a draft: `decoding.drafts.KINDS` names the factory of each kind."""

from __future__ import annotations

from decoding.drafters.contract import Drafter
from decoding.drafters.prompt_lookup import LookupFirst
from decoding.drafts import KINDS, Draft
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.target import Target


def build_drafter(
    target: Target,
    draft: Draft,
    decoding: Decoding = Decoding(),
    *,
    heads: HeadFolder | None = None,
) -> Drafter | None:
    """Return the drafter of `draft`, or None for plain decoding; `heads` holds the exit head of a draft that has one.

    Raises ValueError for layers that the target does not have, `ExitHeadError` for a missing or different head, and
    `UnsupportedModelError` for a target whose cache does not roll back, or that does not run without what the draft skips.
    """
    # In bit-exact mode a prefix that the draft computed has other bits than the wide passes of the target.
    if target.runner.exact_width is not None:
        decoding = decoding.model_copy(update={"prefix_reuse": False})
    target.checks.cache()
    drafter: Drafter | None = KINDS[draft.kind].load_drafter()(target, draft.having(lookup=None), decoding, heads=heads)
    if drafter is None or draft.parts.lookup is None:
        return drafter
    return LookupFirst(drafter, draft.parts.lookup)


def check_draft(target: Target, draft: Draft) -> None:
    """Raise ValueError unless `target` can run `draft`; no file of the draft is read."""
    draft.check(target.num_layers)
    if draft.runs_model:
        build_drafter(target, draft.skipped(target.num_layers))


def no_drafter(target: Target, draft: Draft, decoding: Decoding, *, heads: HeadFolder | None) -> None:
    """Return None: plain decoding has no drafter."""
