"""The process of one device: loads the model by itself, and measures candidates and plain decoding on the device.

Requests and answers are plain data; only prices, for checks, are objects. A measurement goes on sample by sample, as the search may
end it after each. Knows nothing of Ray, which runs an object of this class.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from decoding.errors import SdtuneError, first_line
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate
from studies.measurement import PromptSample
from tuner.executors.model_spec import ModelSpec
from tuner.measuring.baseline import Baseline
from tuner.measuring.clock import PriceList, WallClock
from tuner.measuring.contract import Measuring
from tuner.measuring.disturbance import DisturbanceWatch, watch_of
from tuner.measuring.paired import Bench

Answer = dict[str, Any]
"""What a request returns, as plain data: `error` if a user can correct it, else `failure`, or the values that its method names."""


class DeviceSpec(ModelSpec):
    """What a device must load and be for the trials of one search."""

    runner: str
    exact_width: int | None
    decoding: Decoding
    seed: int
    most_kept: int
    heads: Path
    prompts: tuple[tuple[int, ...], ...]
    continuations: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    categories: tuple[str | None, ...]
    batch_size: int
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    """The tuning prompts in token ids, and their plain continuations; see `Baseline`."""

    def baseline(self) -> Baseline:
        """Return the prompts as a bench takes them."""
        return Baseline(
            prompts=self.prompts,
            continuations=self.continuations,
            rows=self.rows,
            ending=Ending(self.max_new_tokens, self.eos_token_ids),
            batch_size=self.batch_size,
            categories=self.categories,
        )


def open_bench(spec: DeviceSpec, prices: PriceList | None) -> tuple[Bench, torch.device]:
    """Load the model and return the bench of the tuning prompts; `prices` are charged in place of seconds if they are given.

    Raises `SdtuneError` if the model cannot be loaded, or if model, device or versions are not those of the search.
    """
    target = Target(spec.loaded().model, spec.runner, exact_width=spec.exact_width)
    bench = Bench(
        target,
        spec.baseline(),
        decoding=spec.decoding,
        heads=HeadFolder(target, spec.heads),
        seed=spec.seed,
        clock=prices or WallClock(target.device),
        most_kept=spec.most_kept,
    )
    return bench, target.device


class _Stopped(Exception):
    """The search has ended the measurement."""


class _Measurement:
    """A measurement that is suspended after each sample."""

    def __init__(self, bench: Measuring, candidate: Candidate, indices: Sequence[int]) -> None:
        def run() -> None:
            bench.measure(candidate, indices, on_sample=lambda sample: running.parent.switch(sample))

        running = self._running = greenlet(run)

    def next(self) -> PromptSample | None:
        """Return the next sample, or None if there is none. Raises what measuring raises."""
        self._running.parent = getcurrent()
        sample: PromptSample | None = self._running.switch()
        return sample

    def stop(self) -> None:
        """End the measurement, as an error of its caller would."""
        if not self._running.dead:
            self._running.parent = getcurrent()
            try:
                self._running.throw(_Stopped)
            except _Stopped:
                return


class DeviceWorker:
    """Measures on one device what it is asked for, one request at a time."""

    def __init__(self) -> None:
        self._bench: Measuring | None = None
        self._watch: DisturbanceWatch | None = None
        self._running: _Measurement | None = None

    def ask(self, method: str, *arguments: Any) -> Answer:
        """Return the answer of a method; `lost` if this process took the place of the one that had opened the device."""
        if self._bench is None and method != "open":
            return {"lost": "its process was started again"}
        answer: Answer = getattr(self, method)(*arguments)
        return answer

    def open(self, spec: str, prices: PriceList | None = None) -> Answer:
        """Load what the spec, a `DeviceSpec` in JSON, names."""
        try:
            self._bench, device = open_bench(DeviceSpec.model_validate_json(spec), prices)
            self._watch = watch_of(device)
        except SdtuneError as refusal:
            return {"error": str(refusal)}
        return {}

    def warm_up_rule(self, candidate: str, indices: Sequence[int]) -> Answer:
        """Return the `candidate` with its rule warmed up; see `Measuring`. Candidates are in JSON."""
        try:
            warmed_up = self._opened.warm_up_rule(Candidate.model_validate_json(candidate), indices)
        except (Exception, SystemExit) as failure:
            return _failed(failure)
        return {"candidate": warmed_up.model_dump_json()}

    def begin(self, candidate: str, indices: Sequence[int]) -> Answer:
        """Begin to measure a candidate, and return the first `sample`, or None in place of it."""
        self.stop()
        self._running = _Measurement(self._opened, Candidate.model_validate_json(candidate), indices)
        return self.go_on()

    def go_on(self) -> Answer:
        """Go on with the measurement and return the next `sample`, or None in place of it at the end."""
        assert self._running is not None, "a measurement has begun"
        try:
            sample = self._running.next()
        except (Exception, SystemExit) as failure:
            self._running = None
            return _failed(failure)
        return {"sample": None if sample is None else sample.model_dump_json()}

    def stop(self) -> Answer:
        """End the measurement that has begun, if there is one."""
        if self._running is not None:
            self._running.stop()
            self._running = None
        return {}

    def begin_watch(self) -> Answer:
        """Look at the device before a trial."""
        assert self._watch is not None, "the device was opened"
        self._watch.begin()
        return {}

    def disturbance(self) -> Answer:
        """Return what was `found` after a trial; see `DisturbanceWatch`."""
        assert self._watch is not None, "the device was opened"
        return {"found": self._watch.found()}

    @property
    def _opened(self) -> Measuring:
        assert self._bench is not None, "the device was opened"
        return self._bench


def _failed(failure: BaseException) -> Answer:
    if isinstance(failure, torch.OutOfMemoryError) and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"failure": f"{type(failure).__name__}: {first_line(failure, default='no message')}"}
