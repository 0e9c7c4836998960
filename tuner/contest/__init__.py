"""Ways of decoding timed in turns: our own loops, and transformers' `generate`.

Used by searches, benches and evaluations. Imports `tuner.measuring` and `tuner.inputs`.
"""
