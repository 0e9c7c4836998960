"""Checks of false claims of a speed-up and of the coverage of intervals."""
