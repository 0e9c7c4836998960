"""Copying: indexes over a growing sequence, and over earlier ones, that find the tokens to copy as a draft.

Knows neither drafts nor models: everything here is plain Python on token ids of the host.
"""
