"""The tables of a hand-off: only these transitions exist, every state can end, and no state is without a way to it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from kvactors.disagg.states import (
    PEER_MAY_WRITE,
    PEER_TERMINAL,
    PEER_TRANSITIONS,
    PULL_RUNNING,
    PULL_TERMINAL,
    PULL_TRANSITIONS,
    RECEIVE_FENCED,
    RECEIVE_TERMINAL,
    RECEIVE_TRANSITIONS,
    SEND_TERMINAL,
    SEND_TRANSITIONS,
    PeerState,
    PullState,
    ReceiveState,
    SendEvent,
    SendState,
    walk,
)
from kvactors.errors import HandoffStateError

EXPECTED = [
    (
        SEND_TRANSITIONS,
        """awaited request prefilling
        awaited expire dropped
        prefilling prefilled held
        prefilling cancel dropped
        held send sending
        held reported sent
        held aborted aborted
        held expire expired
        sending send sending
        sending idle held""",
    ),
    (
        PULL_TRANSITIONS,
        """queued start running
        queued abort aborted
        queued refuse refused
        running sent reported
        running failed failed
        running abort stopping
        running refuse refused
        failed abort aborted
        stopping sent aborted
        stopping failed aborted
        stopping refuse aborted""",
    ),
    (
        RECEIVE_TRANSITIONS,
        """connecting ask pulling
        connecting fail failed
        connecting abort aborted
        pulling ask pulling
        pulling loaded loaded
        pulling fail failing
        pulling abort aborting
        failing abort aborting
        failing settled failed
        aborting settled aborted
        releasing ask releasing
        releasing settled released
        releasing fail released""",
    ),
    (
        PEER_TRANSITIONS,
        """idle ask asked
        idle dead settled
        asked report reported
        asked refuse settled
        asked failed doubtful
        asked acknowledge settled
        asked dead settled
        doubtful acknowledge settled
        doubtful dead settled""",
    ),
]
TABLES = ["send", "pull", "receive", "peer"]


@pytest.mark.parametrize(("table", "rows"), EXPECTED, ids=TABLES)
def test_the_transitions_are_these_and_no_others(table: Mapping[tuple[Enum, Enum], Enum], rows: str) -> None:
    found = {f"{before.value} {event.value} {after.value}" for (before, event), after in table.items()}
    assert found == {row.strip() for row in rows.splitlines()}


ENDS: list[Any] = [
    (SEND_TRANSITIONS, [SendState.AWAITED], SEND_TERMINAL),
    (PULL_TRANSITIONS, [PullState.QUEUED], PULL_TERMINAL),
    (RECEIVE_TRANSITIONS, [ReceiveState.CONNECTING, ReceiveState.RELEASING], RECEIVE_TERMINAL),
    (PEER_TRANSITIONS, [PeerState.IDLE], PEER_TERMINAL),
]


@pytest.mark.parametrize(("table", "starts", "terminal"), ENDS, ids=TABLES)
def test_every_state_can_be_reached_and_can_end(
    table: Mapping[tuple[Enum, Enum], Enum], starts: list[Enum], terminal: frozenset[Enum]
) -> None:
    ways: dict[Enum, set[Enum]] = {}
    for (before, _), after in table.items():
        ways.setdefault(before, set()).add(after)
    everything = set(type(starts[0]))
    assert set().union(*(reach(ways, start) for start in starts)) == everything
    assert {state for state in everything if state not in ways} == set(terminal)
    assert all(reach(ways, state) & terminal for state in everything)


def reach(ways: Mapping[Enum, set[Enum]], start: Enum) -> set[Enum]:
    seen, todo = {start}, [start]
    while todo:
        for after in ways.get(todo.pop(), set()) - seen:
            seen.add(after)
            todo.append(after)
    return seen


def test_what_holds_memory() -> None:
    """Blocks never expire under a running send; a worker that may write is settled only by its word or its end."""
    assert (SendState.SENDING, SendEvent.EXPIRE) not in SEND_TRANSITIONS
    assert not PULL_RUNNING & PULL_TERMINAL
    assert not RECEIVE_FENCED & RECEIVE_TERMINAL
    assert not PEER_MAY_WRITE & PEER_TERMINAL
    out = {
        event.value
        for (before, event), after in PEER_TRANSITIONS.items()
        if before in PEER_MAY_WRITE and after in PEER_TERMINAL
    }
    assert out == {"report", "refuse", "acknowledge", "dead"}


def test_a_transition_that_is_not_there() -> None:
    with pytest.raises(HandoffStateError, match=r"^transfer t: 'expire' is not legal in 'sending'$"):
        walk(SEND_TRANSITIONS, SendState.SENDING, SendEvent.EXPIRE, "transfer t")
