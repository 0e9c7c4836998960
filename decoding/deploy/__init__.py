"""Entry points for production, one file each."""

from decoding.copying.history import RequestHistory
from decoding.deploy.custom_generate import ProfileDecoder, load_decoder
from decoding.deploy.mismatch import OnMismatch

__all__ = ["OnMismatch", "ProfileDecoder", "RequestHistory", "load_decoder"]
