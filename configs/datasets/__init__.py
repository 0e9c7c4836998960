"""Presets of well-known datasets, a YAML each; read by `tuner.inputs.datasets`."""
