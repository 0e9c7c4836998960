"""Key-value caches: one for decoding a sequence, and one that replays many rounds of it at once."""
