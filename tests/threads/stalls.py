"""Stops one thread at one line, until the others have done what they can: a schedule that chance hardly ever draws.

A race that one badly timed switch is enough for shows itself in such a schedule. So a scenario is played once for each line of
the engine that a thread runs in it, and judged each time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import pytest

import kvactors
from kvactors.engine import BlockingEngine

ROOT = Path(kvactors.__file__).parent
WATCHED = tuple(str(ROOT / folder) for folder in ("actors", "engine"))
QUIET_ROUNDS, MOST_ROUNDS, MOST_ROUNDS_INSIDE = 60, 3000, 300
"""Of the others: so many in which nothing changed; so many in all, and while one stands inside a lock."""

JOIN_S = 30.0

THREADS = {"compute": "MainThread", "worker": "kvactors worker", "loop": "kvactors loop"}
"""role -> how the names of its threads begin"""


class Point(NamedTuple):
    """The n-th time that a thread comes to a line."""

    file: str
    line: int
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, time {self.nth}"


class WatchedLock:
    """A lock that says which threads are inside a `with` of one (the others may not get on, then), and which wait for one to be
    released, with a deadline, as whoever waits for a latch does."""

    inside: ClassVar[Counter[int]] = Counter()
    waiting: ClassVar[Counter[int]] = Counter()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.release, self.locked = self._lock.release, self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        self.waiting[me] += timeout > 0
        try:
            return self._lock.acquire(blocking, timeout)
        finally:
            self.waiting[me] -= timeout > 0

    def __enter__(self) -> bool:
        self._lock.acquire()
        self.inside[threading.get_ident()] += 1
        return True

    def __exit__(self, *_: object) -> None:
        self.inside[threading.get_ident()] -= 1
        self._lock.release()


class WatchedThreading:
    """The module `threading`, with such locks."""

    Lock = WatchedLock

    @staticmethod
    def Condition() -> threading.Condition:
        return threading.Condition(WatchedLock())  # type: ignore[arg-type]  # it has what a condition needs

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class Stall:
    """Watches the threads of a role, and stops the first that comes to a point.

    Attributes:
        seen: how often each line was run; only without a point.
        hit: whether a thread came there, and stopped.
    """

    def __init__(self, role: str, at: Point | None = None) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()
        self.hit = False
        self.engine: BlockingEngine | None = None
        """once it is at work; nobody stops before"""
        self.meanwhile: Callable[[], object] | None = None
        """what another thread does once one has stopped, and before that goes on, if it can"""
        self._other: threading.Thread | None = None
        self._role, self._at, self._times = role, at, 0
        self._file = "" if at is None else str(ROOT / at.file)
        self._watching = True
        self._compute = threading.get_ident()
        self._counting = threading.Lock()

    @contextmanager
    def watching(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The caller is the compute thread; workers and loops are watched if they start in here."""
        with monkeypatch.context() as patch:
            for module in [m for name, m in sys.modules.items() if name.startswith("kvactors.actors.")]:
                if hasattr(module, "threading"):
                    patch.setattr(module, "threading", WatchedThreading())
            own, of_threads = sys.gettrace(), threading.gettrace()
            if self._role == "compute":
                sys.settrace(self._entered)
            else:
                threading.settrace(self._started)
            try:
                yield
            finally:
                with self._counting:
                    self._watching = False
                if self._other is not None:
                    self._other.join(JOIN_S)
                    assert not self._other.is_alive(), "what another thread did meanwhile does not end"
                if self._role == "compute":
                    sys.settrace(own)
                else:
                    threading.settrace(of_threads)  # type: ignore[arg-type]  # None takes it off

    def _started(self, frame: FrameType, event: str, argument: Any) -> Any:
        if threading.current_thread().name.startswith(THREADS[self._role]):
            sys.settrace(self._entered)
            return self._entered(frame, event, argument)
        sys.settrace(None)
        return None

    def _entered(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        file = frame.f_code.co_filename
        wanted = file.startswith(WATCHED) if self._at is None else file == self._file
        return self._ran if wanted and self._watching and not self.hit else None

    def _ran(self, frame: FrameType, event: str, _argument: Any) -> Any:
        engine = self.engine
        if event != "line" or engine is None:
            return self._ran
        if self._at is None:
            with self._counting:
                self.seen[frame.f_code.co_filename, frame.f_lineno] += 1
        elif frame.f_lineno == self._at.line:
            with self._counting:
                self._times += 1
                stop = self._watching and self._times == self._at.nth
                if stop:
                    self.hit = True
                if stop and self.meanwhile is not None:
                    other = threading.Thread(target=self.meanwhile, name="another")
                    other.start()
                    self._other = other  # only now: whoever sees it may join it
            if stop:
                if self._role == "loop":
                    self._until_compute_waits(engine)
                else:
                    self._until_actors_wait(engine)
        return self._ran

    def _until_actors_wait(self, engine: BlockingEngine) -> None:
        loop, thread, mailboxes = engine._loop, engine._thread, engine.inside().mailboxes
        quiet = threading.Event()

        def look(rounds: int, left: int) -> None:
            rounds = 0 if any(map(len, mailboxes)) else rounds + 1
            if rounds < QUIET_ROUNDS and left:
                loop.call_soon(look, rounds, left - 1)
            else:
                quiet.set()

        inside = WatchedLock.inside[threading.get_ident()]
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(look, 0, MOST_ROUNDS)
            for _ in range(MOST_ROUNDS_INSIDE if inside else MOST_ROUNDS):
                if (quiet.is_set() or not thread.is_alive()) and self._other_rests():
                    break
                time.sleep(0)  # lets go of the interpreter

    def _other_rests(self) -> bool:
        """Whether what another thread does meanwhile is done, or waits."""
        other = self._other
        return other is None or not other.is_alive() or WatchedLock.waiting[other.ident or 0] > 0

    def _until_compute_waits(self, engine: BlockingEngine) -> None:
        inside = WatchedLock.inside[threading.get_ident()]
        pool, rounds = engine.inside().pool, 0
        for _ in range(MOST_ROUNDS_INSIDE if inside else MOST_ROUNDS):
            rounds = rounds + 1 if WatchedLock.waiting[self._compute] and not pool._running else 0
            if rounds == QUIET_ROUNDS:
                break
            time.sleep(0)  # as above


def points(seen: Counter[tuple[str, int]], role: str) -> Iterator[Point]:
    """Each line the first time that it is run, and the last; of the loop's, which are most, half-way between; of the caller's,
    which are few, the second time too."""
    for (file, line), count in sorted(seen.items()):
        times = {1, 2, count} if role == "compute" else {1, count}
        for nth in [(1 + count) // 2] if role == "loop" else sorted(n for n in times if n <= count):
            yield Point(str(Path(file).relative_to(ROOT)), line, nth)


def explore(role: str, play: Callable[[Stall], None]) -> int:
    """Plays a scenario once for each point of the threads of a role. Returns at how many of them one stopped."""
    watch = Stall(role)
    play(watch)
    stopped = 0
    for point in points(watch.seen, role):
        stall = Stall(role, point)
        try:
            play(stall)
        except BaseException as e:
            e.add_note(f"the {role} thread stopped at {point}")
            raise
        stopped += stall.hit
    return stopped
