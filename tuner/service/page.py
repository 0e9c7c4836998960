"""The pages of the service: a list of searches, one search, and counts for Prometheus.

Written on the server, without scripts; they reload themselves.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from jinja2 import DictLoader, Environment
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from tuner.service.contract import JobResult, JobState, SearchJob, WorkerCard
from tuner.stage_clock import spoken

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BASE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
{% if reload %}<meta http-equiv="refresh" content="5">{% endif %}
<title>{% block title %}sdtune{% endblock %}</title>
<style>
body {font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem}
table {border-collapse: collapse; width: 100%}
th, td {text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884}
td.n {font-variant-numeric: tabular-nums} pre {white-space: pre-wrap} .failed {color: #b00}
@media (prefers-color-scheme: dark) {body {background: #111; color: #ddd} a {color: #8bf}}
</style></head><body>{% block body %}{% endblock %}</body></html>"""

_JOBS = """{% extends "base" %}{% block body %}<h1>Searches</h1>
<table><tr><th>id</th><th>model</th><th>data set</th><th>state</th><th>stage</th><th>trials</th><th>verdict</th></tr>
{% for job in jobs %}<tr><td><a href="/searches/{{ job.id }}">{{ job.id }}</a></td><td>{{ job.model | name }}</td>
<td>{{ job.dataset | name }}</td><td class="{{ job.state }}">{{ job.state }}</td><td>{{ job.progress.stage }}</td>
<td class="n">{{ job.progress.trials }}</td>
<td class="n">{{ job.verdict or "" }}
{%- if job.state == "running" and job.progress.best_speedup is not none %}
{{- job.progress.best_speedup | speed }} best on tuning prompts{% endif %}</td></tr>
{% else %}<tr><td colspan="7">none yet: sdtune jobs submit CONFIG</td></tr>{% endfor %}</table>
<h2>Workers</h2>
<table><tr><th>name</th><th>device</th><th>queue</th><th>search</th><th>last heard of</th></tr>
{% for each in workers %}<tr><td>{{ each.name }}</td><td>{{ each.device }}</td><td>{{ each.queue }}</td>
<td>{{ each.job or "" }}</td><td>{{ "%.0f" | format(each.silent_seconds) }} s ago{{ "" if each.alive else ", dead" }}</td></tr>
{% else %}<tr><td colspan="5">none: sdtune worker</td></tr>{% endfor %}</table>{% endblock %}"""

_JOB = """{% extends "base" %}{% block title %}{{ job.model | name }} on {{ job.dataset | name }}{% endblock %}{% block body %}
<p><a href="/">Searches</a></p><h1>{{ job.model | name }} on {{ job.dataset | name }}</h1>
<p><b class="{{ job.state }}">{{ job.state }}</b>{% if job.worker %} on {{ job.worker }}{% endif %}
{% if job.error %}<br>{{ job.error }}{% endif %}</p>
{% if not job.state.is_over %}
<p>submitted {{ (now - job.created_seconds) | minutes }} ago</p>
<p>{{ job.progress.stage }}{% if job.progress.total %}: {{ job.progress.done }} of {{ job.progress.total }}{% endif %}</p>
<p>{{ job.progress.trials }} trials{% if job.progress.best_speedup is not none %}; best on tuning prompts
{{ job.progress.best_speedup | speed }}, {{ job.progress.best_draft }}{% endif %}</p>
<pre>{{ job.progress.lines | reverse | join("\n") }}</pre>
{% endif %}
{% if result %}
<p>{{ "The profile claims a speed-up." if result.claims_speedup else
      "Nothing beats plain decoding with 95 % confidence; the profile decodes plainly." }}</p>
<table><tr><th></th><th>speed-up</th><th>95 % interval</th><th>setting</th></tr>
{% for row in result.rows %}<tr><td>{{ row.label }}</td><td class="n">{{ row.speedup | speed }}</td>
<td class="n">{% if row.low is not none %}{{ "%.2f" | format(row.low) }} to {{ "%.2f" | format(row.high) }}{% endif %}</td>
<td>{{ row.description }}</td></tr>{% endfor %}</table>
<p><a href="/v1/searches/{{ job.id }}/profile">profile.yaml</a> · <a href="/v1/searches/{{ job.id }}/report">report</a> · MLflow run
{% if tracking %}<a href="{{ tracking }}/#/experiments/runs/{{ result.mlflow_run }}">{{ result.mlflow_run }}</a>
{% else %}{{ result.mlflow_run }}{% endif %}</p>
{% endif %}{% endblock %}"""

_PAGES = Environment(loader=DictLoader({"base": _BASE, "jobs": _JOBS, "job": _JOB}), autoescape=True)
_PAGES.filters |= {
    "speed": lambda value: "" if value is None else f"{value:.2f}x",
    "minutes": spoken,
    "name": lambda source: PurePath(source).name,
}


def jobs_page(jobs: Sequence[SearchJob], workers: Sequence[WorkerCard]) -> str:
    return _PAGES.get_template("jobs").render(jobs=jobs, workers=workers, reload=True)


def job_page(job: SearchJob, result: JobResult | None, tracking: str | None) -> str:
    """Return the page of one search; `tracking` is the address of MLflow, if there is one."""
    reload = not job.state.is_over
    return _PAGES.get_template("job").render(job=job, result=result, tracking=tracking, reload=reload, now=time.time())


def metrics_text(jobs: Iterable[SearchJob], workers: Iterable[WorkerCard]) -> bytes:
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
