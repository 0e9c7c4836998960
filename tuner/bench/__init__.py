"""`sdtune bench`: a profile against the decoding a user would otherwise run."""
