"""Replay of logged texts compared with trials on the same kind of text."""
