"""Exports of a profile: draft folders that other engines load, and the settings of each engine."""
