"""Drafters: what proposes tokens, one file per kind, and the builder that finds them through `decoding.drafts.KINDS`.

Imports targets, caches and draft-length rules; decoding loops import drafters.
"""
