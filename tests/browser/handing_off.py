"""A prefill and a decode worker of one process that hand requests over, without a model: for the dashboard's last row."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count

import numpy as np

from kvactors.disagg import Descriptors, TransferRegion, WorkerGeometry
from kvactors.disagg.blocks import GroupBlocks, RequestBlocks
from kvactors.disagg.transports.writing import WriteCounts
from kvactors.disagg.worker import HandoffConfig, HandoffWorker, OutcomeKind, Source
from kvactors.errors import TransferFailedError
from kvactors.live import Address, LiveView
from tests.disagg.shapes import BLOCKS, attention, worker

HEADS = 4096
BLOCK = 2 * 8 * HEADS
"""Bytes of a block."""

BLOCK_TOKENS = 16
FAILS = 1 / 40
"""Share of the writes that fail."""

PAUSE_S = (0.05, 0.8)
STEP_S = 0.1
PATIENCE = 200
"""How often STEP_S a hand-off may take."""


class Copier:
    """A transport within one process, whose writes fail now and then."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.memory = name
        self.counts = WriteCounts()
        self._chance = chance

    def register(self, address: int, nbytes: int) -> None: ...

    async def forget(self, memory: str) -> None: ...

    async def write(self, memory: str, descriptors: Descriptors) -> None:  # noqa: ARG002 - there is one memory
        if self._chance.random() < FAILS:
            raise TransferFailedError("drawn")
        for src, dst, n in zip(*(a.tolist() for a in (descriptors.src, descriptors.dst, descriptors.nbytes)), strict=True):
            ctypes.memmove(dst, src, n)

    def close(self) -> None: ...


def geometry(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> WorkerGeometry:
    region = TransferRegion("l0", 0, memory.ctypes.data, BLOCK, BLOCK // 2, 0, split_kv=True)
    return worker([attention(HEADS, HEADS)], [region])


class Pair:
    """A prefill worker and a decode worker, and what they have handed over."""

    def __init__(self, ends: ExitStack, seed: int) -> None:
        self.chance = random.Random(seed)
        self.memories = [np.zeros(BLOCKS * BLOCK, dtype=np.uint8) for _ in range(2)]
        ours, theirs = map(geometry, self.memories)
        config = HandoffConfig(bootstrap=("127.0.0.1", 0))
        self.p = HandoffWorker(config, ours, Copier("p", self.chance), engine_id="P", sends=True, receives=False)
        ends.callback(self.p.close)
        config = HandoffConfig()
        self.d = HandoffWorker(config, theirs, Copier("d", self.chance), engine_id="D", sends=False, receives=True)
        ends.callback(self.d.close)
        self.received_bytes = 0

    def hand_over(self, number: int) -> None:
        """A request of some blocks, to its end.

        Raises:
            TimeoutError: it takes too long.
        """
        blocks = self.chance.randrange(1, BLOCKS)
        asked = RequestBlocks(blocks * BLOCK_TOKENS, (GroupBlocks(0, tuple(range(1, blocks + 1))),))
        self.p.request(f"t{number}")
        self.p.prefilled(f"t{number}", asked)
        self.d.receive(f"r{number}", Source(f"t{number}", "P", self.p.bootstrap), asked)
        for _ in range(PATIENCE):
            for outcome in self.d.outcomes():
                if outcome.kind is OutcomeKind.LOADED:
                    self.received_bytes += blocks * BLOCK
                if not outcome.fenced:
                    self.p.freed()
                    return
            self.d.wait(STEP_S)
        raise TimeoutError(f"hand-off {number} does not end")

    def totals(self) -> Mapping[str, float]:
        sent, received = self.p.sent, self.d.received
        if sent is None or received is None:
            return {}
        return {
            "handoff_sent": sent.sends,
            "handoff_sent_bytes": sent.bytes,
            "handoff_expired": sent.expired,
            "handoff_received": received.loaded,
            "handoff_received_bytes": self.received_bytes,
            "handoff_failed": received.failed,
        }


@contextmanager
def handing_off(port: int, seed: int = 7) -> Iterator[None]:
    """Hands requests over until the context ends, with a live view at a port of 127.0.0.1."""
    over, errors = threading.Event(), list[BaseException]()
    with ExitStack() as ends:
        pair = Pair(ends, seed)
        ends.callback(LiveView(None, Address.of(f"127.0.0.1:{port}"), totals=pair.totals).close)

        def go() -> None:
            try:
                for number in count(1):
                    pair.hand_over(number)
                    if over.wait(pair.chance.uniform(*PAUSE_S)):
                        return
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=go, name="hands off")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
    if errors:
        raise errors[0]
