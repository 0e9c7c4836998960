"""Key-value caches: one for decoding a sequence, one for replaying many of its rounds at once."""
