"""Searches on models with planted redundancy, whose best setting is known."""
