"""Benchmarks of sdtune itself: plain scripts that prove its claims, outside the wheel. Nothing imports them."""
