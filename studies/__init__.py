"""What to try next: studies, and what they predict from. Nothing here measures, stores or prints.

Imports `decoding` only. `studies.samplers` names the studies.
"""
