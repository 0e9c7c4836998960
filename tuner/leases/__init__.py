"""Leases in a database: which process works on what, told apart from processes that have ended. Knows nothing of searches."""
