"""The bench and the watch of a device in another process: each request is sent there and its answer read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample
from tuner.executors.contract import DeviceLostError, RemoteTrialError, TrialDevice
from tuner.measuring.contract import OnSample

Ask = Callable[..., dict[str, Any]]
"""Calls a method of a `DeviceWorker` by its name, with plain data, and returns its answer. Raises `DeviceLostError`."""


def trial_device(indices: Sequence[int], ask: Ask, name: str) -> TrialDevice:
    """Return the device `name` for trials on the prompts (or batches) at `indices`."""
    return TrialDevice(RemoteBench(ask, indices), RemoteWatch(ask), name)


class RemoteBench:
    """A bench in another process; see `Measuring`. What fails there raises `RemoteTrialError` here."""

    def __init__(self, ask: Ask, indices: Sequence[int]) -> None:
        self._ask = ask
        self.indices = indices

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Measure a candidate; `on_sample` receives each sample, while the device waits, and may raise to stop."""
        samples: list[PromptSample] = []
        answer = self._checked("begin", candidate.model_dump_json(), list(indices))
        while (text := answer["sample"]) is not None:
            samples.append(PromptSample.model_validate_json(text))
            try:
                on_sample(samples[-1])
            except BaseException:
                with suppress(DeviceLostError):  # what was measured counts; the next trial finds the loss
                    self._checked("stop")
                raise
            answer = self._checked("go_on")
        return Measurement(samples=tuple(samples))

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate with its rule warmed up at these indices."""
        answer = self._checked("warm_up_rule", candidate.model_dump_json(), list(indices))
        return Candidate.model_validate_json(answer["candidate"])

    def _checked(self, method: str, *arguments: Any) -> dict[str, Any]:
        answer = self._ask(method, *arguments)
        if "failure" in answer:
            raise RemoteTrialError(answer["failure"])
        return answer


class RemoteWatch:
    """The watch of a device in another process; see `DisturbanceWatch`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def begin(self) -> None:
        """Look before a trial."""
        self._ask("begin_watch")

    def found(self) -> str | None:
        """Look after it."""
        found: str | None = self._ask("disturbance")["found"]
        return found
