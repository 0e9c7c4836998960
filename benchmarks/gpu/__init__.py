"""The benchmark of one GPU in a quarter of an hour: steps in one process that keeps the models, replaced when it dies."""
