"""The only package that knows transformers' internals: layer stacks and views of them."""

from decoding.target.anatomy import Sublayer
from decoding.target.equivalence import agree
from decoding.target.lm_heads import DraftVocabulary
from decoding.target.target import Target
from decoding.target.views import BlockView, DraftView, ExitView, ResumeView, TappedView

__all__ = [
    "BlockView",
    "DraftView",
    "DraftVocabulary",
    "ExitView",
    "ResumeView",
    "Sublayer",
    "TappedView",
    "Target",
    "agree",
]
