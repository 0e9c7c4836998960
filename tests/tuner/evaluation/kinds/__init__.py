"""The table of kinds."""
