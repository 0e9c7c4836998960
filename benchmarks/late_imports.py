"""Imports what a search imports late, for the server from which searches are forked: it takes most of a small search's time."""

import jinja2  # noqa: F401
import plotly.offline  # noqa: F401

from tuner.tracking import opened_store

with opened_store("sqlite://"):
    pass  # has imported MLflow, and opened nothing
