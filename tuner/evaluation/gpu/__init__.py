"""The benchmark of one GPU: its plan, and the process that runs each step."""
