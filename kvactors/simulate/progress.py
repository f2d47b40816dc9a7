"""One line on a terminal that says how far a simulation is; nothing anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from kvactors.console import plain_console
from kvactors.simulate.run import Totals

EVERY_S = 0.1
"""How often the line is written, seconds."""

_CLEAR = "\r\x1b[K"


class Progress:
    """Keeps one line on `stream` up to date; it is taken away before anything else is printed.

    No thread of its own, because `--jobs` forks. Args: `stream` None = shows nothing; `total`: seeds; `now`: a clock, seconds.
    """

    def __init__(self, stream: TextIO | None, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._total, self._now = stream, total, now
        self._last_s = now() - EVERY_S
        self._columns = 0 if stream is None else plain_console(stderr=True).width

    def update(self, totals: Totals) -> None:
        """Shows how many seeds are done; at most ten times a second."""
        if self._stream is None or self._now() - self._last_s < EVERY_S:
            return
        self._last_s = self._now()
        self._write(_CLEAR + progress_line(totals, self._total)[: self._columns - 1])

    def say(self, text: str) -> None:
        """Prints a line on standard output."""
        self.clear()
        print(text, flush=True)

    def clear(self) -> None:
        """Takes the line away."""
        self._write(_CLEAR)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


def progress_line(totals: Totals, total: int) -> str:
    """How far a simulation of that many seeds is."""
    rate = totals.seeds / max(totals.wall_s, 1e-9)
    left_s = (total - totals.seeds) / rate if totals.seeds else 0.0
    return f"{totals.seeds:,} of {total:,} seeds, {totals.failing:,} failing, {rate:.0f} seeds/s, {left_s:.0f} s left"


@contextmanager
def progress_for(total: int, *, quiet: bool) -> Iterator[Progress]:
    """The progress of that many seeds on standard error, where that is a terminal that can move its cursor, unless `quiet`."""
    console = plain_console(stderr=True)
    shown = console.is_terminal and not console.is_dumb_terminal and not quiet
    progress = Progress(sys.stderr if shown else None, total)
    try:
        yield progress
    finally:
        progress.clear()
