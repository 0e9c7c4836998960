"""A model with planted redundancy, written to disk."""
