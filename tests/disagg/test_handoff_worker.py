"""A prefill and a decode worker on threads of their own, over real sockets; the bytes move within this process."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from kvactors.disagg import Descriptors, TransferRegion, WorkerGeometry, remotes
from kvactors.disagg.blocks import GroupBlocks, RequestBlocks
from kvactors.disagg.messages import Heard
from kvactors.disagg.sender import SenderActor
from kvactors.disagg.worker import HandoffConfig, HandoffWorker, Outcome, OutcomeKind, Source
from kvactors.errors import ConfigError, TransferFailedError
from tests.disagg.shapes import BLOCKS, attention, worker

BLOCK = 32
PATIENCE_S = 20.0


class Copier:
    """A transport within one process; `failing` writes raise."""

    def __init__(self, name: str) -> None:
        self.memory = name
        self.failing = 0
        self.closed = False

    def register(self, address: int, nbytes: int) -> None: ...

    async def forget(self, memory: str) -> None: ...

    async def write(self, memory: str, descriptors: Descriptors) -> None:  # noqa: ARG002 - there is one memory
        if self.failing:
            self.failing -= 1
            raise TransferFailedError("drawn")
        for src, dst, n in zip(*(a.tolist() for a in (descriptors.src, descriptors.dst, descriptors.nbytes)), strict=True):
            ctypes.memmove(dst, src, n)

    def close(self) -> None:
        self.closed = True


class Pair:
    """A prefill worker P and a decode worker D."""

    def __init__(self, ends: ExitStack, **decode_group: Any) -> None:
        self.p_memory = np.arange(BLOCKS * BLOCK, dtype=np.uint8)
        self.d_memory = np.zeros(BLOCKS * BLOCK, dtype=np.uint8)
        self.copier = Copier("p")
        self.p = HandoffWorker(
            HandoffConfig(bootstrap=("127.0.0.1", 0)),
            geometry(self.p_memory),
            self.copier,
            engine_id="P",
            sends=True,
            receives=False,
        )
        ends.callback(self.p.close)
        self.d = HandoffWorker(
            HandoffConfig(deadline_s=PATIENCE_S),
            geometry(self.d_memory, **decode_group),
            Copier("d"),
            engine_id="D",
            sends=False,
            receives=True,
        )
        ends.callback(self.d.close)

    def receive(self, number: int, ids: tuple[int, ...], tokens: int = 33) -> None:
        source = Source(f"t{number}", "P", self.p.bootstrap)
        self.d.receive(f"r{number}", source, RequestBlocks(tokens, (GroupBlocks(0, ids),)))

    def compute(self, number: int, ids: tuple[int, ...], tokens: int = 33) -> None:
        self.p.request(f"t{number}")
        self.p.prefilled(f"t{number}", RequestBlocks(tokens, (GroupBlocks(0, ids),)))

    def outcomes(self, count: int) -> list[Outcome]:
        found: list[Outcome] = []
        until(lambda: found.extend(self.d.outcomes()) or len(found) >= count, self.d)
        return found

    def freed(self, *numbers: int) -> bool:
        found: set[str] = set()
        until(lambda: found.update(self.p.freed()) or len(found) >= len(numbers), self.p)
        return found == {f"t{n}" for n in numbers}


def until(done: Callable[[], Any], of: HandoffWorker) -> None:
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, "it did not happen in time"
        of.wait(0.05)


def geometry(memory: np.ndarray[Any, Any], **group: Any) -> WorkerGeometry:
    region = TransferRegion("l0", 0, memory.ctypes.data, BLOCK, BLOCK // 2, 0, split_kv=True)
    return worker([attention(2, 2, **group)], [region])


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as ends:
        yield Pair(ends)


def test_requests_are_handed_over(pair: Pair) -> None:
    pair.compute(1, (1, 2, 3))
    pair.receive(1, (4, 5, 6))
    pair.receive(2, (9, 8, 7))  # decode comes first
    pair.compute(2, (11, 12, 13))
    assert {o.request_id: o.kind for o in pair.outcomes(2)} == dict.fromkeys(("r1", "r2"), OutcomeKind.LOADED)
    assert pair.freed(1, 2)
    got = pair.d_memory.reshape(BLOCKS, BLOCK)
    want = pair.p_memory.reshape(BLOCKS, BLOCK)
    assert (got[[4, 5, 6, 9, 8, 7]] == want[[1, 2, 3, 11, 12, 13]]).all()
    assert not got[[0, 1, 2, 3, 10]].any()
    assert (pair.p.pending, pair.d.pending) == (0, 0)
    sent, received = pair.p.sent, pair.d.received
    assert sent is not None
    assert received is not None
    assert (sent.sends, sent.bytes, received.loaded) == (2, 6 * BLOCK, 2)


def test_an_empty_pull_frees_prefill(pair: Pair) -> None:
    pair.compute(1, (1,))
    pair.d.receive("r1", Source("t1", "P", pair.p.bootstrap), RequestBlocks(0))
    assert pair.freed(1)
    assert pair.d.outcomes() == []


def test_a_failed_transfer_is_fenced_and_then_returned(pair: Pair) -> None:
    pair.copier.failing = 1
    pair.compute(1, (1, 2, 3))
    pair.receive(1, (4, 5, 6))
    failed, returned = pair.outcomes(2)
    assert (failed.kind, failed.fenced, failed.reason) == (OutcomeKind.FAILED, True, "drawn")
    assert (returned.kind, returned.request_id) == (OutcomeKind.RETURNED, "r1")
    assert pair.freed(1)


def test_blocks_that_do_not_match_are_refused(pair: Pair) -> None:
    pair.compute(1, (1, 2, 3), tokens=32)
    pair.receive(1, (4, 5, 6))
    (failed,) = pair.outcomes(1)
    assert (failed.kind, failed.fenced) == (OutcomeKind.FAILED, False)
    assert "prefill computed 32 tokens and decode wants 33" in failed.reason
    assert pair.freed(1)


def test_workers_that_do_not_fit_are_refused_once() -> None:
    with ExitStack() as ends:
        pair = Pair(ends, block_tokens=32)
        for number in (1, 2):
            pair.receive(number, (4,))
        reasons = [o.reason for o in pair.outcomes(2)]
        assert all("block_tokens: prefill has 16, decode has 32" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("engine", "bootstrap", "said"),
    [
        ("Q", None, "instance Q is not (wholly) registered"),
        ("P", "http://127.0.0.1:1", "no bootstrap server listens at http://127.0.0.1:1"),
        ("P", "no address", "bootstrap server"),
    ],
)
def test_prefill_that_cannot_be_found(
    pair: Pair, engine: str, bootstrap: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "LOCATE_PAUSES_S", (0.01,))
    source = Source("t1", engine, bootstrap or pair.p.bootstrap)
    pair.d.receive("r1", source, RequestBlocks(16, (GroupBlocks(0, (1,)),)))
    (failed,) = pair.outcomes(1)
    assert (failed.kind, failed.fenced) == (OutcomeKind.FAILED, False)
    assert said in failed.reason


def test_prefill_that_is_closed(pair: Pair) -> None:
    pair.receive(1, (4,), tokens=16)  # waits for a request that never comes
    until(lambda: pair.p.pending, pair.p)
    pair.p.close()
    failed, returned = pair.outcomes(2)
    assert (failed.kind, failed.fenced, returned.kind) == (OutcomeKind.FAILED, True, OutcomeKind.RETURNED)
    assert pair.copier.closed
    pair.p.close()


def test_a_crash_hangs_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.compute(1, (1, 2, 3))
    until(lambda: pair.p.pending, pair.p)

    async def crash(_: SenderActor, message: Any) -> None:
        if isinstance(message, Heard):
            raise RuntimeError("a bug")

    monkeypatch.setattr(SenderActor, "handle", crash)
    pair.receive(1, (4, 5, 6))
    assert pair.freed(1)
    outcomes = pair.outcomes(2)
    assert [(o.kind, o.fenced) for o in outcomes] == [(OutcomeKind.FAILED, True), (OutcomeKind.RETURNED, False)]
    pair.compute(2, (1,))  # from now on it holds nothing
    assert pair.freed(2)


def test_a_port_in_use(pair: Pair) -> None:
    port = int(pair.p.bootstrap.rpartition(":")[2])
    config = HandoffConfig(bootstrap=("127.0.0.1", port))
    with pytest.raises(ConfigError, match=str(port)):
        HandoffWorker(config, geometry(pair.p_memory), Copier("q"), engine_id="Q", sends=True, receives=False)
