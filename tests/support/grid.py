"""Skip sets, draft length rules and prompts that losslessness is tested with."""

from __future__ import annotations

from decoding.draft_length import (
    AdaEdl,
    AdaEdlPublished,
    AdaptiveExit,
    BetaThompson,
    DraftLengthRule,
    Fixed,
    MaxConfidence,
    RoundCosts,
    TopProbability,
)
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup
from tests.support.families import NUM_LAYERS, some_tokens

EVERY_LAYER = tuple(range(NUM_LAYERS))

SKIPS = {
    "attention": LayerSkip(skip_attention=(1, 3)),
    "every attention": LayerSkip(skip_attention=EVERY_LAYER),
    "mlp": LayerSkip(skip_mlp=(2, 4)),
    "blocks": LayerSkip.blocks((2, 3)),
    "mixed": LayerSkip(skip_attention=(2, 3), skip_mlp=(1, 3)),
    "first blocks": LayerSkip.blocks((0, 1)),
    "first attention": LayerSkip(skip_attention=(0,)),
    "first mlp": LayerSkip(skip_mlp=(0, 4)),
    "last block": LayerSkip.blocks((NUM_LAYERS - 1,)),
    "everything": LayerSkip.blocks(EVERY_LAYER),
    "nothing": LayerSkip(),
}
QUANTISED: dict[str, Draft] = {
    "int8": LayerSkip(bits=8),
    "int4, half blocks": LayerSkip(skip_attention=(0, 2, 3), skip_mlp=(1, 3), bits=4),
    "int4, last block": LayerSkip(skip_attention=(NUM_LAYERS - 1,), skip_mlp=(NUM_LAYERS - 1,), bits=4),
    "int8, exit": EarlyExit(exit_layer=3, bits=8),
    "lookup, then int8": LayerSkip(bits=8, lookup=Lookup(max_tokens=4)),
    "int8 that checks copies": LayerSkip(bits=8, lookup=Lookup(min_ngram=1, direct_from=3, max_tokens=4)),
}
WITHOUT_LINEARS = frozenset({"gpt2"})
"""Families whose blocks have no plain linear layer."""
COSTS = RoundCosts(draft_step=0.3, verify=(1.0, 1.05))
RULES: dict[str, DraftLengthRule] = {
    "fixed 1": Fixed(max_tokens=1),
    "fixed 3": Fixed(max_tokens=3),
    "fixed 8": Fixed(max_tokens=8),
    "top probability": TopProbability(max_tokens=6, threshold=0.5),
    "AdaEDL, last kept": AdaEdl(max_tokens=6, gamma=0.3, initial_threshold=0.5, step=0.2, keep_last=True),
    "AdaEDL, last dropped": AdaEdl(max_tokens=6, gamma=0.3, initial_threshold=0.5, step=0.2, keep_last=False),
    "AdaEDL, published": AdaEdlPublished(max_tokens=6, gamma=0.3, initial_threshold=0.6, step=0.2),
    "Max-Confidence": MaxConfidence(max_tokens=6, initial_threshold=0.4, step=0.2),
    "adaptive exit": AdaptiveExit(max_tokens=6, initial_threshold=0.4, step=0.2),
    "Beta-Thompson": BetaThompson(max_tokens=6, costs=COSTS),
}

PROMPTS = {"one token": some_tokens(1), "several tokens": some_tokens(9)}
