"""Engines that take a draft by a few files of settings, a YAML each; read by `tuner.export.engines.registry`."""
