"""Inputs of a command: model, dataset, prompts."""
