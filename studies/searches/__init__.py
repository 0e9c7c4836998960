"""The searches, one file or folder each: what to try next."""
