"""Ctrl-C and requests to end while a replay runs: counted, passed on to whoever can stop, and never raised into what must be
finished."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

PATIENCE = 3
"""So many signals that nothing came of, and the next one raises KeyboardInterrupt: something hangs."""

_UNTOUCHED: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""How each signal is handled if nobody has changed that: only then it is taken over (`nohup` ignores SIGHUP, for one)."""


class Interrupts:
    """While it is entered, SIGINT does not raise, and neither SIGTERM nor SIGHUP ends the process: all are counted alike.

    Attributes:
        count: signals so far.
        hopeless: more came than `PATIENCE` allows, and nothing was done about them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.hopeless = False
        self._first = signal.SIGINT
        self._act: Callable[[int], object] | None = None
        self._unheeded = 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """What the process should exit with: 128 + the number of the first signal."""
        return 128 + self._first

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, untouched in _UNTOUCHED.items():
                if signal.getsignal(number) == untouched:
                    self._before[number] = signal.signal(number, self._interrupted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    @contextlib.contextmanager
    def passed_to(self, act: Callable[[int], object], *, only_further: bool = False) -> Iterator[None]:
        """Calls `act` with the count at each signal, on the main thread between two bytecodes; at once if one came before,
        unless it is for `only_further` ones."""
        self._act = act
        self._unheeded = 0
        try:
            if self.count and not only_further:
                act(self.count)
            yield
        finally:
            self._act = None
            self._unheeded = 0

    def _interrupted(self, number: int, _frame: FrameType | None) -> None:
        if not self.count:
            self._first = signal.Signals(number)
        self.count += 1
        self._unheeded += 1
        if self._unheeded > PATIENCE:
            self.hopeless = True
            raise KeyboardInterrupt
        if self._act is not None:
            self._act(self.count)
