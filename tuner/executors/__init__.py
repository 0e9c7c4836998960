"""Where trials are measured: in this process, or on the devices of a Ray cluster, several at a time.

Imports `tuner.measuring`, `tuner.inputs` and what they import, but not `tuner.search`, which uses it. Ray is imported where a
search connects to a cluster.
"""
