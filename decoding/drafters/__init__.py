"""Who proposes tokens, one file each."""
