"""Workers of one process: bytes, refusals, and every misfortune that a test may arrange."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.disagg.descriptors import Descriptors
from kvactors.disagg.transports import Transport
from kvactors.disagg.transports.in_process import Fault, InProcessTransport, Network, Write
from kvactors.errors import (
    ConfigError,
    KVActorsError,
    StoreError,
    TransferFailedError,
    TransferPlanError,
    UnregisteredMemoryError,
)
from kvactors.simulate.loop import DeadlockError, VirtualLoop, run_virtual

NBYTES = 4096


class Pair:
    """A prefill and a decode worker, each with its memory."""

    def __init__(self, **options: Any) -> None:
        self.network = Network(**options)
        self.p, self.d = InProcessTransport(self.network), InProcessTransport(self.network)
        self.src = np.random.default_rng(0).integers(1, 250, NBYTES, np.uint8)
        self.dst = np.zeros(NBYTES, np.uint8)
        self.p.register(self.src.ctypes.data, NBYTES)
        self.d.register(self.dst.ctypes.data, NBYTES)

    def rows(self, *rows: tuple[int, int, int]) -> Descriptors:
        """(source offset, destination offset, bytes)."""
        table = np.array(rows, np.int64).reshape(-1, 3)
        return Descriptors(table[:, 0] + self.src.ctypes.data, table[:, 1] + self.dst.ctypes.data, table[:, 2].copy())

    def blocks(self, count: int = 4) -> Descriptors:
        return self.rows(*((i * 64, i * 64, 64) for i in range(count)))

    def write(self, descriptors: Descriptors | None = None) -> Coroutine[Any, Any, None]:
        return self.p.write(self.d.memory, self.blocks() if descriptors is None else descriptors)

    def landed(self) -> list[int]:
        """Which blocks have arrived, whole."""
        return [i for i in range(NBYTES // 64) if np.array_equal(*(a[i * 64 : i * 64 + 64] for a in (self.src, self.dst)))]


def virtual(main: Callable[[], Coroutine[Any, Any, None]], seed: int | None = None) -> float:
    """Runs it on virtual time; answers the seconds that passed."""
    loop = VirtualLoop(None if seed is None else random.Random(seed))
    run_virtual(main(), loop)
    return loop.time()


sizes = st.sampled_from([1, 3, 64, 64, 64, 100])


@given(st.lists(st.tuples(st.integers(0, NBYTES - 100), sizes), max_size=40), st.randoms(use_true_random=False))
def test_scattered_bytes_arrive_and_no_others(sources: list[tuple[int, int]], rng: random.Random) -> None:
    pair = Pair()
    rows = [(src, i * 100, size) for i, (src, size) in enumerate(sources)]
    rng.shuffle(rows)
    expected = np.zeros(NBYTES, np.uint8)
    for src, dst, size in rows:
        expected[dst : dst + size] = pair.src[src : src + size]

    virtual(lambda: pair.write(pair.rows(*rows)))
    assert np.array_equal(pair.dst, expected)
    counts = pair.p.counts
    assert (counts.writes, counts.descriptors, counts.nbytes) == (1, len(rows), sum(row[2] for row in rows))
    assert (counts.failures, pair.d.counts.writes) == (0, 0)


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        ([(0, 0, 64), (NBYTES - 10, 64, 11)], UnregisteredMemoryError, "descriptor 1: 11 bytes"),
        ([(-1, 0, 64)], UnregisteredMemoryError, "descriptor 0"),
        ([(0, 0, 0)], TransferPlanError, "a descriptor of 0 bytes"),
        ([(0, 0, 64), (64, NBYTES - 63, 64)], TransferFailedError, "descriptor 1: 64 bytes .* not registered by worker-1"),
        ([(0, -64, 64)], TransferFailedError, "descriptor 0"),
    ],
)
def test_what_is_not_registered_is_not_touched(rows: list[tuple[int, int, int]], error: type[KVActorsError], says: str) -> None:
    pair = Pair()
    with pytest.raises(error, match=says):
        virtual(lambda: pair.write(pair.rows(*rows)))
    assert not pair.dst.any()
    assert (pair.p.counts.writes, pair.p.counts.failures) == (0, 1)
    assert pair.network.under_way == []


def test_arrays_of_unequal_length() -> None:
    pair = Pair()
    blocks = pair.blocks()
    with pytest.raises(TransferPlanError, match="3 sources, 4 destinations and 4 sizes"):
        virtual(lambda: pair.write(Descriptors(blocks.src[1:], blocks.dst, blocks.nbytes)))


def test_registering() -> None:
    pair = Pair()
    with pytest.raises(StoreError, match="overlaps"):
        pair.p.register(pair.src.ctypes.data + 1, 1)
    pair.p.close()
    with pytest.raises(StoreError, match="was closed"):
        pair.p.register(1 << 20, 1)


def test_names() -> None:
    network = Network()
    ends: list[Transport] = [InProcessTransport(network), InProcessTransport(network, "d"), InProcessTransport(network)]
    assert [end.memory for end in ends] == ["worker-0", "d", "worker-2"]
    with pytest.raises(ConfigError, match="two workers are named 'd'"):
        InProcessTransport(network, "d")
    with pytest.raises(ConfigError):
        network.fail(0)


def test_a_strange_peer() -> None:
    pair = Pair()

    async def main() -> None:
        with pytest.raises(TransferFailedError, match="nobody is at 'x'"):
            await pair.p.write("x", pair.blocks())
        await pair.p.forget("x")

    virtual(main)


def test_nothing_to_write() -> None:
    pair = Pair()
    virtual(lambda: pair.write(pair.rows()))
    assert (pair.p.counts.writes, pair.network.writes) == (1, 0)


def test_a_held_write() -> None:
    """Nothing arrives before it is released; writes elsewhere go on."""
    pair = Pair()
    other = InProcessTransport(pair.network)
    memory = np.zeros(NBYTES, np.uint8)
    other.register(memory.ctypes.data, NBYTES)

    async def main() -> None:
        pair.network.hold(pair.d.memory)
        writing = asyncio.create_task(pair.write())
        await pair.network.until_under_way()
        elsewhere = pair.blocks()
        await pair.p.write(
            other.memory,
            Descriptors(elsewhere.src, elsewhere.dst - pair.dst.ctypes.data + memory.ctypes.data, elsewhere.nbytes),
        )
        assert memory.any()
        await asyncio.sleep(100)
        assert not writing.done()
        assert not pair.dst.any()
        pair.network.release(pair.d.memory)
        await writing
        assert pair.landed() == [0, 1, 2, 3]
        assert pair.p.counts.seconds == 100

    assert virtual(main) == 100


def test_holding_forever_is_found() -> None:
    pair = Pair()
    pair.network.hold()
    with pytest.raises(DeadlockError):
        virtual(pair.write)


@pytest.mark.parametrize(
    ("fault", "landed"), [(None, []), (Fault(), []), (Fault(landed=2), [0, 1]), (Fault(landed=9), [0, 1, 2, 3])]
)
def test_the_nth_write_fails(fault: Fault | None, landed: list[int]) -> None:
    pair = Pair()

    async def main() -> None:
        pair.network.fail(2, fault)
        await pair.write(pair.rows((0, 4000, 1)))
        with pytest.raises(TransferFailedError, match="write 2 from worker-0 to worker-1 failed, as arranged"):
            await pair.write()
        assert pair.landed() == landed
        await pair.write()
        assert pair.landed() == [0, 1, 2, 3]
        assert pair.network.deliver_late() == 0

    virtual(main)


@pytest.mark.parametrize(("end", "landed"), [("", [0, 1, 2, 3]), ("kill", [0]), ("close", [0])])
def test_late_bytes(end: str, landed: list[int]) -> None:
    """They are the source's when the write failed, and land only in memory that is still there."""
    pair = Pair(decide=lambda write: Fault(1, late=True) if write.number == 1 else None)

    async def main() -> None:
        with pytest.raises(TransferFailedError):
            await pair.write()
        assert pair.landed() == [0]
        kept = pair.src.copy()
        pair.src[:] = 255
        if end == "kill":
            pair.network.kill(pair.d.memory)
        elif end == "close":
            pair.d.close()
        assert pair.network.deliver_late() == len(landed) - 1
        pair.src[:] = kept
        assert pair.landed() == landed
        assert pair.network.deliver_late() == 0

    virtual(main)


