"""Where a replay's "compute" runs: a thread of its own when live, so that the engine's loop stays free.

Another implementation may run it under a virtual clock; the player knows only the protocol.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from kvactors.actors.loops import call_on
from kvactors.core.clock import Clock

T = TypeVar("T")


class Computed(NamedTuple):
    """What a piece of compute answered, and when it ran (clock seconds)."""

    mismatched_bytes: int
    start_s: float
    end_s: float


class Compute(Protocol):
    every_layer: bool
    """whether a layer takes time even if no block of it is to be filled or compared"""

    async def run(self, work: Callable[[], int]) -> Computed:
        """Runs `work` off the loop and answers when it is done; an exception of `work` is raised here."""
        ...

    def close(self) -> None: ...


class ThreadCompute:
    """One daemon thread that computes, in order. Used from one event loop."""

    every_layer = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work: queue.SimpleQueue[tuple[Callable[[], int], asyncio.Future[Computed]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="kvactors-compute", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], int]) -> Computed:
        future: asyncio.Future[Computed] = asyncio.get_running_loop().create_future()
        self._work.put((work, future))
        return await future

    def close(self) -> None:
        """Ends the thread once its work in hand is done."""
        self._work.put(None)
        self._thread.join(timeout=5.0)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            start = self._clock.now()
            try:
                answer = Computed(work(), start, self._clock.now())
            except BaseException as error:
                _post(future, None, error)
            else:
                _post(future, answer, None)


def _post(future: asyncio.Future[Computed], answer: Computed | None, error: BaseException | None) -> None:
    def land() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        elif answer is not None:
            future.set_result(answer)

    call_on(future.get_loop(), land)
