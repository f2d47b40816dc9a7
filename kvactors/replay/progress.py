"""Progress of a run: a live bar on a terminal, a plain line now and then otherwise."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvactors.core.clock import Clock
from kvactors.replay.tally import Tally

PLAIN_EVERY_S = 10.0
LIVE_EVERY_S = 0.1


class ShowsProgress(Protocol):
    def update(self, tally: Tally) -> None: ...
    def __enter__(self) -> ShowsProgress: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def progress_for(console: Console, total: int, clock: Clock, *, plain: bool = False) -> ShowsProgress:
    """The right display for where the console writes to; plain lines in any case with `plain`."""
    live = console.is_terminal and not console.is_dumb_terminal and not plain
    return LiveProgress(console, total, clock) if live else PlainProgress(console, total, clock)


def _rates(tally: Tally, elapsed_s: float) -> str:
    elapsed_s = max(elapsed_s, 1e-9)
    ratio = tally.hit_tokens / tally.input_tokens if tally.input_tokens else 0.0
    done = tally.completed + tally.failed
    return f"{done / elapsed_s:,.0f} req/s  {tally.input_tokens / elapsed_s:,.0f} tok/s  hit {ratio:.1%}"


class LiveProgress:
    """A rich bar with rates, redrawn at most ten times a second."""

    def __init__(self, console: Console, total: int, clock: Clock) -> None:
        self._clock, self._start, self._last = clock, clock.now(), -1.0
        self._bar = Progress(
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("replay", total=total, rates="")

    def update(self, tally: Tally) -> None:
        now = self._clock.now()
        if now - self._last < LIVE_EVERY_S:
            return
        self._last = now
        self._bar.update(self._task, completed=tally.completed + tally.failed, rates=_rates(tally, now - self._start))

    def __enter__(self) -> LiveProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()


class PlainProgress:
    """A line when the first step is done, then one every ten seconds."""

    def __init__(self, console: Console, total: int, clock: Clock) -> None:
        self._console, self._total, self._clock = console, total, clock
        self._start = self._last = clock.now()
        self._begun = False

    def update(self, tally: Tally) -> None:
        now = self._clock.now()
        if not self._begun:
            self._begun = True
            self._console.print(f"replaying {self._total:,} requests")
        if now - self._last < PLAIN_EVERY_S:
            return
        self._last = now
        done = tally.completed + tally.failed
        self._console.print(f"{done:,} of {self._total:,} requests  {_rates(tally, now - self._start)}")

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass
