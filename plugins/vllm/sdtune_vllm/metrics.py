"""The gauge `sdtune:speedup` at vLLM's `/metrics`: the entry point of `vllm.stat_logger_plugins`, which servers load."""

from __future__ import annotations

from functools import cache
from statistics import median_low
from typing import Any

from prometheus_client import Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from sdtune_vllm import is_ours
from sdtune_vllm.pace import Pace


@cache
def _gauge() -> Any:
    text = (
        "Speed of decoding over that of the steps without drafts, by the number of requests; absent until six are known"
    )
    return Gauge("sdtune:speedup", text, ["engine", "requests"], multiprocess_mode="mostrecent")


class SpeedUp(StatLoggerBase):
    """Sets the gauge after each step of an engine that drafts by a profile; does nothing for others."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._pace, self._index = Pace(), str(engine_index)
        self._gauge = _gauge() if is_ours(vllm_config) else None

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Count a step; its seconds are those since the requests' last tokens, by the engine's clock."""
        if self._gauge is None or scheduler_stats is None or iteration_stats is None:
            return
        latencies = iteration_stats.inter_token_latencies_iter
        wanted = scheduler_stats.num_running_reqs + len(iteration_stats.finished_requests)
        if not latencies or len(latencies) != wanted or iteration_stats.time_to_first_tokens_iter:
            self._pace.interrupt()
            return
        drafted = scheduler_stats.spec_decoding_stats is not None
        num_tokens = iteration_stats.num_generation_tokens
        self._pace.step(len(latencies), num_tokens, median_low(latencies), drafted=drafted)
        for load, speedup in self._pace.speedups.items():
            self._gauge.labels(self._index, load).set(speedup)

    def log_engine_initialized(self) -> None:
        """Say nothing."""
