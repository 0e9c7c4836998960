"""Measuring what passes cost on the device at hand, and choosing a runner by it."""
