"""`sdtune evaluate executors`: searches on a Ray cluster of this machine, compared with the same search in one process."""
