"""What the memory store's tests share: a clock that stands still, and a gate inside the copy."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvactors.stores import ranges as range_calls


class ManualClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


class CopyGate:
    """Holds every copy between its checks and its first byte, until released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = threading.Event()
        self.release = threading.Event()
        real = range_calls.copy_table

        def held(*args: Any, **kwargs: Any) -> None:
            self.arrived.set()
            assert self.release.wait(30)
            real(*args, **kwargs)

        monkeypatch.setattr(range_calls, "copy_table", held)


class Background(threading.Thread):
    """Runs a call in a thread; `result` waits for its answer."""

    def __init__(self, call: Any, *args: Any) -> None:
        super().__init__(daemon=True)
        self._call, self._args = call, args
        self._answer: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._call(*self._args)
        except Exception as error:
            self._answer = error

    def result(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        return self._answer
