"""Key-value caches: the one a text is decoded with, and one that replays many rounds of it at once."""