def _kill_p(pair: Pair) -> None:
    pair.network.kill(pair.p.memory)


def _kill_d(pair: Pair) -> None:
    pair.network.kill(pair.d.memory)


def _close_p(pair: Pair) -> None:
    pair.p.close()


def _close_d(pair: Pair) -> None:
    pair.d.close()


ENDS = [
    (_kill_p, "worker-0 was killed"),
    (_kill_d, "worker-1 was killed"),
    (_close_p, "worker-0 was closed"),
    (_close_d, "worker-1 was closed"),
]


@pytest.mark.parametrize(("end", "says"), ENDS)
@pytest.mark.parametrize("held", [True, False])
def test_an_end_during_a_write(end: Callable[[Pair], None], says: str, held: bool) -> None:
    """It fails at once where it is held, else when its time is up; nothing arrives after the end, and nothing ever again."""
    pair = Pair(seconds=lambda _: 1.0)

    async def main() -> None:
        if held:
            pair.network.hold()
        writing = asyncio.create_task(pair.write())
        await asyncio.sleep(0.5)
        assert pair.landed() == ([] if held else [0, 1])
        end(pair)
        end(pair)
        for write in (writing, pair.write()):
            with pytest.raises(TransferFailedError, match=says):
                await write
        assert pair.landed() == ([] if held else [0, 1])

    assert virtual(main) == (0.5 if held else 1.0)


