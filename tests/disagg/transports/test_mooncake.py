"""Mooncake's TransferEngine between this process and peers in processes of their own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvactors.core.store import Addresses
from kvactors.disagg.descriptors import Descriptors
from kvactors.disagg.transports.mooncake import MooncakeTransport
from kvactors.disagg.transports.native import transfer_engine_class
from kvactors.disagg.transports.writing import WriteCounts
from kvactors.errors import ConfigError, StoreError, TransferFailedError, TransferPlanError, UnregisteredMemoryError
from tests.disagg.transports.peer_process import ROOT, PeerProcess

MIB = 1 << 20
SOURCE_BYTES = 32 * MIB


def _problem() -> str:
    try:
        transfer_engine_class()
    except ConfigError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.mooncake, pytest.mark.skipif(bool(_problem()), reason=_problem() or "-")]

Source = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def source() -> Source:
    return np.random.default_rng(1).integers(1, 200, SOURCE_BYTES, np.uint8)


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    """One that stays alive; its memory is as large as the source."""
    with PeerProcess(SOURCE_BYTES) as peer:
        yield peer


@pytest.fixture(scope="module")
def shared_transport(source: Source) -> Iterator[MooncakeTransport]:
    """Of all tests that do not close it: an engine takes a second to end in its first second."""
    transport = opened(source)
    yield transport
    transport.close()


@pytest.fixture
def transport(shared_transport: MooncakeTransport) -> MooncakeTransport:
    shared_transport.counts = WriteCounts()
    return shared_transport


def opened(source: Source) -> MooncakeTransport:
    transport = MooncakeTransport("127.0.0.1")
    transport.register(source.ctypes.data, source.nbytes)
    return transport


def rows(source: Source, peer: PeerProcess, src: list[int], dst: list[int], nbytes: list[int]) -> Descriptors:
    """Offsets as addresses."""
    return Descriptors(
        np.array(src, np.int64) + source.ctypes.data, np.array(dst, np.int64) + peer.address, np.array(nbytes, np.int64)
    )


def blocks(source: Source, peer: PeerProcess, count: int, size: int) -> Descriptors:
    """The first `count` blocks of `size` bytes, each to the place with the same number."""
    at = [i * size for i in range(count)]
    return rows(source, peer, at, at, [size] * count)


def scattered(rng: np.random.Generator, count: int) -> tuple[Addresses, Addresses, Addresses]:
    """Random sizes; sources anywhere, destinations apart from each other and in random order."""
    nbytes = rng.integers(1, 3 * SOURCE_BYTES // (4 * count), count)
    gaps = rng.integers(0, SOURCE_BYTES // (4 * count), count)
    dst = np.cumsum(nbytes + gaps) - nbytes
    order = rng.permutation(count)
    src = rng.integers(0, SOURCE_BYTES - nbytes.max(), count)
    return src[order], dst[order], nbytes[order]


async def until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    """What another process does cannot be awaited."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("seed", "count"), [(1, 1), (2, 7), (3, 300), (4, 5000)])
async def test_scattered_bytes_arrive_and_no_others(
    transport: MooncakeTransport, source: Source, peer: PeerProcess, seed: int, count: int
) -> None:
    src, dst, nbytes = scattered(np.random.default_rng(seed), count)
    peer.bytes[:] = 0
    expected = np.zeros_like(peer.bytes)
    for s, d, n in zip(src.tolist(), dst.tolist(), nbytes.tolist(), strict=True):
        expected[d : d + n] = source[s : s + n]
    await transport.write(peer.memory, rows(source, peer, src.tolist(), dst.tolist(), nbytes.tolist()))
    assert np.array_equal(peer.bytes, expected)
    assert (transport.counts.writes, transport.counts.descriptors) == (1, count)
    assert transport.counts.nbytes == int(nbytes.sum())
    assert transport.counts.seconds > 0


async def test_writes_to_two_peers_at_the_same_time(transport: MooncakeTransport, source: Source, peer: PeerProcess) -> None:
    with PeerProcess(8 * MIB) as other:
        peer.bytes[:] = 0
        writes = [(p, blocks(source, p, 500, 16 << 10)) for p in (peer, other) for _ in range(3)]
        await asyncio.gather(*(transport.write(p.memory, d) for p, d in writes))
        for p in (peer, other):
            assert np.array_equal(p.bytes[: 500 << 14], source[: 500 << 14])
        assert transport.counts.writes == 6


