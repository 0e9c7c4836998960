"""Building the drafter of a draft: `decoding.drafts.KINDS` names the factory of each kind."""

from __future__ import annotations

from decoding.draft_length import DraftLengthRule, Fixed, TopProbability
from decoding.drafters.cascade import CascadeDrafter, CopyStage, ModelStage
from decoding.drafters.contract import Drafter, NewDrafter
from decoding.drafters.lookup_first import LookupFirst
from decoding.drafts import KINDS, Cascade, CascadeStage, Draft
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

    Raises ValueError for layers that the target does not have, and `ExitHeadError` for a missing or different head.
    """
    # In bit-exact mode a prefix that the draft computed has other bits than the wide passes of the target.
    if target.runner.exact_width is not None:
        decoding = decoding.model_copy(update={"prefix_reuse": False})
    new_drafter: NewDrafter = KINDS[draft.kind].load_drafter()
    drafter = new_drafter(target, draft.without_lookup(), decoding, heads=heads)
    if drafter is None or draft.lookup_first is None:
        return drafter
    return LookupFirst(drafter, draft.lookup_first)


def new_cascade(target: Target, draft: Cascade, decoding: Decoding, *, heads: HeadFolder | None) -> CascadeDrafter:
    """Return the drafter of a cascade. Raises as `build_drafter` does, for any stage."""
    copies, models = list[CopyStage](), list[ModelStage]()
    for stage in draft.stages:
        source, drafter = stage.draft.copy_source, build_drafter(target, stage.draft, decoding, heads=heads)
        assert drafter is not None, "a stage drafts"
        if source is not None and stage.max_tokens is not None:
            copies.append(CopyStage(source, stage.max_tokens))
        else:
            models.append(ModelStage(drafter, stage_rule(stage), has_head=stage.draft.has_head))
    return CascadeDrafter(copies, models, draft.choice)


def stage_rule(stage: CascadeStage) -> DraftLengthRule | None:
    """Return the rule of a stage that runs the model; None for the last one, which the profile's rule steers."""
    if stage.max_tokens is None:
        return None
    if stage.threshold is None:
        return Fixed(max_tokens=stage.max_tokens)
    return TopProbability(max_tokens=stage.max_tokens, threshold=stage.threshold)


def check_draft(target: Target, draft: Draft) -> None:
    """Raise ValueError unless `target` can run `draft`; no file of the draft is read."""
    draft.check(target.num_layers)
    if draft.runs_model:
        build_drafter(target, draft.skipped(target.num_layers).with_tree(draft.candidate_tree))


def no_drafter(target: Target, draft: Draft, decoding: Decoding, *, heads: HeadFolder | None) -> None:
    """Return None: plain decoding has no drafter."""
