"""Clocks of the measurements: real time, or prices that make a measurement repeat exactly."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from decoding.drafts import Draft
from decoding.rounds import Round
from decoding.timing.passes import Stopwatch

Elapsed = Callable[[Round | None], float]
"""Seconds since a decoding started, read when tokens arrive: with the record of their round, or None if there is none."""
Price = Callable[[Draft, Round], float]
"""Seconds to charge for a round of this draft."""


class Clock(Protocol):
    """Times decodings. Called by the measuring loops once per decoding, just before it starts."""

    @property
    def is_deterministic(self) -> bool:
        """True if a repeated decoding takes exactly the same time, so that nothing is gained by repeating or warming up."""

    def start(self, draft: Draft | None = None) -> Elapsed:
        """Return a function that reads the seconds of a decoding that starts now; `draft` is None if code of others decodes."""


class WallClock:
    """Times real decoding on one device.

    Tokens are on the host when seconds are read, so only the start of a decoding waits for the device.
    """

    is_deterministic = False

    def __init__(self, device: torch.device) -> None:
        self._stopwatch = Stopwatch(device)

    def start(self, draft: Draft | None = None) -> Elapsed:
        """Wait for the device and return a function that reads real seconds."""
        start = self._stopwatch.now()
        return lambda record: time.perf_counter() - start


class PriceList:
    """Charges a fixed price for every round that really happened, in place of measured seconds.

    Searches can then be checked without the noise of a real clock (the simulation mode of Kernel Tuner). The prefill is free. The
    sequences of a batch are charged one after another, as if they shared no passes.
    """

    is_deterministic = True

    def __init__(self, price: Price) -> None:
        self._price = price

    def start(self, draft: Draft | None = None) -> Elapsed:
        """Return a function that reads the prices charged so far.

        Raises ValueError without a draft: there are no rounds to charge for.
        """
        if draft is None:
            raise ValueError("a price list charges for the rounds of a draft, got none")
        charged = 0.0

        def read(record: Round | None) -> float:
            nonlocal charged
            if record is not None:
                charged += self._price(draft, record)
            return charged

        return read