async def test_nothing_to_write_asks_nobody(transport: MooncakeTransport) -> None:
    none = np.empty(0, np.int64)
    await transport.write("127.0.0.1:1", Descriptors(none, none, none))
    assert transport.counts.writes == 1


@pytest.mark.parametrize(
    ("src", "nbytes", "error"),
    [
        ([0, SOURCE_BYTES - 10], [10, 11], UnregisteredMemoryError),
        ([-1], [1], UnregisteredMemoryError),
        ([0], [0], TransferPlanError),
        ([0], [-5], TransferPlanError),
        ([0, 1], [1], TransferPlanError),
    ],
)
async def test_what_makes_no_sense_is_refused_and_nothing_sent(
    transport: MooncakeTransport, source: Source, peer: PeerProcess, src: list[int], nbytes: list[int], error: type[Exception]
) -> None:
    peer.bytes[:] = 0
    with pytest.raises(error):
        await transport.write(peer.memory, rows(source, peer, src, [0] * len(src), nbytes))
    assert not peer.bytes.any()
    assert transport.counts.failures == 1


def test_a_range_is_registered_once(transport: MooncakeTransport, source: Source) -> None:
    for address, nbytes in ((source.ctypes.data, source.nbytes), (source.ctypes.data + 5, 1)):
        with pytest.raises(StoreError, match="overlaps"):
            transport.register(address, nbytes)


async def test_memory_that_the_peer_has_not_registered(transport: MooncakeTransport, source: Source, peer: PeerProcess) -> None:
    """One bad address among many: what was queued beside it is not sent once the error is told."""
    peer.bytes[:] = 0
    many = blocks(source, peer, 500, 64 << 10)
    many.dst[0] = peer.address + SOURCE_BYTES + (1 << 40)
    with pytest.raises(TransferFailedError):
        await transport.write(peer.memory, many)
    landed = int(np.count_nonzero(peer.bytes))
    kept = source.copy()
    source[:] = 255
    try:
        await asyncio.sleep(0.2)
        assert int(np.count_nonzero(peer.bytes)) >= landed
        assert not (peer.bytes == 255).any()
    finally:
        source[:] = kept
    await transport.write(peer.memory, blocks(source, peer, 10, 4096))
    assert np.array_equal(peer.bytes[:40960], source[:40960])


async def test_a_killed_peer_fails_its_writes_only(transport: MooncakeTransport, source: Source, peer: PeerProcess) -> None:
    with PeerProcess() as victim:
        await transport.write(victim.memory, blocks(source, victim, 10, 4096))
        victim.kill()
        began = time.monotonic()
        dead, alive = await asyncio.gather(
            transport.write(victim.memory, blocks(source, victim, 10, 4096)),
            transport.write(peer.memory, blocks(source, peer, 10, 4096)),
            return_exceptions=True,
        )
    assert isinstance(dead, TransferFailedError)
    assert alive is None
    assert time.monotonic() - began < 15
    await transport.forget(victim.memory)
    await transport.forget(victim.memory)


@pytest.mark.parametrize(("variable", "frozen_s"), [("MC_TCP_PROGRESS_TIMEOUT_SEC", 2), ("MC_TRANSFER_TIMEOUT", 5)])
async def test_after_an_error_nothing_is_sent_but_what_is_on_its_way(
    transport: MooncakeTransport,
    source: Source,
    peer: PeerProcess,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    frozen_s: float,
) -> None:
    """A frozen peer: the write fails, the source is used for something else, the peer wakes up."""
    monkeypatch.setenv(variable, str(frozen_s))
    with PeerProcess(16 * MIB) as frozen:
        await transport.write(frozen.memory, blocks(source, frozen, 1, 64))
        frozen.bytes[:] = 0
        frozen.freeze()
        writing = asyncio.create_task(transport.write(frozen.memory, blocks(source, frozen, 2000, 4096)))
        began = time.monotonic()
        await transport.write(peer.memory, blocks(source, peer, 1000, 4096))  # others go on
        assert not writing.done()
        with pytest.raises(TransferFailedError, match="frozen"):
            await writing
        assert frozen_s - 0.5 < time.monotonic() - began < frozen_s + 15
        assert not frozen.bytes.any()
        kept = source.copy()
        source[:] = 255
        frozen.thaw()
        try:
            await until(frozen.bytes.any)
            await asyncio.sleep(0.5)
            late = int(np.count_nonzero(frozen.bytes))
            assert late < 64 << 10  # one range for each connection
            assert not (frozen.bytes == 255).any()
        finally:
            source[:] = kept
        await transport.write(frozen.memory, blocks(source, frozen, 2000, 4096))
        assert np.array_equal(frozen.bytes[: 2000 << 12], source[: 2000 << 12])


