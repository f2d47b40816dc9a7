"""Mooncake's TransferEngine as a transport.

One engine receives, for as long as the worker lives; each peer that is written to has a sending engine of its own (see `writer`
and `native` for why, and for what was measured).

What a caller may rely on, measured over TCP on one machine with version 0.3.13:

* A write that returned has arrived.
* A killed peer fails a write within milliseconds to about a second, a frozen one after `MC_TRANSFER_TIMEOUT` (30 s) or
  `MC_TCP_PROGRESS_TIMEOUT_SEC`. With a fresh engine, that is at the first write and after each error, a frozen peer fails it
  after 60 s: nothing that is set shortens that. A frozen peer that is killed fails it at once.
* After a write raised, only what the sockets of its (four) connections hold can land: of 64 MiB 3.9 MB, of 16 x 4 MiB 15.7 MB,
  of 1000 x 4 KiB one range for each connection. It landed within 12 ms of the peer's waking up, and nothing in the 3 s after.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict

from kvactors.actors.loops import call_on
from kvactors.disagg.descriptors import Descriptors
from kvactors.disagg.transports.native import NativeEngine, transfer_engine_class
from kvactors.disagg.transports.writer import Job, PeerWriter
from kvactors.disagg.transports.writing import WriteCounts, require_writable, to_its_end
from kvactors.errors import StoreError, TransferFailedError
from kvactors.log import get_logger
from kvactors.stores.regions import Regions

log = get_logger("kvactors.transport")

MOST_PEERS = 64
"""Peers with a sending engine at the same time: each takes two ports, three threads and four connections. Beyond it the one
that was not written to for the longest is let go."""


class MooncakeTransport:
    """A `Transport`. `register` before peers learn of `memory`: they may keep what they saw of it.

    Args:
        host: under which peers reach this worker: a name or an address of this machine.
        protocol: "tcp"; "rdma" and others are handed on as they are, and were not measured.
        device: names of network devices, comma-separated; empty: the engine chooses.
        close_deadline_s: how long `close` waits for native calls under way, which nothing can break off.

    Attributes:
        counts: what was written.

    Raises:
        ConfigError: the package is missing, or the engine cannot be set up so.
    """

    def __init__(self, host: str, protocol: str = "tcp", device: str = "", *, close_deadline_s: float = 5.0) -> None:
        transfer_engine_class()
        self._where = (host, protocol, device)
        self._close_deadline_s = close_deadline_s
        self._receiver = NativeEngine(*self._where)
        self.memory = f"{host}:{self._receiver.port}"
        self.counts = WriteCounts()
        self._regions = Regions()
        self._known: dict[int, int] = {}
        self._writers: OrderedDict[str, PeerWriter] = OrderedDict()
        self._leaving: list[PeerWriter] = []
        self._jobs: set[Job] = set()
        self._lock = threading.Lock()
        self._wrote = self._closed = False

    def register(self, address: int, nbytes: int) -> None:
        """See `Transport.register`. Over anything but TCP, StoreError also once something was written."""
        with self._lock:
            if self._closed:
                raise StoreError("register: the transport was closed; make another")
            if self._wrote and self._where[1] != "tcp":
                raise StoreError(
                    f"register: {self._where[1]} engines have the memory as it was at the first write; register before"
                )
            regions = self._regions.with_region(address, nbytes)
            self._receiver.register([address], [nbytes])
            self._regions = regions
            self._known[address] = nbytes

    async def write(self, memory: str, descriptors: Descriptors) -> None:
        """See `Transport.write`. Cancelled, it begins no further native call, and waits for the one under way.

        Raises:
            TransferFailedError: it failed, or the transport was closed.
            UnregisteredMemoryError: a source is not registered; nothing was sent.
            TransferPlanError: the arrays do not fit each other, or a size is below 1; nothing was sent.
        """
        with self.counts.counting(descriptors, time.monotonic):
            require_writable(descriptors, self._regions)
            if len(descriptors):
                await self._write(memory, descriptors)

    async def _write(self, memory: str, descriptors: Descriptors) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[TransferFailedError | None] = loop.create_future()

        def told(error: TransferFailedError | None) -> None:
            call_on(loop, ended.set_result, error)

        job = Job(descriptors, told)
        with self._lock:
            if self._closed:
                raise TransferFailedError("the transport was closed; nothing was sent")
            self._writer(memory).add(job)
            self._jobs.add(job)
            self._wrote = True
        try:
            failed = await to_its_end(ended, job.end_soon)
        finally:
            with self._lock:
                self._jobs.discard(job)
            self.counts.retries += job.retries
        if failed is not None:
            raise failed

    async def forget(self, memory: str) -> None:
        """See `Transport.forget`: ends the sending engine, after writes under way. Never raises."""
        with self._lock:
            if memory in self._writers:
                self._let_go(memory)

    def close(self) -> None:
        """See `Transport.close`. Blocks for what `end` of the engines takes, a fraction of a second each.

        A native call that is under way after `close_deadline_s` goes on to its end on its own thread, and with it its `write`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for job in self._jobs:
                job.end_soon()
            for memory in list(self._writers):
                self._let_go(memory)
            writers = self._leaving
        deadline = time.monotonic() + self._close_deadline_s
        for writer in writers:
            if not writer.ended.wait(max(0.0, deadline - time.monotonic())):
                log.warning("closed while a native write is under way", memory=writer.memory)
        self._receiver.end()

    def _writer(self, memory: str) -> PeerWriter:
        """Under the lock."""
        writer = self._writers.get(memory)
        if writer is None:
            self._make_room()
            writer = self._writers[memory] = PeerWriter(memory, self._sending_engine)
        self._writers.move_to_end(memory)
        return writer

    def _make_room(self) -> None:
        while len(self._writers) >= MOST_PEERS:
            idle = next((m for m, writer in self._writers.items() if not writer.jobs), None)
            if idle is None:
                raise TransferFailedError(f"writes to {MOST_PEERS} peers are under way; send to fewer at the same time")
            self._let_go(idle)

    def _let_go(self, memory: str) -> None:
        """Under the lock."""
        writer = self._writers.pop(memory)
        writer.end()
        self._leaving = [*(w for w in self._leaving if not w.ended.is_set()), writer]

    def _sending_engine(self) -> NativeEngine:
        """On a writer's thread. Over TCP a source need not be registered, and what is not registered no peer can write to."""
        engine = NativeEngine(*self._where)
        if self._where[1] != "tcp":
            with self._lock:
                known = dict(self._known)
            try:
                engine.register(list(known), list(known.values()))
            except StoreError:
                engine.end()
                raise
        return engine
