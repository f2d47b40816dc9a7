"""The auditor names the invariant that a call breaks, and is silent over a right sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvactors.actors.audit import AuditedStore
from kvactors.core.config import EngineConfig
from kvactors.core.store import Outcome, RangeBatch
from kvactors.devices import ManualClock


class Yes:
    """A store that says OK to everything, so that only the auditor can object."""

    name, lease_s, put_safe_age_s = "yes", 5.0, 20.0

    def __init__(self) -> None:
        self.during: Callable[[], object] = lambda: None

    def put_open(self, keys: Sequence[str], _sizes: Sequence[int]) -> list[Outcome]:
        return [Outcome.OK] * len(keys)

    get_open = put_open

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        self.during()
        return [Outcome.OK] * len(batch.keys)

    get_ranges = put_ranges

    def put_commit(self, keys: Sequence[str]) -> list[Outcome]:
        return [Outcome.OK] * len(keys)

    put_revoke = get_close = put_commit


class Audit:
    """An auditor over `Yes`, at most two keys and 64 bytes in a call."""

    def __init__(self) -> None:
        self.clock, self.yes = ManualClock(), Yes()
        config = EngineConfig(max_transfer_blocks=2, max_transfer_bytes=64)
        self.store = AuditedStore(self.yes, self.clock, config)  # type: ignore[arg-type]  # it has what the audit calls, and no more

    def put(self, *keys: str) -> None:
        self.store.put_open(keys, [32] * len(keys))

    def get(self, *keys: str) -> None:
        self.store.get_open(keys, [32] * len(keys))


def batch(*keys: str, at: int = 0, size: int = 16) -> RangeBatch:
    n = len(keys)
    return RangeBatch(keys, np.zeros((n, 1), np.int64), np.array([size], np.int64), np.array([at], np.int64))


@pytest.fixture
def audit() -> Audit:
    return Audit()


def test_a_right_sequence_breaks_nothing(audit: Audit) -> None:
    store = audit.store
    audit.put("k", "l", "m")
    store.put_ranges(batch("k", "l"))
    store.put_ranges(batch("k", "l", at=16))
    assert store.open_sessions() == ["put k", "put l", "put m"]
    store.put_commit(["k", "l"])
    store.put_revoke(["m"])
    audit.get("k")
    store.get_ranges(batch("k", "k", size=32))
    store.get_close(["k"])
    assert store.violations == []
    assert store.checked > 0
    assert store.open_sessions() == []


def _within(audit: Audit, start: Callable[[], Any], during: Callable[[], Any]) -> None:
    """Makes a second call while the first is under way."""

    def once() -> None:
        audit.yes.during = lambda: None
        during()

    audit.yes.during = once
    start()


def incomplete_commit(a: Audit) -> None:
    a.put("k")
    a.store.put_ranges(batch("k"))
    a.store.put_commit(["k"])


def put_twice(a: Audit) -> None:
    a.put("k")
    a.store.put_ranges(batch("k"))
    a.store.put_ranges(batch("k"))


def commit_under_way(a: Audit) -> None:
    a.put("k")
    a.store.put_ranges(batch("k"))
    _within(a, lambda: a.store.put_ranges(batch("k", at=16)), lambda: a.store.put_commit(["k"]))


def revoke_under_way(a: Audit) -> None:
    a.put("k")
    _within(a, lambda: a.store.put_ranges(batch("k")), lambda: a.store.put_revoke(["k"]))


def close_under_way(a: Audit) -> None:
    a.get("k")
    _within(a, lambda: a.store.get_ranges(batch("k")), lambda: a.store.get_close(["k"]))


def range_of_an_old_session(a: Audit) -> None:
    a.put("k")
    a.clock.advance(21.0)
    a.store.put_ranges(batch("k"))


def range_of_an_earlier_life(a: Audit) -> None:
    a.put("k")
    a.store.begin(1)
    a.store.put_ranges(batch("k"))


def commit_of_an_earlier_life(a: Audit) -> None:
    a.put("k")
    a.store.put_ranges(batch("k", size=32))
    a.store.begin(1)
    a.store.put_commit(["k"])


def too_many(a: Audit, *keys: str, size: int) -> None:
    a.get(*keys)
    a.store.get_ranges(batch(*keys, size=size))


def second_writer(a: Audit) -> None:
    a.put("k")
    a.put("k")


def nested(a: Audit, calls: int) -> None:
    """One call more at once than workers can exist: each call makes the next."""
    a.get("k")

    def deeper(left: int) -> None:
        a.yes.during = lambda: deeper(left - 1) if left else None
        a.store.get_ranges(batch("k"))

    deeper(calls - 1)


MOST = EngineConfig().workers + 1 + EngineConfig().max_lost_workers
BROKEN: list[tuple[str, str, Callable[[Audit], object]]] = [
    ("I1", "commit of k: byte 16 of 32 was not put", incomplete_commit),
    ("I1", "offsets [0] of k are put twice", put_twice),
    ("I1", "commit of k with a range call under way", commit_under_way),
    ("I2", "range put of k, which has no open session", lambda a: a.store.put_ranges(batch("k"))),
    ("I2", "commit of k, which has no open session", lambda a: a.store.put_commit(["k"])),
    ("I2", "revoke of k with a range call under way", revoke_under_way),
    ("I6", "range get of k, which has no open session", lambda a: a.store.get_ranges(batch("k"))),
    ("I6", "close of k, which has no open session", lambda a: a.store.get_close(["k"])),
    ("I6", "close of k with a read under way", close_under_way),
    ("I7", "3 keys in one call", lambda a: too_many(a, "k", "l", "m", size=16)),
    ("I7", "66 bytes in one call", lambda a: too_many(a, "k", "l", size=33)),
    ("I7", f"{MOST + 1} store calls at once", lambda a: nested(a, MOST + 1)),
    ("I10", "put open of k, which this engine is writing already", second_writer),
    ("I11", "range put of k on a session too old", range_of_an_old_session),
    ("I11", "range put of k after its master was lost", range_of_an_earlier_life),
    ("I11", "commit of k after its master was lost", commit_of_an_earlier_life),
]


@pytest.mark.parametrize(("invariant", "says", "breaks"), BROKEN, ids=[f"{i}: {s}" for i, s, _ in BROKEN])
def test_what_breaks_an_invariant_is_named(audit: Audit, invariant: str, says: str, breaks: Callable[[Audit], object]) -> None:
    breaks(audit)
    assert any(v.startswith(f"{invariant}: {says}") for v in audit.store.violations), audit.store.violations


def test_as_many_calls_at_once_as_there_are_workers_are_fine(audit: Audit) -> None:
    nested(audit, MOST)
    assert audit.store.violations == []
