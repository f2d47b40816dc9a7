"""The native calls for one peer: an engine and a daemon thread of its own, so that a frozen peer holds up nobody else.

Calls to one peer follow one another, since what they queue counts towards one limit; one call uses all connections to it. A
call that failed leaves its engine sending (see `native`), so the engine is ended first, and only then is the failure told. The
next call gets a fresh one, and with it fresh connections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np

from kvactors.core.store import Addresses
from kvactors.disagg.descriptors import Descriptors
from kvactors.disagg.transports.native import NativeEngine
from kvactors.errors import TransferFailedError
from kvactors.log import get_logger

log = get_logger("kvactors.transport")

MOST_RANGES = 1000
"""In one native call: beyond 1024, ranges wait for a place in the queue, and fail when they do not get it within a second."""

MOST_BYTES = 256 << 20
"""In one native call, unless one range is longer: it has 30 s, whatever the network does."""

RETRY_WITHIN_S = 0.5
"""A call that failed sooner than this, on connections that had worked, met some that were lost: a fresh engine tries once more.
One that failed later waited for a peer that may be frozen, and would again; one on fresh connections would fail again."""

SETTLE_S = 0.5
"""How long after a successful second try a write goes on: what the first one left in socket buffers lands meanwhile, so that
nothing lands after a write that ended well."""


class CallFailedError(Exception):
    """A native call answered an error; its engine was ended.

    Attributes:
        seconds: how long it took.
        worked: whether its engine had done a call before.
    """

    def __init__(self, seconds: float, worked: bool) -> None:
        self.seconds, self.worked = seconds, worked
        super().__init__(f"after {seconds:.1f} s")


class Job:
    """One write.

    Args:
        told: called once from the writer's thread, with the error or None, when nothing more is sent.

    Attributes:
        retries: calls that were made twice.
    """

    def __init__(self, descriptors: Descriptors, told: Callable[[TransferFailedError | None], None]) -> None:
        self.descriptors, self.told = descriptors, told
        self.stop = False
        self.retries = 0

    def end_soon(self) -> None:
        """From any thread: no further native call is begun."""
        self.stop = True


class PeerWriter:
    """Starts its thread at once, and its engine with the first job.

    Args:
        memory: the peer's, as the engine takes it.
        make: makes an engine; may raise any error of kvactors.

    Attributes:
        jobs: how many are queued or under way.
        ended: set when the thread is through: nothing is sent any more.
    """

    def __init__(self, memory: str, make: Callable[[], NativeEngine]) -> None:
        self.memory = memory
        self.jobs = 0
        self.ended = threading.Event()
        self._make = make
        self._engine: NativeEngine | None = None
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._work, name=f"kvactors to {memory}", daemon=True).start()

    def add(self, job: Job) -> None:
        with self._lock:
            self.jobs += 1
        self._queue.put(job)

    def end(self) -> None:
        """Ends engine and thread after the jobs that were added before."""
        self._queue.put(None)

    def _work(self) -> None:
        try:
            while (job := self._queue.get()) is not None:
                error: TransferFailedError | None = None
                try:
                    self._run(job)
                except TransferFailedError as failed:
                    error = failed
                except Exception as broken:  # of setting up an engine, of the native code, or out of memory
                    error = TransferFailedError(f"writing to {self.memory} failed: {broken!r}")
                with self._lock:
                    self.jobs -= 1
                job.told(error)
        finally:
            self._end_engine()
            self.ended.set()

    def _run(self, job: Job) -> None:
        for part in parts(job.descriptors.nbytes):
            if job.stop:
                raise TransferFailedError(f"stopped before descriptor {part.start} of {len(job.descriptors)} to {self.memory}")
            try:
                self._call(job.descriptors, part)
            except CallFailedError as failed:
                if job.stop or job.retries or failed.seconds > RETRY_WITHIN_S or not failed.worked:
                    raise self._failure(job, part, failed) from failed
                self._again(job, part)
        if job.retries:
            time.sleep(SETTLE_S)

    def _again(self, job: Job, part: slice) -> None:
        job.retries += 1
        log.info("connections were lost; a part of a write is sent again", memory=self.memory)
        try:
            self._call(job.descriptors, part)
        except CallFailedError as failed:
            raise self._failure(job, part, failed) from failed

    def _call(self, what: Descriptors, part: slice) -> None:
        """One native call. However it fails, its engine has ended by then."""
        arrived = False
        worked = self._engine is not None
        began = time.monotonic()
        try:
            if self._engine is None:
                self._engine = self._make()
            src, dst, nbytes = (array[part].tolist() for array in (what.src, what.dst, what.nbytes))
            arrived = self._engine.write(self.memory, src, dst, nbytes)
            seconds = time.monotonic() - began
        finally:
            if not arrived:
                self._end_engine()
        if not arrived:
            raise CallFailedError(seconds, worked)

    def _end_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.end()

    def _failure(self, job: Job, part: slice, failed: CallFailedError) -> TransferFailedError:
        which = f"descriptors {part.start} to {part.stop - 1} of {len(job.descriptors)}"
        return TransferFailedError(
            f"writing {which} to {self.memory} failed {failed}: the peer is gone, frozen, or has not registered the memory; "
            "see whether it lives, and its log"
        )


def parts(nbytes: Addresses) -> Iterator[slice]:
    """Cuts descriptors of these sizes into native calls."""
    ends = np.cumsum(nbytes)
    at, count = 0, len(nbytes)
    while at < count:
        begun = int(ends[at - 1]) if at else 0
        most = int(np.searchsorted(ends, begun + MOST_BYTES, side="right"))
        to = min(max(most, at + 1), at + MOST_RANGES, count)
        yield slice(at, to)
        at = to
