"""Work that stands for a layer's compute: numpy on memory that stays in the cache, a wait for a device, or plain Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

_ELEMENTS = 16_384
"""128 KiB of doubles: one call takes some 100 µs without the GIL, and no memory bandwidth."""


class NumpyCompute:
    """Releases the GIL while it works, as torch's operators do."""

    def __init__(self) -> None:
        self._of = np.linspace(0.0, 1.0, _ELEMENTS)
        self._into = np.empty_like(self._of)
        self.call_s = self._measure()

    def _measure(self) -> float:
        """Seconds of one call: the median of some, after the first."""
        taken = []
        for _ in range(31):
            began = time.perf_counter()
            np.sin(self._of, out=self._into)
            taken.append(time.perf_counter() - began)
        return sorted(taken[1:])[15]

    def calls_for(self, seconds: float) -> int:
        """How many calls take that long, at least one."""
        return max(1, round(seconds / self.call_s))

    def run(self, calls: int) -> None:
        of, into, sin = self._of, self._into, np.sin
        for _ in range(calls):
            sin(of, out=into)


class DeviceCompute:
    """A wait, as a thread waits for an accelerator: it takes neither the GIL nor a core nor memory bandwidth."""

    def calls_for(self, seconds: float) -> int:
        """Microseconds."""
        return max(1, round(seconds * 1e6))

    def run(self, calls: int) -> None:
        if calls:
            time.sleep(calls * 1e-6)


class Compute(Protocol):
    """Work of a layer, in calls of a fixed length."""

    def calls_for(self, seconds: float) -> int: ...
    def run(self, calls: int) -> None: ...


def python_compute(seconds: float) -> Callable[[], None]:
    """Plain Python for about so long: it gives the GIL away only at the interpreter's switch interval."""

    def run() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    return run
