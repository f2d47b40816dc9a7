"""The end of a replay: outputs first, then the store is left, which a further signal cuts short."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvactors.cli import root as command_line
from kvactors.layouts import FAMILIES
from kvactors.replay import leaving, live
from kvactors.replay.interrupts import PATIENCE, Interrupts
from kvactors.replay.leaving import leave, left_in_a_hurry
from kvactors.replay.live import run_live
from kvactors.replay.local_pool import LocalPool
from kvactors.replay.plan import ReplayOptions, VirtualOptions, plan_replay
from kvactors.replay.run import Outcome, Watchers
from kvactors.replay.virtual import run_on_virtual_time
from kvactors.stores import MemoryStore
from kvactors.stores.mooncake import client

SAMPLE = Path(__file__).parents[2] / "examples" / "sample_trace.jsonl"
LAYOUT = FAMILIES["seed-example"].build()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test left in a hurry must not end the tests' own process in one."""
    yield
    for left in (leaving._cut_short, leaving._never_freed):
        left.clear()


class Stuck(MemoryStore):
    """Its close does not return until it is let go."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.closing, self.let_go = threading.Event(), threading.Event()

    def close(self) -> None:
        self.closing.set()
        self.let_go.wait()
        super().close()


def pool_in(store: MemoryStore) -> LocalPool:
    pool = LocalPool(LAYOUT, {g.id: 1 for g in LAYOUT.groups})
    pool.register(store)
    return pool


async def leaving_is_cut_by(number: signal.Signals, interrupts: Interrupts) -> None:
    store = Stuck()
    left = asyncio.ensure_future(leave(pool_in(store), store, interrupts, None))
    await asyncio.to_thread(store.closing.wait)
    os.kill(os.getpid(), number)
    assert await left is False
    assert left_in_a_hurry()
    store.let_go.set()


# These make their own loop: a loop that was there before has a Ctrl-C handler of its own.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cuts_leaving_short(number: signal.Signals) -> None:
    with Interrupts() as interrupts:
        asyncio.run(leaving_is_cut_by(number, interrupts))
    assert interrupts.exit_code == 128 + number


def test_only_a_further_signal_does_and_the_first_gives_the_exit_code() -> None:
    store = MemoryStore()
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asyncio.run(leave(pool_in(store), store, interrupts, None))
        assert not left_in_a_hurry()
        asyncio.run(leaving_is_cut_by(signal.SIGINT, interrupts))
    assert interrupts.exit_code == 143


def test_a_hopeless_run_does_not_try_to_leave() -> None:
    store = Stuck()
    with Interrupts() as interrupts:
        for _ in range(PATIENCE):
            os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not asyncio.run(leave(pool_in(store), store, interrupts, None))
    assert not store.closing.is_set()
    assert left_in_a_hurry()


async def test_who_looks_on_is_told_that_leaving_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "SAY_AFTER_S", 0.0)
    store = Stuck()
    assert await leave(pool_in(store), store, None, store.let_go.set)


async def test_an_error_of_leaving_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(_: MemoryStore) -> None:
        raise RuntimeError("no")

    store = MemoryStore()
    pool = pool_in(store)
    monkeypatch.setattr(MemoryStore, "close", close)
    with pytest.raises(RuntimeError, match="no"):
        await leave(pool, store, None, None)


def test_signals_are_taken_over_only_where_nobody_else_handles_them() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            assert interrupts.count == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_outcome_is_handed_over_before_the_store_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Stuck()
    monkeypatch.setattr(live, "open_store", lambda _, **__: store)
    seen: list[tuple[int, bool]] = []

    def on_outcome(outcome: Outcome) -> None:
        seen.append((outcome.report.requests.completed, store.closing.is_set()))
        store.let_go.set()

    run_live(plan_replay(ReplayOptions(str(SAMPLE), LAYOUT, requests=5)), Watchers(on_outcome=on_outcome))
    assert seen == [(5, False)]
    assert not store.health().ok


def test_the_outcome_of_a_virtual_run_has_the_event_log_by_then() -> None:
    seen: list[str | None] = []
    plan = plan_replay(ReplayOptions(str(SAMPLE), LAYOUT, requests=5, virtual=VirtualOptions()))
    outcome = run_on_virtual_time(plan, Watchers(on_outcome=lambda o: seen.append(o.report.event_log_sha256)))
    assert seen == [outcome.report.event_log_sha256]
    assert seen[0] is not None


def ends_with(code: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Runs the command's `main`, whose command exits with a code; which codes went to `os._exit`."""

    def exits(**_: object) -> None:
        raise SystemExit(code)

    def run() -> list[int]:
        ended: list[int] = []
        monkeypatch.setattr(command_line.os, "_exit", ended.append)
        with pytest.raises(SystemExit):
            command_line.main([])
        return ended

    monkeypatch.setattr(command_line, "cli", type("Cli", (), {"main": staticmethod(exits)}))
    return run


def test_the_process_ends_without_destructors_when_native_calls_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ends_with(143, monkeypatch)
    monkeypatch.setattr(client, "_left_open", [])
    assert run() == []
    client._left_open.append(object())
    assert run() == [143]
    client._left_open.clear()
    leaving._cut_short.append("mooncake")
    assert run() == [143]
