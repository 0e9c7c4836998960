"""Entry points for production, one file each."""

from decoding.deploy.custom_generate import ProfileDecoder, load_decoder
from decoding.deploy.mismatch import OnMismatch
from decoding.drafts.history import RequestHistory

__all__ = ["OnMismatch", "ProfileDecoder", "RequestHistory", "load_decoder"]
