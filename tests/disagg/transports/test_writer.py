"""The sending side of `MooncakeTransport` over engines that do as they are told: when one is made, used again and ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from kvactors.disagg.descriptors import Descriptors
from kvactors.disagg.transports import mooncake, writer
from kvactors.disagg.transports.mooncake import MooncakeTransport
from kvactors.disagg.transports.writer import MOST_RANGES
from kvactors.errors import ConfigError, StoreError, TransferFailedError

ADDRESS, NBYTES = 1 << 20, 1 << 20

WAIT_S = 10.0


class Engines:
    """Makes engines, and remembers what they were asked.

    Attributes:
        events: "make 1", "write 1 to x: 1000", "end 1", …; engine 0 receives.
        answers: of the next calls; True when there are none left. An exception is raised.
        gate: calls wait until it is set, those to `frozen` or all.
        made_wrong: raised by the next engine that is made.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.answers: list[Any] = []
        self.gate, self.in_call = threading.Event(), threading.Event()
        self.gate.set()
        self.frozen: str | None = None
        self.made_wrong: Exception | None = None
        self.registered: list[list[int]] = []
        self.made = 0

    def __call__(self, *_: str) -> FakeEngine:
        if self.made_wrong is not None:
            raise self.made_wrong
        self.made += 1
        return FakeEngine(self, self.made - 1)


class FakeEngine:
    def __init__(self, all_: Engines, number: int) -> None:
        self._all, self._number, self.port = all_, number, 9000 + number
        all_.events.append(f"make {number}")

    def register(self, addresses: list[int], sizes: list[int]) -> None:  # noqa: ARG002
        self._all.registered.append(list(addresses))

    def write(self, memory: str, src: list[int], dst: list[int], nbytes: list[int]) -> bool:  # noqa: ARG002
        self._all.in_call.set()
        if self._all.frozen in (None, memory):
            assert self._all.gate.wait(WAIT_S)
        self._all.events.append(f"write {self._number} to {memory}: {len(src)}")
        answer = self._all.answers.pop(0) if self._all.answers else True
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    def end(self) -> None:
        self._all.events.append(f"end {self._number}")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    engines = Engines()
    monkeypatch.setattr(mooncake, "NativeEngine", engines)
    monkeypatch.setattr(mooncake, "transfer_engine_class", lambda: None)
    monkeypatch.setattr(writer, "SETTLE_S", 0.0)
    yield engines
    engines.gate.set()


Open = Callable[..., MooncakeTransport]


@pytest.fixture
def opened(engines: Engines) -> Iterator[Open]:  # noqa: ARG001 - first
    made: list[MooncakeTransport] = []

    def make(**options: Any) -> MooncakeTransport:
        made.append(MooncakeTransport("h", **options))
        made[-1].register(ADDRESS, NBYTES)
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def rows(count: int = 1) -> Descriptors:
    at = np.arange(count, dtype=np.int64)
    return Descriptors(at + ADDRESS, at, np.ones(count, np.int64))


async def in_call(engines: Engines) -> None:
    assert await asyncio.to_thread(engines.in_call.wait, WAIT_S)


async def test_an_engine_serves_one_peer_until_a_call_fails(engines: Engines, opened: Open) -> None:
    transport = opened()
    assert transport.memory == "h:9000"
    await transport.write("x", rows(MOST_RANGES + 1))
    await transport.write("y", rows())
    await transport.write("x", rows())
    transport.close()
    assert engines.events[:7] == [
        "make 0", "make 1", f"write 1 to x: {MOST_RANGES}", "write 1 to x: 1", "make 2", "write 2 to y: 1", "write 1 to x: 1",
    ]  # fmt: skip
    assert sorted(engines.events[7:9]) == ["end 1", "end 2"]
    assert engines.events[9:] == ["end 0"]
    assert engines.registered == [[ADDRESS]]


@pytest.mark.parametrize(
    ("before", "answers", "fails", "events"),
    [
        pytest.param(0, [False], True, ["make 1", "write", "end 1"], id="fresh connections failed"),
        pytest.param(1, [False], False, ["write", "end 1", "make 2", "write"], id="lost connections"),
        pytest.param(1, [False, False], True, ["write", "end 1", "make 2", "write", "end 2"], id="a dead peer"),
        pytest.param(1, [RuntimeError("native")], True, ["write", "end 1"], id="the native code raised"),
        pytest.param(1, [TypeError("-1")], True, ["write", "end 1"], id="it does not take these numbers"),
    ],
)
async def test_an_engine_ends_before_its_failure_is_told(
    engines: Engines, opened: Open, before: int, answers: list[Any], fails: bool, events: list[str]
) -> None:
    transport = opened()
    for _ in range(before):
        await transport.write("x", rows())
    engines.events.clear()
    engines.answers = answers
    with pytest.raises(TransferFailedError) if fails else nullcontext():
        await transport.write("x", rows())
    assert [event.split(" ")[0] if "write" in event else event for event in engines.events] == events
    assert transport.counts.retries == events.count("write") - 1
    await transport.write("x", rows())
    assert transport.counts.failures == fails


