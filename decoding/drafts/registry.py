"""The registry of draft kinds: each entry joins a draft document with its drafter and its predictor.

Drafter and predictor are named as `module:name` and imported at their first use, so that this package imports neither torch nor
`studies`.
"""

from __future__ import annotations

from collections.abc import Collection

from decoding.drafts.early_exit import EarlyExit
from decoding.drafts.feature_head import FeatureHeadDraft
from decoding.drafts.kinds import KINDS, DraftKind
from decoding.drafts.layer_skip import LayerSkip
from decoding.drafts.plain import PlainDecoding
from decoding.drafts.prompt_lookup import PromptLookup, SuffixDraft

KINDS |= {
    "layer_skip": DraftKind(
        LayerSkip, "decoding.drafters.layer_skip:new_drafter", "studies.prediction.predictors:SkipPredictor"
    ),
    "early_exit": DraftKind(
        EarlyExit, "decoding.drafters.early_exit:new_drafter", "studies.prediction.predictors:ExitPredictor"
    ),
    "feature_head": DraftKind(
        FeatureHeadDraft,
        "decoding.drafters.feature_head:new_drafter",
        "studies.prediction.predictors:FeatureHeadPredictor",
    ),
    "prompt_lookup": DraftKind(
        PromptLookup, "decoding.drafters.prompt_lookup:new_drafter", "studies.prediction.predictors:CopyPredictor"
    ),
    "suffix_automaton": DraftKind(
        SuffixDraft, "decoding.drafters.prompt_lookup:new_drafter", "studies.prediction.predictors:CopyPredictor"
    ),
    "none": DraftKind(
        PlainDecoding, "decoding.drafters.build:no_drafter", "studies.prediction.predictors:PlainPredictor"
    ),
}


def infer_kind(keys: Collection[str]) -> str:
    """Return the kind whose document has most of `keys`; the first registered one among equals."""
    return max(KINDS, key=lambda name: len(KINDS[name].document.model_fields.keys() & set(keys)))
