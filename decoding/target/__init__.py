"""The only place that knows transformers' internals: finds the layer stack of a loaded decoder and makes views of it."""

from decoding.target.anatomy import Anatomy, RopeChange, Sublayer
from decoding.target.equivalence import agree
from decoding.target.target import Target
from decoding.target.views import BlockView, DraftView, ExitView, ResumeView, TappedView

__all__ = [
    "Anatomy",
    "BlockView",
    "DraftView",
    "ExitView",
    "ResumeView",
    "RopeChange",
    "Sublayer",
    "TappedView",
    "Target",
    "agree",
]
