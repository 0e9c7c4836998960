"""Entry points for production, one file each."""

from decoding.deploy.custom_generate import ProfileDecoder, load_decoder

__all__ = ["ProfileDecoder", "load_decoder"]
