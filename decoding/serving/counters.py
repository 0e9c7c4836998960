"""Metrics of the server for Prometheus, by vLLM's names: dashboards and benchmark clients for vLLM read them."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from decoding.profile import Measured
from decoding.rounds import Prefill, Round
from decoding.serving.control import DraftControl, load_name, load_of
from decoding.serving.waiting_room import Job, RequestEnd

LABEL = "model_name"
LOAD_LABEL = "requests"
"""How many requests were decoded together: `1`, `2-3`, `4-7` ..."""
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the histograms' buckets."""


class ServerCounters:
    """What one server has counted since its start, for the model `name`. An observer of the batch; any thread may read."""

    def __init__(self, name: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory and CPU time of the process
        self._name = name
        self._control: DraftControl | None = None
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of the requests that have begun.")
        self._generated = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds that drafted.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafted tokens.")
        self._by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by their position in the draft.",
            [LABEL, "position"],
            registry=self._registry,
        )
        self._rounds = self._counter("sdtune:num_rounds", "Rounds of draft and verification, plain steps included.")
        self._ends = Counter(
            "vllm:request_success",
            "Requests by the reason of their end.",
            [LABEL, "finished_reason"],
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Seconds from arrival to the first token."
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Seconds from arrival to the end.")

    def gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        """Add a figure that is asked for whenever the metrics are read."""
        Gauge(name, help, [LABEL], registry=self._registry).labels(self._name).set_function(value)

    def watch(self, control: DraftControl) -> None:
        """Add the speed-up over plain rounds, by load, with its interval."""
        self._control = control
        self._speedups = [
            Gauge(f"sdtune:speedup{name}", help, [LABEL, LOAD_LABEL], registry=self._registry)
            for name, help in (
                ("", "Speed of drafting over plain rounds of this server."),
                ("_low", "Lower end of its 95 % interval."),
                ("_high", "Upper end of its 95 % interval."),
            )
        ]

    def compare_with(self, measured: Measured) -> None:
        """Add what the profile's own measurement found, to compare with."""
        speedup = Gauge(
            "sdtune:profile_speedup_low",
            "Lower end of the 95 % interval of the profile's speed-up, at the load that it was tuned for.",
            [LABEL, LOAD_LABEL],
            registry=self._registry,
        )
        speedup.labels(self._name, load_name(load_of(measured.batch_size))).set(measured.speedup.ci95[0])
        acceptance = "Accepted over drafted tokens, as the profile's own measurement found them."
        self.gauge("sdtune:profile_acceptance_rate", acceptance, lambda: measured.draft_acceptance_rate)

    def observe(self, job: Job, event: Prefill | Round | RequestEnd) -> None:
        if isinstance(event, Prefill):
            self._prompt.inc(len(job.request.prompt))
            self._generated.inc()
            self._first_token.observe(time.perf_counter() - job.arrived)
        elif isinstance(event, RequestEnd):
            self._whole.observe(time.perf_counter() - job.arrived)
        else:
            self._rounds.inc()
            self._generated.inc(len(event.tokens))
            if event.num_drafted:
                self._drafts.inc()
                self._drafted.inc(event.num_drafted)
                self._accepted.inc(event.num_accepted)
                for position in range(event.num_accepted):
                    self._by_position.labels(self._name, str(position)).inc()

    def finished(self, reason: str) -> None:
        """Count a request that ended for a reason such as `stop`, `length` or `abort`."""
        self._ends.labels(self._name, reason).inc()

    def text(self) -> bytes:
        for load, speedup in ({} if self._control is None else self._control.speedups).items():
            for gauge, value in zip(self._speedups, (speedup.value, *speedup.ci95), strict=True):
                gauge.labels(self._name, load_name(load)).set(value)
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, [LABEL], registry=self._registry).labels(self._name)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(name, help, [LABEL], registry=self._registry, buckets=SECONDS).labels(self._name)
