"""A worker of a Ray device without a model, which starts quickly: it says where and when it was used."""

from __future__ import annotations

import time
from typing import Any


class BrokenWorker:
    """A worker whose process cannot begin, as where sdtune is not installed."""

    def __init__(self) -> None:
        raise ImportError("No module named 'decoding'")

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Never called."""
        raise AssertionError("the process has begun")


class PlaceWorker:
    """Takes the place of `tuner.executors.worker.DeviceWorker`; its watch finds node, GPU, start and end of the use."""

    SECONDS = 0.5

    def __init__(self) -> None:
        self._is_open = False

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """See `DeviceWorker.ask`."""
        import ray

        if method == "open":
            self._is_open = True
            return {}
        if not self._is_open:
            return {"lost": "its process was started again"}
        if method == "begin_watch":
            return {}
        start = time.time()
        time.sleep(self.SECONDS)
        context = ray.get_runtime_context()
        gpus = ",".join(context.get_accelerator_ids()["GPU"])
        return {"found": f"{context.get_node_id()} {gpus} {start} {time.time()}"}
