"""The ways into production, one file each."""
