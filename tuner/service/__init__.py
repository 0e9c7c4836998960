"""Tuning as a service: searches as durable jobs, the workers that run them, and the HTTP interface.

Imports `tuner.search`, and third parties of the extra `service`; nothing but `tuner.cli` imports
this folder.
"""
