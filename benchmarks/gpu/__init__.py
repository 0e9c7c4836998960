"""The benchmark of one GPU in ten minutes: steps in one process that keeps the models, replaced when it dies."""
