"""The session tables: only their transitions exist, every session ends once, and the counts add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.core.sessions import (
    GET_TERMINAL,
    GET_TRANSITIONS,
    PUT_TERMINAL,
    PUT_TRANSITIONS,
    GetEvent,
    GetState,
    Owner,
    PutEvent,
    PutState,
    SessionTable,
)
from kvactors.core.stats import SessionStats, cause_label
from kvactors.errors import SessionError


def test_the_transitions_are_these_and_no_others() -> None:
    puts = {(before.value, event.value): after.value for (before, event), after in PUT_TRANSITIONS.items()}
    assert puts == {
        ("opening", "opened"): "open",
        ("opening", "refused"): "refused",
        ("opening", "lost"): "abandoned",
        ("open", "commit"): "committing",
        ("open", "revoke"): "revoking",
        ("open", "lost"): "abandoned",
        ("committing", "committed"): "committed",
        ("committing", "commit failed"): "revoking",
        ("committing", "lost"): "abandoned",
        ("revoking", "revoked"): "revoked",
        ("revoking", "poison"): "poisoned",
        ("revoking", "lost"): "abandoned",
    }
    gets = {(before.value, event.value): after.value for (before, event), after in GET_TRANSITIONS.items()}
    assert gets == {
        ("opening", "opened"): "open",
        ("opening", "failed"): "failed",
        ("opening", "lost"): "lost",
        ("open", "expire"): "expired",
        ("open", "close"): "closing",
        ("expired", "close"): "closing",
        ("closing", "closed"): "closed",
        ("closing", "lost"): "lost",
        ("lost", "close"): "closing",
        ("lost", "closed"): "closed",
    }


def table() -> SessionTable:
    return SessionTable(0, SessionStats())


def test_terminal_states_are_those_without_a_way_on() -> None:
    assert {s for s in PutState if not any(a is s for a, _ in PUT_TRANSITIONS)} == set(PUT_TERMINAL)
    assert {s for s in GetState if not any(a is s for a, _ in GET_TRANSITIONS)} == set(GET_TERMINAL)


def test_every_state_can_be_reached_and_can_end() -> None:
    for transitions, start, terminal in (
        (PUT_TRANSITIONS, PutState.OPENING, PUT_TERMINAL),
        (GET_TRANSITIONS, GetState.OPENING, GET_TERMINAL),
    ):
        ways: dict[object, set[object]] = {}
        for (before, _), after in transitions.items():
            ways.setdefault(before, set()).add(after)
        assert reach(ways, start) | {start} == set(type(start))
        for state in type(start):
            assert state in terminal or reach(ways, state) & set(terminal)


def reach(ways: dict[object, set[object]], start: object) -> set[object]:
    seen: set[object] = set()
    todo = [start]
    while todo:
        for after in ways.get(todo.pop(), set()) - seen:
            seen.add(after)
            todo.append(after)
    return seen


@pytest.mark.parametrize(
    ("cause", "label"),
    [
        ("layer 0: transfer failed", "transfer failed"),
        ("layer 12: transfer failed", "transfer failed"),
        ("transfer failed", "transfer failed"),
        ("the store lost its session", "the store lost its session"),
        ("aborted: request 7 was cancelled", "aborted"),
        ("preparation failed: group 0: OSError('gone: 3')", "preparation failed"),
        ("group 3 crashed", "group 3 crashed"),
        ("", "unknown"),
        ("layer 3: ", "unknown"),
    ],
)
def test_a_cause_loses_what_is_different_every_time(cause: str, label: str) -> None:
    assert cause_label(cause) == label


def test_a_revoke_counts_its_cause_when_it_becomes_due_whatever_becomes_of_it() -> None:
    t = table()
    ends = [
        ("layer 1: transfer failed", PutEvent.REVOKED),
        ("layer 2: transfer failed", PutEvent.POISON),
        ("a load of its request failed", PutEvent.LOST),
    ]
    for i, (cause, end) in enumerate(ends):
        session = t.begin_put(f"k{i}", Owner("r", 0, i), step=1)
        t.put(session, PutEvent.OPENED)
        t.put(session, PutEvent.REVOKE, cause)
        t.put(session, end, "what the revoke answered")
    late = t.begin_put("late", Owner("r", 0, 9), step=1)
    t.put(late, PutEvent.OPENED)
    t.put(late, PutEvent.COMMIT)
    t.put(late, PutEvent.COMMIT_FAILED, "unreachable")
    assert t.stats.revoked_by == {"transfer failed": 2, "a load of its request failed": 1, "unreachable": 1}


@given(st.lists(st.sampled_from(PutEvent)))
def test_a_put_session_walks_its_table_and_counts_one_end(events: list[PutEvent]) -> None:
    t = table()
    session = t.begin_put("k", Owner("r", 0, 0), step=1)
    for event in events:
        before = session.state
        expected = PUT_TRANSITIONS.get((before, event))
        if expected is None:
            with pytest.raises(SessionError, match=event.value):
                t.put(session, event)
            assert session.state is before
        else:
            assert t.put(session, event) is expected
        s = t.stats
        ended = s.put_committed + s.put_revoked + s.put_poisoned + s.put_abandoned
        is_open = session.state in (PutState.OPEN, PutState.COMMITTING, PutState.REVOKING)
        assert s.put_opened == ended + is_open
        assert s.open_now == is_open
        assert (session.state in PUT_TERMINAL) == (not t.puts) == (not t.writing)
    usable = session.state not in (PutState.POISONED, PutState.ABANDONED)
    assert t.may_open("k") == (session.state in PUT_TERMINAL and usable)


@given(st.lists(st.sampled_from(GetEvent)))
def test_a_get_session_walks_its_table_and_is_closed_once(events: list[GetEvent]) -> None:
    t = table()
    session, is_new = t.acquire_get("k")
    assert is_new
    for event in events:
        before = session.state
        expected = GET_TRANSITIONS.get((before, event))
        if expected is None:
            with pytest.raises(SessionError):
                t.get(session, event)
        else:
            assert t.get(session, event) is expected
        s = t.stats
        is_open = session.state not in (GetState.OPENING, GetState.FAILED, GetState.CLOSED)
        assert s.get_opened == s.get_closed + is_open
        assert s.open_now == is_open
        assert (session.state in GET_TERMINAL) == ("k" not in t.gets)


def test_a_key_has_one_writer_and_an_owner_one_key() -> None:
    t = table()
    t.begin_put("k", Owner("a", 0, 0), 1)
    with pytest.raises(SessionError, match="I10"):
        t.begin_put("k", Owner("b", 0, 0), 1)
    with pytest.raises(SessionError):
        t.begin_put("other", Owner("a", 0, 0), 1)


def test_owners_share_a_get_session() -> None:
    t = table()
    first, _ = t.acquire_get("k")
    second, is_new = t.acquire_get("k")
    assert first is second
    assert not is_new
    assert first.refs == 2


def commit(t: SessionTable, request: str, key: str) -> None:
    session = t.begin_put(key, Owner(request, 0, 3), 1)
    for event in (PutEvent.OPENED, PutEvent.COMMIT, PutEvent.COMMITTED):
        t.put(session, event)


def test_committed_keys_are_remembered_until_forgotten() -> None:
    t = table()
    commit(t, "a", "k")
    assert t.remembered("a", 3) == "k"
    assert t.remembered("b", 3) is None
    t.forget("a")
    assert t.remembered("a", 3) is None
    assert t.memory == {}


def test_a_commit_of_an_earlier_life_is_not_remembered() -> None:
    t = table()
    old = t.begin_put("old", Owner("a", 0, 3), 1)
    t.put(old, PutEvent.OPENED)
    t.put(old, PutEvent.COMMIT)
    t.forget("a")
    commit_later = t.begin_put("new", Owner("a", 0, 4), 2)
    t.put(old, PutEvent.COMMITTED)
    assert t.remembered("a", 3) is None
    assert t.stats.put_committed == 1
    t.put(commit_later, PutEvent.REFUSED)


def test_what_is_left_can_be_abandoned() -> None:
    t = table()
    put = t.begin_put("p", Owner("a", 0, 0), 1)
    t.put(put, PutEvent.OPENED)
    for key, events in {
        "opening": (),
        "open": (GetEvent.OPENED,),
        "expired": (GetEvent.OPENED, GetEvent.EXPIRE),
        "closing": (GetEvent.OPENED, GetEvent.CLOSE),
        "lost": (GetEvent.LOST,),
    }.items():
        session, _ = t.acquire_get(key)
        for event in events:
            t.get(session, event)
    assert len(t.left()) == 6
    t.abandon_all("drained")
    assert t.left() == []
    assert t.stats.open_now == 0
    assert t.abandoned == {"p"}
