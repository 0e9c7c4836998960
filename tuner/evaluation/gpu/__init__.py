"""The benchmark of one GPU: steps as data, one process that keeps the models, and its supervisor."""
