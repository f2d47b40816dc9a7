from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvactors.core.store import Outcome, Store
from kvactors.errors import ConfigError, StoreError, StoreUnreachableError
from kvactors.stores import PRESETS, Fault, FaultPlan, FaultyStore, MemoryStore
from tests.stores.contract import Buffer, one_range, ranges
from tests.stores.memory_world import Background, ManualClock

OK, INVALID, FAILED, UNREACHABLE = Outcome.OK, Outcome.INVALID, Outcome.TRANSFER_FAILED, Outcome.UNREACHABLE


def faulty(*faults: Fault, seed: int = 0, **options: Any) -> FaultyStore:
    return FaultyStore(MemoryStore(clock=ManualClock()), FaultPlan(faults, seed), **options)


def test_without_faults_it_is_the_store_behind() -> None:
    store = faulty()
    assert isinstance(store, Store)
    assert (store.name, store.lease_s, store.put_safe_age_s) == ("memory", 10.0, 15.0)
    assert store.put_open(["a"], [8]) == [OK]
    assert store.contains("a") is False
    assert store.injected == 0


# When


def opens(store: FaultyStore, n: int) -> str:
    """Which of n calls went through (o) and which were hit (x)."""
    return "".join("o" if store.get_open([f"k{i}"], [8]) == [Outcome.NOT_FOUND] else "x" for i in range(n))


@pytest.mark.parametrize(
    ("when", "pattern"),
    [
        ({}, "xxxxxx"),
        ({"nth": 2}, "oxoooo"),
        ({"every": 3}, "ooxoox"),
        ({"times": 2}, "xxoooo"),
        ({"every": 2, "times": 1}, "oxoooo"),
        ({"key": "k4"}, "ooooxo"),
        ({"probability": 0.0}, "oooooo"),
        ({"probability": 1.0}, "xxxxxx"),
        ({"call": "put_open"}, "oooooo"),
        ({"call": "*", "nth": 4}, "oooxoo"),
    ],
)
def test_when_a_fault_strikes(when: dict[str, Any], pattern: str) -> None:
    store = faulty(Fault(what="outcome", outcome=FAILED, **{"call": "get_open", **when}))
    assert opens(store, 6) == pattern
    assert store.injected == pattern.count("x")


