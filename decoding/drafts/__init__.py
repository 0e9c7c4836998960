"""Draft documents: what a profile or a candidate says about its draft, one file per kind, and the registry of kinds.

Imports `decoding.documents` only: reading a document loads neither torch nor a model. To add a kind, write its document, drafter
and predictor, and name the three in one entry of `decoding.drafts.kinds.KINDS`. What copies lies here too: it is plain Python on
token ids.
"""

from decoding.drafts.contract import BitWidth, DraftDocument, DraftHead, Parts
from decoding.drafts.early_exit import EarlyExit
from decoding.drafts.kinds import KINDS, Draft, DraftKind, PlainDecoding, RealDraft, infer_kind
from decoding.drafts.layer_skip import Layers, LayerSkip, compact_indices, format_indices, parse_indices
from decoding.drafts.lookup import FirstLookup, Lookup, SuffixLookup
from decoding.drafts.prompt_lookup import PromptLookup, SuffixDraft

__all__ = [
    "KINDS",
    "BitWidth",
    "Draft",
    "DraftDocument",
    "DraftHead",
    "DraftKind",
    "EarlyExit",
    "FirstLookup",
    "LayerSkip",
    "Layers",
    "Lookup",
    "Parts",
    "PlainDecoding",
    "PromptLookup",
    "RealDraft",
    "SuffixDraft",
    "SuffixLookup",
    "compact_indices",
    "format_indices",
    "infer_kind",
    "parse_indices",
]
