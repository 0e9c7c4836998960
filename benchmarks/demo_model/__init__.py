"""The demo model of `configs/demo`: its corpus, its training for early exits and its prompts."""
