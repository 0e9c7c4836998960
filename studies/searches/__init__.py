"""The studies, one file or folder each, and their registry."""
