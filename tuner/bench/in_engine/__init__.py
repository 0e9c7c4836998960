"""`sdtune bench` with an engine: a profile's export beside the engine's own plain decoding, in the engine itself.

The engines are in `tuner.engines`; here are the run, its figures and its report.
"""
