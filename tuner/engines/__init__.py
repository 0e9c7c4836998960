"""Real inference engines, started as processes on loopback and measured by their HTTP APIs.

One module per engine beside the contract; `tuner.fields.PROGRAMS` names them. Imports exports and studies, never the bench.
"""
