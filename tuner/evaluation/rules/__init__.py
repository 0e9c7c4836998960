"""Comparison of draft-length rules on one draft."""
