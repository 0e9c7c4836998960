"""Comparison of predicted speed-ups with real decoding."""
