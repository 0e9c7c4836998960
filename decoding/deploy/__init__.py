"""Entry points for production, one file each."""

from decoding.copying.history import RequestHistory
from decoding.deploy.custom_generate import ProfileDecoder, load_decoder

__all__ = ["ProfileDecoder", "RequestHistory", "load_decoder"]
