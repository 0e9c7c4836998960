"""Strict YAML documents and atomic file writes. Imports only sdtune's errors."""