@pytest.mark.parametrize("held", [True, False])
def test_a_cancelled_write_goes_on_to_its_end(held: bool) -> None:
    pair = Pair(seconds=lambda _: 1.0)

    async def main() -> None:
        if held:
            pair.network.hold()
        writing = asyncio.create_task(pair.write())
        for _ in range(3):
            await asyncio.sleep(0.2)
            writing.cancel()
        await asyncio.sleep(0.2)
        assert not writing.done()
        pair.network.release()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert pair.landed() == [0, 1, 2, 3]
        assert (pair.p.counts.writes, pair.p.counts.failures) == (0, 1)

    assert virtual(main) == (1.8 if held else 1.0)


async def test_a_cancelled_write_that_fails_is_cancelled() -> None:
    pair = Pair()
    pair.network.fail(1)
    writing = asyncio.create_task(pair.write())
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert pair.network.under_way == []


@pytest.mark.parametrize("seed", range(5))
def test_what_becomes_of_a_write_is_decided_by_its_number(seed: int) -> None:
    """In whatever order a loop runs them, each write is asked about once."""
    seen: list[Write] = []

    def decide(write: Write) -> Fault | None:
        seen.append(write)
        return Fault() if write.number % 3 == 0 else None

    pair = Pair(decide=decide, seconds=lambda write: write.descriptors.total_bytes / 64)

    async def main() -> None:
        writes = [pair.write(pair.rows((64 * i, 64 * i, 64))) for i in range(9)]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert sum(isinstance(result, TransferFailedError) for result in results) == 3
        assert len(pair.landed()) == 6
        assert [write.number for write in seen] == list(range(1, 10))
        assert {(write.source, write.target) for write in seen} == {("worker-0", "worker-1")}

    assert virtual(main, seed) == 1.0