def test_the_same_seed_gives_the_same_faults() -> None:
    fault = Fault(what="outcome", call="get_open", outcome=FAILED, probability=0.4)
    runs = [opens(faulty(fault, seed=seed), 40) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert 5 < runs[0].count("x") < 30


# What


def test_an_outcome_strikes_only_the_keys_it_names_and_the_rest_is_done() -> None:
    store = faulty(Fault(what="outcome", call="put_ranges", key="bad", outcome=FAILED))
    buffer = Buffer()
    store.register(buffer.address, buffer.nbytes)
    keys = ["a", "bad", "c"]
    store.put_open(keys, [8] * 3)
    at = [[buffer.fill(8 * i, bytes([65 + i]) * 8)] for i in range(3)]
    assert store.put_ranges(ranges(keys, at, [8], [0])) == [OK, FAILED, OK]
    store.put_commit(keys)
    store.get_open(keys, [8] * 3)
    assert store.get_ranges(ranges(keys, [[a[0] + 100] for a in at], [8], [0])) == [OK] * 3
    assert (buffer.read(100, 8), buffer.read(116, 8)) == (b"A" * 8, b"C" * 8)
    assert buffer.read(108, 8) != b"B" * 8
    assert [(one.call, one.nth, one.what, one.keys) for one in store.injections] == [("put_ranges", 1, "outcome", ("bad",))]


def test_an_applied_outcome_is_a_lost_answer() -> None:
    store = faulty(Fault(what="outcome", call="put_commit", outcome=UNREACHABLE, applied=True))
    store.put_open(["a"], [8])
    assert store.put_commit(["a"]) == [UNREACHABLE]
    assert store.contains("a")


def test_readable_answers_false_for_an_outcome_and_raises_where_false_would_lie() -> None:
    store = faulty(
        Fault(what="outcome", call="readable", nth=1, outcome=FAILED),
        Fault(what="outcome", call="readable", nth=2, outcome=UNREACHABLE),
    )
    store.put_open(["a"], [8])
    store.put_commit(["a"])
    assert store.readable(["a"]) == [False]
    with pytest.raises(StoreUnreachableError):
        store.readable(["a"])
    assert store.readable(["a"]) == [True]


@pytest.mark.parametrize("applied", [False, True])
def test_a_call_may_raise_before_or_after_it_was_carried_out(applied: bool) -> None:
    store = faulty(Fault(what="raise", call="put_commit", applied=applied))
    store.put_open(["a"], [8])
    with pytest.raises(StoreError, match="injected"):
        store.put_commit(["a"])
    assert store.contains("a") is applied


def test_an_error_may_be_an_unreachable_store() -> None:
    store = faulty(Fault(what="raise", call="register", unreachable=True))
    with pytest.raises(StoreUnreachableError):
        store.register(4096, 8)


def test_lists_may_be_too_short_or_too_long() -> None:
    store = faulty(Fault(what="short", call="get_open", nth=1), Fault(what="long", call="get_open", nth=2))
    assert [len(store.get_open(["a", "b"], [8, 8])) for _ in range(3)] == [1, 3, 2]


def test_latency_passes_in_the_injected_sleep() -> None:
    slept: list[float] = []
    store = faulty(Fault(what="latency", call="get_open", latency_s=0.25, every=2), sleep=slept.append)
    for _ in range(4):
        store.get_open(["a"], [8])
    assert slept == [0.25, 0.25]


@pytest.mark.parametrize("applied", [False, True])
def test_a_frozen_call_waits_for_its_gate(applied: bool) -> None:
    store = faulty(Fault(what="freeze", call="put_commit", gate="commit", applied=applied))
    store.put_open(["a", "b"], [8, 8])
    commit = Background(store.put_commit, ["a"])
    assert store.gates["commit"].arrived.wait(30)
    assert commit.is_alive()
    assert store.contains("a") is applied
    assert store.get_open(["b"], [8]) == [Outcome.NOT_READY], "other calls go on"
    store.release("commit")
    assert commit.result() == [OK]
    assert store.put_commit(["b"]) == [OK], "the gate stays open"
    store.gates["commit"].shut()
    assert not store.gates["commit"].arrived.is_set()


def test_close_frees_the_frozen() -> None:
    store = faulty(Fault(what="freeze", call="readable"))
    call = Background(store.readable, ["a"])
    assert store.gates["gate"].arrived.wait(30)
    store.close()
    assert isinstance(call.result(), StoreError | list)
    assert not store.store.health().ok
    with pytest.raises(StoreError):
        store.store.get_open(["a"], [8])


def test_evict_removes_a_key_before_the_call() -> None:
    store = faulty(Fault(what="evict", call="get_open", key="a"))
    store.put_open(["a", "b"], [8, 8])
    store.put_commit(["a", "b"])
    assert store.get_open(["a", "b"], [8, 8]) == [Outcome.NOT_FOUND, OK]


def test_evict_needs_a_store_that_can() -> None:
    class Bare:
        name, lease_s, put_safe_age_s = "bare", 1.0, 1.0

    with pytest.raises(ConfigError, match="cannot remove"):
        FaultyStore(Bare(), [Fault(what="evict")])  # type: ignore[arg-type]  # what is wrong with it is the point


def test_a_killed_store_answers_unreachable_until_it_is_revived() -> None:
    store = faulty(Fault(what="kill", call="*", nth=2))
    assert store.put_open(["a"], [8]) == [OK]
    assert store.put_commit(["a"]) == [UNREACHABLE]
    assert store.get_open(["a", "b"], [8, 8]) == [UNREACHABLE, UNREACHABLE]
    for call in (lambda: store.readable(["a"]), lambda: store.register(4096, 8), lambda: store.unregister(4096)):
        with pytest.raises(StoreUnreachableError):
            call()
    assert store.killed
    assert not store.health().ok
    assert store.stats()["injected"] == {"kill": 5}
    store.revive()
    assert store.health().ok
    assert store.put_commit(["a"]) == [OK]


def test_a_kill_may_raise_and_may_pass() -> None:
    store = faulty(Fault(what="kill", call="get_open", nth=1, raises=True, calls=2))
    for _ in range(2):
        with pytest.raises(StoreUnreachableError):
            store.get_open(["a"], [8])
    assert store.get_open(["a"], [8]) == [Outcome.NOT_FOUND]


def test_what_is_due_in_the_call_of_a_kill_did_not_happen_and_is_due_again() -> None:
    store = faulty(
        Fault(what="outcome", call="get_open", outcome=FAILED, times=1),
        Fault(what="kill", call="get_open", nth=1, calls=1),
    )
    assert store.get_open(["a"], [8]) == [UNREACHABLE]
    assert (store.injected, store.counts) == (1, {"kill": 1})
    assert store.get_open(["a"], [8]) == [FAILED]
    assert store.get_open(["a"], [8]) == [Outcome.NOT_FOUND]
    assert store.counts == {"kill": 1, "outcome": 1}


def test_a_test_may_kill_by_hand() -> None:
    store = faulty()
    store.kill()
    assert store.get_close(["a"]) == [UNREACHABLE]
    assert "killed" in repr(store)


# Plans


@pytest.mark.parametrize("name", PRESETS)
def test_presets_by_name(name: str) -> None:
    store = FaultyStore(MemoryStore(), name, sleep=lambda _: None)
    assert store.plan == FaultPlan.preset(name) == FaultPlan.from_mapping({"preset": name})
    assert name in repr(store)


def test_a_lost_master_stays_lost() -> None:
    store = FaultyStore(MemoryStore(), "lost-master")
    answers = [store.get_open(["a"], [8])[0] for _ in range(50)]
    assert answers == [Outcome.NOT_FOUND] * 39 + [UNREACHABLE] * 11


def test_a_killed_writer_leaves_its_puts_to_the_discard_timeout() -> None:
    clock, buffer = ManualClock(), Buffer()
    real = MemoryStore(clock=clock)
    other = real.client()
    store = FaultyStore(real, "kill-writer")
    store.register(buffer.address, buffer.nbytes)
    store.put_open(["k"], [8])
    batch = one_range("k", buffer.address, 8)
    assert [store.put_ranges(batch), store.put_ranges(batch)] == [[OK], [OK]]
    for call in (lambda: store.put_ranges(batch), lambda: store.put_revoke(["k"])):
        with pytest.raises(StoreUnreachableError):
            call()
    assert other.put_open(["k"], [8]) == [Outcome.EXISTS]
    clock.advance(30)
    assert other.put_open(["k"], [8]) == [OK]


def test_plans_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("seed: 7\nname: mine\nfaults:\n- {what: outcome, call: put_ranges, outcome: transfer-failed, nth: 3}\n")
    plan = FaultPlan.load(path)
    assert plan == FaultPlan((Fault(what="outcome", call="put_ranges", outcome=FAILED, nth=3),), 7, "mine")
    path.write_text('{"preset": "evicting", "faults": [{"what": "kill", "nth": 9}]}')
    assert FaultPlan.load(path).faults == (*PRESETS["evicting"], Fault(what="kill", nth=9))


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ([], "mapping"),
        ({"speed": 1}, "speed"),
        ({"seed": "x"}, "seed"),
        ({"name": 5}, "name"),
        ({"preset": "calm"}, "preset"),
        ({"preset": ["calm"]}, "preset"),
        ({"faults": {}}, "faults"),
        ({"faults": ["kill"]}, r"faults\[0\]"),
        ({"faults": [{}]}, r"faults\[0\]\.what"),
        ({"faults": [{"what": "kill"}, {"what": "explode"}]}, r"faults\[1\]\.what"),
        ({"faults": [{"what": "kill", "when": 1}]}, r"faults\[0\]\.when"),
        ({"faults": [{"what": "kill", "call": "put"}]}, r"faults\[0\]\.call"),
        ({"faults": [{"what": "kill", "nth": 0}]}, r"faults\[0\]\.nth"),
        ({"faults": [{"what": "kill", "every": True}]}, r"faults\[0\]\.every"),
        ({"faults": [{"what": "kill", "probability": 2}]}, r"faults\[0\]\.probability"),
        ({"faults": [{"what": "kill", "raises": 1}]}, r"faults\[0\]\.raises"),
        ({"faults": [{"what": "kill", "key": ""}]}, r"faults\[0\]\.key"),
        ({"faults": [{"what": "freeze", "gate": None}]}, r"faults\[0\]\.gate"),
        ({"faults": [{"what": "latency"}]}, r"faults\[0\]\.latency_s"),
        ({"faults": [{"what": "latency", "latency_s": -1}]}, r"faults\[0\]\.latency_s"),
        ({"faults": [{"what": "outcome"}]}, r"faults\[0\]\.outcome"),
        ({"faults": [{"what": "outcome", "outcome": "fine"}]}, r"faults\[0\]\.outcome"),
        ({"faults": [{"what": "outcome", "outcome": 5}]}, r"faults\[0\]\.outcome"),
        ({"faults": [{"what": "short", "call": "health"}]}, r"faults\[0\]\.call"),
    ],
)
def test_wrong_plans_name_the_field(plan: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        FaultPlan.from_mapping(plan)


@pytest.mark.parametrize("text", ["{", "seed: [", "\t"])
def test_unreadable_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.yaml"):
        FaultPlan.load(path)
    with pytest.raises(ConfigError, match="absent"):
        FaultPlan.load(tmp_path / "absent.yaml")
