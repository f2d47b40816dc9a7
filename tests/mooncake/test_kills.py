"""Kills the master at random moments of a replay: every run ends with a report, no loaded byte is wrong, the sessions add up,
and no object of another client is ever overwritten. `make soak-mooncake` does it a hundred times and prints what it met."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.store import Outcome
from kvactors.devices import MonotonicClock
from kvactors.replay.compute import ThreadCompute
from kvactors.replay.plan import Plan, ReplayOptions, plan_replay
from kvactors.replay.report import Report
from kvactors.replay.run import Ground, Watchers, play_plan
from kvactors.stores import MooncakeStore
from tests.mooncake.sentinels import Sentinels
from tests.mooncake.site import Site

SAMPLE = Path(__file__).parents[2] / "examples" / "sample_trace.jsonl"
KILLS = int(os.environ.get("KVACTORS_KILLS", "5"))
RUN_S = 60.0
"""A run without a kill takes some 5 s, and a call to a dead master up to 5 s more."""
MOST_DOWN_S = 1.0


def layout(model: str) -> KVLayout:
    k, v, c = CacheEntry("k", 4096, 4160), CacheEntry("v", 4096, 4608), CacheEntry("c", 6000, 6144)
    state = CacheEntry("s", 8192)
    return KVLayout(
        model,
        [
            Group(0, GroupKind.FULL, 256, {0: [k, v], 2: [k, v]}),
            Group(1, GroupKind.COMPRESSED, 512, {1: [c], 3: [c]}),
            Group(2, GroupKind.STATE, 512, {0: [state], 3: [state]}),
        ],
    )


class Watched:
    """A client that counts its calls and its open puts, and says when the nth call whose name begins so is made."""

    def __init__(self, store: MooncakeStore, calls: str = "", nth: int = -1) -> None:
        self.reached = threading.Event()
        self.open_puts: set[str] = set()
        self.made: Counter[str] = Counter()
        self._store, self._calls, self._nth, self._lock = store, calls, nth, threading.Lock()

    def count(self, calls: str) -> int:
        return sum(count for name, count in self.made.items() if name.startswith(calls))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        return self._watched(name, value) if name.startswith(("put_", "get_")) or name == "readable" else value

    def _watched(self, name: str, call: Any) -> Any:
        if not callable(call):
            return call

        def watched(*arguments: Any) -> Any:
            with self._lock:
                self.made[name] += 1
                if self.count(self._calls) == self._nth:
                    self.reached.set()
            answers = call(*arguments)
            with self._lock:
                if name == "put_open":
                    self.open_puts.update(k for k, o in zip(arguments[0], answers, strict=True) if o is Outcome.OK)
                elif name in ("put_commit", "put_revoke"):
                    self.open_puts.difference_update(arguments[0])
            return answers

        return watched


def play(plan: Plan, store: Watched) -> Report:
    clock = MonotonicClock()
    ground: Any = Ground("live", clock, ThreadCompute(clock), store)
    return asyncio.run(asyncio.wait_for(play_plan(plan, ground, Watchers()), RUN_S)).report


def check(report: Report) -> None:
    assert not report.broken, report.events
    assert report.bytes.mismatched == 0
    assert report.requests.completed == report.requests.total
    s = report.sessions
    assert s.open_at_end == 0
    assert s.put_opened == s.put_committed + s.put_revoked + s.put_poisoned + s.put_abandoned
    assert s.get_opened == s.get_closed


class Killer(threading.Thread):
    """Kills the master when a call begins, starts it again, and has the sentinels take the memory that is free again."""

    def __init__(self, site: Site, store: Watched, sentinels: Sentinels, rng: random.Random) -> None:
        super().__init__(name="killer", daemon=True)
        self.found_open = 0
        self.failed: BaseException | None = None
        self._site, self._store, self._sentinels = site, store, sentinels
        self._later_s, self._down_s = rng.random() * 0.003, rng.random() * MOST_DOWN_S

    def run(self) -> None:
        try:
            assert self._store.reached.wait(RUN_S)
            time.sleep(self._later_s)  # into the call
            self._site.master.kill()
            self.found_open = len(self._store.open_puts)
            time.sleep(self._down_s)
            self._site.master.start()
            self._sentinels.put_all()
        except BaseException as error:
            self.failed = error


@pytest.mark.timeout(60 + 60 * KILLS)
def test_a_replay_outlives_its_master(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(20250601)
    met: Counter[str] = Counter()
    longest_s = 0.0
    with Site(discard_timeout_s=1, release_timeout_s=2) as site:
        site.owner()
        sentinels = site.sentinels()
        plan, first = plan_for("run 0"), Watched(connect(site))
        check(play(plan, first))
        assert sentinels.check() == (len(sentinels.keys), 0, 0)
        for run in range(1, KILLS + 1):
            calls = rng.choice(("", "put_"))  # any call, or one that writes: then every key is new
            plan = plan_for(f"run {run}") if calls else plan
            store = Watched(connect(site), calls, rng.randint(1, first.count(calls) * 2 // 3))
            killer = Killer(site, store, sentinels, rng)
            killer.start()
            began = time.monotonic()
            report = play(plan, store)
            longest_s = max(longest_s, time.monotonic() - began)
            met["kills after the run"] += not store.reached.is_set()
            store.reached.set()  # a run that made fewer calls is killed at its end
            killer.join()
            assert killer.failed is None, killer.failed
            check(report)
            found = sentinels.check()
            assert found.wrong == 0
            met["kills"] += 1
            met["kills with puts open"] += killer.found_open > 0
            met["puts open at a kill"] += killer.found_open
            met["runs with puts that were not committed"] += report.sessions.put_opened > report.sessions.put_committed
            met["puts not committed"] += report.sessions.put_opened - report.sessions.put_committed
            met["requests whose load failed"] += report.failures.load_failed
            met["tokens asked for"] += report.tokens.input
            met["tokens hit"] += report.tokens.hit
            met["tokens recomputed"] += report.failures.recomputed_tokens
            met["bytes verified"] += report.bytes.verified
            met["sentinels absent"] += found.absent
            met["sentinels wrong"] += found.wrong
    with capsys.disabled():
        print(f"\nlongest run {longest_s:.1f} s; " + ", ".join(f"{name}: {count}" for name, count in met.items()))


def plan_for(model: str) -> Plan:
    """Two hundred requests within some 3 s."""
    options = ReplayOptions(
        str(SAMPLE), layout(model), store="mooncake", requests=200, concurrency=3, chunk_tokens=1024, speed=120.0
    )
    return plan_replay(options)


def connect(site: Site) -> MooncakeStore:
    return MooncakeStore(**site.master.options())