async def test_a_write_is_retried_once_in_all(engines: Engines, opened: Open) -> None:
    transport = opened()
    await transport.write("x", rows())
    engines.answers = [False, True, True, False]
    with pytest.raises(TransferFailedError, match="descriptors 2000 to 2999 of 5000"):
        await transport.write("x", rows(5 * MOST_RANGES))
    assert transport.counts.retries == 1


async def test_a_call_that_took_long_is_not_retried(engines: Engines, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_WITHIN_S", -1.0)
    transport = opened()
    await transport.write("x", rows())
    engines.answers = [False]
    with pytest.raises(TransferFailedError, match="frozen"):
        await transport.write("x", rows())
    assert transport.counts.retries == 0


async def test_no_engine_can_be_made(engines: Engines, opened: Open) -> None:
    transport = opened()
    engines.made_wrong = ConfigError("no ports left")
    with pytest.raises(TransferFailedError, match="no ports left"):
        await transport.write("x", rows())
    engines.made_wrong = None
    await transport.write("x", rows())


async def test_a_cancelled_write_waits_for_its_call_and_begins_no_other(engines: Engines, opened: Open) -> None:
    transport = opened()
    engines.gate.clear()
    writing = asyncio.create_task(transport.write("x", rows(3 * MOST_RANGES)))
    waiting = asyncio.create_task(transport.write("x", rows()))
    await in_call(engines)
    for task in (writing, waiting):
        task.cancel()
    await asyncio.sleep(0.01)
    writing.cancel()
    await asyncio.sleep(0.01)
    assert not writing.done()
    assert not waiting.done()
    engines.gate.set()
    for task in (writing, waiting):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engines.events == ["make 0", "make 1", "write 1 to x: 1000"]
    assert transport.counts.failures == 2


async def test_a_frozen_peer_holds_up_no_other(engines: Engines, opened: Open) -> None:
    transport = opened()
    engines.frozen = "x"
    engines.gate.clear()
    frozen = asyncio.create_task(transport.write("x", rows()))
    await in_call(engines)
    for memory in ("y", "z", "y"):
        await transport.write(memory, rows())
    assert not frozen.done()
    engines.gate.set()
    await frozen


async def test_forgetting(engines: Engines, opened: Open) -> None:
    """The engine goes after the write under way; a later write makes another."""
    transport = opened()
    engines.gate.clear()
    writing = asyncio.create_task(transport.write("x", rows(MOST_RANGES + 1)))
    await in_call(engines)
    await transport.forget("x")
    await transport.forget("x")
    await transport.forget("strange")
    engines.gate.set()
    await writing
    await transport.write("x", rows())
    transport.close()
    assert [e for e in engines.events if not e.startswith("write 1")].count("make 2") == 1
    assert {"end 0", "end 1", "end 2"} <= set(engines.events)


async def test_peers_beyond_the_most(engines: Engines, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not written to for the longest goes; if all are busy, the new one fails."""
    monkeypatch.setattr(mooncake, "MOST_PEERS", 2)
    transport = opened()
    for memory in ("x", "y", "x", "z", "x"):
        await transport.write(memory, rows())
    assert [e for e in engines.events if e.startswith("make")] == ["make 0", "make 1", "make 2", "make 3"]
    engines.gate.clear()
    busy = [asyncio.create_task(transport.write(memory, rows())) for memory in ("x", "z")]
    await asyncio.sleep(0)
    with pytest.raises(TransferFailedError, match="2 peers"):
        await transport.write("y", rows())
    engines.gate.set()
    await asyncio.gather(*busy)


async def test_closing_under_a_call(engines: Engines, opened: Open) -> None:
    """It waits for the call, but not for ever; the write is told only when the call has ended."""
    transport = opened(close_deadline_s=0.05)
    engines.gate.clear()
    writing = asyncio.create_task(transport.write("x", rows(3 * MOST_RANGES)))
    await in_call(engines)
    transport.close()
    assert engines.events == ["make 0", "make 1", "end 0"]
    await asyncio.sleep(0.01)
    assert not writing.done()
    engines.gate.set()
    with pytest.raises(TransferFailedError, match="stopped before descriptor 1000 of 3000"):
        await writing
    transport.close()
    with pytest.raises(TransferFailedError, match="closed"):
        await transport.write("x", rows())
    with pytest.raises(StoreError, match="closed"):
        transport.register(ADDRESS + NBYTES, 1)


async def test_other_protocols_need_the_source_registered(engines: Engines, opened: Open) -> None:
    transport = opened(protocol="rdma")
    await transport.write("x", rows())
    assert engines.registered == [[ADDRESS], [ADDRESS]]
    with pytest.raises(StoreError, match="register before"):
        transport.register(ADDRESS + NBYTES, 1)


def test_a_loop_that_was_closed_is_not_told(engines: Engines, opened: Open) -> None:
    transport = opened()
    engines.gate.clear()
    loop = asyncio.new_event_loop()
    writing = loop.create_task(transport.write("x", rows()))
    loop.run_until_complete(in_call(engines))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    engines.gate.set()
    transport.close()
    assert engines.events[-1] == "end 0"
    assert not writing.done()
    writing._log_destroy_pending = False  # type: ignore[attr-defined]
