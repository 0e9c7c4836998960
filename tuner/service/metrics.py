"""Counts of searches and workers, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from tuner.service.contract import JobState, SearchJob, WorkerCard

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(jobs: Iterable[SearchJob], workers: Iterable[WorkerCard]) -> bytes:
    """Return the counts in Prometheus' text format."""
    registry = CollectorRegistry()
    searches = Gauge("sdtune_searches", "Searches by state, of the latest thousand.", ["state"], registry=registry)
    states = Counter(job.state for job in jobs)
    for state in JobState:
        searches.labels(state.value).set(states[state])
    alive = Gauge("sdtune_workers", "Workers by queue and occupation.", ["queue", "busy"], registry=registry)
    for worker in workers:
        if worker.alive:
            alive.labels(worker.queue, str(worker.job is not None).lower()).inc()
    return generate_latest(registry)
