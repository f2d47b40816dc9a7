"""Ctrl-C while a replay runs: counted, passed on to whoever can stop, and never raised into what must be finished."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

PATIENCE = 3
"""So many Ctrl-C that nothing came of, and the next one raises KeyboardInterrupt: something hangs."""


class Interrupts:
    """While it is entered, SIGINT does not raise.

    Attributes:
        count: SIGINTs so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._act: Callable[[int], None] | None = None
        self._unheeded = 0
        self._armed = False

    def __enter__(self) -> Interrupts:
        mine = threading.current_thread() is threading.main_thread()
        if mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)
            self._armed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._armed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._armed = False

    @contextlib.contextmanager
    def passed_to(self, act: Callable[[int], None]) -> Iterator[None]:
        """Calls `act` with the count at each SIGINT, on the main thread between two bytecodes; at once if one came before."""
        self._act = act
        self._unheeded = 0
        try:
            if self.count:
                act(self.count)
            yield
        finally:
            self._act = None
            self._unheeded = 0

    def _interrupted(self, _signal: int, _frame: FrameType | None) -> None:
        self.count += 1
        self._unheeded += 1
        if self._unheeded > PATIENCE:
            raise KeyboardInterrupt
        if self._act is not None:
            self._act(self.count)
