"""Predicted speed-ups compared with real decoding."""
