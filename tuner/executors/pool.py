"""Several devices as one executor: a thread for each, which runs one task at a time and takes the next one that waits.

A device that is lost gives its task back, for whichever device is free first, and joins again when its process is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Thread
from types import TracebackType
from typing import Any, Generic, Protocol, Self

from tuner.errors import SearchError
from tuner.executors.contract import DeviceLostError, DeviceT, DeviceT_co, Work

PATIENCE_SECONDS = 60.0
"""Seconds to wait for further devices once one is ready."""


class DeviceConnection(Protocol[DeviceT_co]):
    """The connection to one device, used by one thread."""

    @property
    def name(self) -> str:
        """Name for messages and records."""

    def open(self) -> DeviceT_co:
        """Wait until the device is ready for tasks and return it; called again after it was lost.

        Raises `DeviceLostError` if it does not become ready, and `SdtuneError` if what it does could not be compared.
        """

    def close(self) -> None:
        """Give the device back; what runs on it ends with `DeviceLostError`. Called by another thread."""


class DevicePool(Generic[DeviceT]):
    """Runs tasks on the devices of `connections`; see `Executor`. A context manager, at whose end the devices are given back."""

    def __init__(
        self,
        connections: Sequence[DeviceConnection[DeviceT]],
        say: Callable[[str], None],
        *,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """Once a device is ready, the others are waited for for `patience` seconds; later ones join when they are ready.

        `say` tells the user which devices were lost and are back; only the thread that waits calls it.
        """
        self._connections, self._say, self._patience = list(connections), say, patience
        self._threads = [Thread(target=self._serve, args=(each,), daemon=True) for each in self._connections]
        self._changed = Condition()
        """Guards all that follows."""
        self._waiting: deque[tuple[str, Work[DeviceT]]] = deque()
        self._ended: deque[tuple[str, Any]] = deque()
        self._news: deque[str] = deque()
        self._failure: BaseException | None = None
        self._num_ready = 0
        self._num_served = len(self._connections)
        """Devices that are ready or may become so."""
        self._is_closed = False

    def __enter__(self) -> Self:
        """Wait until devices are ready. Raises what opening one of them raised, or `SearchError` if each was given up."""
        for thread in self._threads:
            thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_settled or self._num_ready)
                # Ray counts the nodes of a host that has died for a while.
                self._changed.wait_for(lambda: self._is_settled, timeout=self._patience)
                self._check()
                if (missing := self._num_served - self._num_ready) > 0:
                    self._news.append(f"{missing} of {self._num_served} devices are not ready yet: they join later")
            self._tell()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the devices back and end all threads."""
        with self._change():
            self._is_closed = True
        for connection in self._connections:
            connection.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def num_devices(self) -> int:
        """Number of devices that are ready, at least 1: a task may wait for one that was lost."""
        return max(1, self._num_ready)

    def submit(self, task: str, work: Work[DeviceT]) -> None:
        """Let the next free device run the work."""
        with self._change():
            self._waiting.append((task, work))

    def wait(self) -> tuple[str, Any]:
        """See `Executor.wait`. Raises `SearchError` if no device is left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._news or self._failure or not self._num_served)
                if not self._news:
                    if self._ended:
                        return self._ended.popleft()
                    self._check()
            self._tell()

    @property
    def _is_settled(self) -> bool:
        """True if each device is ready or given up, or a thread has failed."""
        return self._failure is not None or self._num_ready == self._num_served

    def _check(self) -> None:
        """Raise if a thread has failed or no device is left."""
        if self._failure is not None:
            raise self._failure
        if not self._num_served:
            raise SearchError("; ".join([*self._news, "no device is left"]))

    def _tell(self) -> None:
        while self._news:
            self._say(self._news.popleft())

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def _serve(self, connection: DeviceConnection[DeviceT]) -> None:
        """Run tasks on one device until the pool is closed or the device is lost for good."""
        try:
            while not self._is_closed:
                device = connection.open()
                with self._change():
                    self._num_ready += 1
                try:
                    self._run_tasks(device, connection.name)
                finally:
                    with self._change():
                        self._num_ready -= 1
        except DeviceLostError as lost:
            with self._change():
                self._news.append(f"{connection.name} is given up: {lost}")
        except BaseException as failure:
            with self._change():
                self._failure = self._failure or failure
        finally:
            with self._change():
                self._num_served -= 1

    def _run_tasks(self, device: DeviceT, name: str) -> None:
        """Run tasks on a device until the pool is closed or the device is lost; its task then waits for a device again."""
        while (job := self._next()) is not None:
            task, work = job
            try:
                result = work(device)
            except DeviceLostError as lost:
                with self._change():
                    self._waiting.appendleft(job)
                    if not self._is_closed:
                        self._news.append(f"{name} is lost ({lost}): {task} is redone")
                return
            with self._change():
                self._ended.append((task, result))

    def _next(self) -> tuple[str, Work[DeviceT]] | None:
        """Return the next task that waits, or None when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return None if self._is_closed else self._waiting.popleft()
