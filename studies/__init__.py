"""What to try next: one module a search, each an Optuna study with its own space and its own way of proposing."""
