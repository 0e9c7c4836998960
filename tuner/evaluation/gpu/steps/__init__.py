"""The steps of the GPU benchmark, one file per question."""
