"""Measuring candidates and passes by real decoding."""
