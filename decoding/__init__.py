"""Lossless self-speculative decoding: what production imports. Start at `decoding.deploy.load_decoder`."""
