"""Where trials are measured and heads trained: in this process, or on the devices of a Ray cluster, several at a time.

Imports `tuner.measuring`, `tuner.inputs` and what they import, but neither `tuner.search` nor `tuner.heads`, which use it. Ray is
imported where a command connects to a cluster.
"""