async def test_lost_connections_are_made_again_within_the_write(
    transport: MooncakeTransport, source: Source, peer: PeerProcess
) -> None:
    await transport.write(peer.memory, blocks(source, peer, 100, 4096))
    assert peer.lose_connections() > 0
    peer.bytes[:] = 0
    await transport.write(peer.memory, blocks(source, peer, 1500, 4096))
    assert np.array_equal(peer.bytes[: 1500 << 12], source[: 1500 << 12])
    assert transport.counts.retries == 1
    assert transport.counts.failures == 0


async def test_a_cancelled_write_ends_before_it_is_cancelled(
    transport: MooncakeTransport, source: Source, peer: PeerProcess
) -> None:
    peer.bytes[:] = 0
    writing = asyncio.create_task(transport.write(peer.memory, blocks(source, peer, 32000, 1024)))
    await until(peer.bytes.any)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    landed = peer.bytes.copy()
    assert np.count_nonzero(landed) < 32000 << 10
    await asyncio.sleep(0.2)
    assert np.array_equal(peer.bytes, landed)


async def test_closing_during_a_write(source: Source, peer: PeerProcess) -> None:
    transport = opened(source)
    peer.bytes[:] = 0
    writing = asyncio.create_task(transport.write(peer.memory, blocks(source, peer, 32000, 1024)))
    await until(peer.bytes.any)
    transport.close()
    landed = peer.bytes.copy()
    with pytest.raises(TransferFailedError):
        await writing
    assert np.array_equal(peer.bytes, landed)
    transport.close()
    with pytest.raises(TransferFailedError, match="closed"):
        await transport.write(peer.memory, blocks(source, peer, 1, 1))
    with pytest.raises(StoreError, match="closed"):
        transport.register(1 << 20, 1)


async def test_nothing_is_written_into_a_closed_end(transport: MooncakeTransport, source: Source) -> None:
    with PeerProcess(SOURCE_BYTES) as closed:

        async def write_until_it_fails() -> None:
            while True:
                await transport.write(closed.memory, blocks(source, closed, 8000, 4096))

        writing = asyncio.create_task(write_until_it_fails())
        await until(closed.bytes.any)
        await asyncio.to_thread(closed.close_transport)
        closed.bytes[:] = 0
        with pytest.raises(TransferFailedError):
            await writing
        assert not closed.bytes.any()


def test_a_process_ends_with_a_write_under_way() -> None:
    """Nothing joins the writer's thread: the peer is frozen, the write hangs, the process ends at once and well."""
    program = """
import asyncio, sys
import numpy as np
from kvactors.disagg.descriptors import Descriptors
from kvactors.disagg.transports.mooncake import MooncakeTransport
memory, address = sys.argv[1], int(sys.argv[2])
source = np.ones(4096, np.uint8)
transport = MooncakeTransport("127.0.0.1")
transport.register(source.ctypes.data, 4096)
what = Descriptors(*(np.array([n], np.int64) for n in (source.ctypes.data, address, 4096)))
loop = asyncio.new_event_loop()
loop.run_until_complete(transport.write(memory, what))
print("frozen?", flush=True)
sys.stdin.readline()
task = loop.create_task(transport.write(memory, what))
loop.run_until_complete(asyncio.sleep(0.3))
assert not task.done()
print("ends", flush=True)
sys.stdout.close()
import os
raise SystemExit(7)
"""
    with PeerProcess() as peer:
        process = subprocess.Popen(
            [sys.executable, "-c", program, peer.memory, str(peer.address)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "frozen?\n"
        peer.freeze()
        _, errors = process.communicate("yes\n", timeout=20)
        assert process.returncode == 7, errors
