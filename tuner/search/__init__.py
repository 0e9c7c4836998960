"""`sdtune search`: one search from its configuration to the profile."""
