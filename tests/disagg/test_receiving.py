"""A request on a decode worker: its blocks go back once, with the outcome, and not while anybody may write into them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.disagg import ReceiveAction, ReceiveInstruction, Receiving, Worker
from kvactors.disagg.states import PEER_MAY_WRITE, RECEIVE_FENCED, RECEIVE_TERMINAL
from kvactors.errors import HandoffStateError, TransferPlanError

A, B = Worker(0, 0), Worker(1, 0)
NAMED = {"a": A, "b": B}


def said(instructions: list[ReceiveInstruction]) -> str:
    names = {worker: name for name, worker in NAMED.items()}
    return ", ".join(f"{i.action.value} {names[i.worker]}" if i.worker else i.action.value for i in instructions)


def tell(record: Receiving, event: str) -> list[ReceiveInstruction]:
    name, _, worker = event.partition(" ")
    reason = [f"{event}!"] if name in ("fail", "abort", "refused", "failed", "dead") else []
    return getattr(record, name)(*([NAMED[worker]] if worker else []), *reason) or []


FLOWS = [
    ("all stages report", "ask a; ask b; reported a; reported b -> return", "loaded", ""),
    ("one reports before the other is asked", "ask a; reported a; ask b; reported b -> return", "loaded", ""),
    ("the handshake is refused", "fail -> abort a, abort b, return", "failed", "fail!"),
    ("a worker cannot be reached", "dead a -> abort b, return", "failed", "dead a!"),
    ("the engine aborts before the pulls", "abort -> abort a, abort b, return", "aborted", "abort!"),
    (
        "one transfer fails: fenced until it acknowledges",
        "ask a; ask b; reported a; failed b -> fail, abort b; acknowledged b -> return",
        "failed",
        "failed b!",
    ),
    (
        "one fails while the other still writes",
        "ask a; ask b; failed b -> fail, abort a, abort b; acknowledged b; reported a -> return",
        "failed",
        "failed b!",
    ),
    ("prefill refuses: nothing was sent", "ask a; ask b; reported a; refused b -> return", "failed", "refused b!"),
    (
        "refused while the other writes",
        "ask a; ask b; refused b -> fail, abort a; acknowledged a -> return",
        "failed",
        "refused b!",
    ),
    ("refused before the other is asked", "ask a; refused a -> abort b, return", "failed", "refused a!"),
    ("prefill dies", "ask a; ask b; dead a -> fail, abort b; dead b -> return", "failed", "dead a!"),
    (
        "prefill dies after its transfer failed",
        "ask a; ask b; reported b; failed a -> fail, abort a; dead a -> return",
        "failed",
        "failed a!",
    ),
    (
        "prefill is frozen: fenced until the connection is dead",
        "ask a; ask b; reported a; fail -> fail, abort b; fail; dead b -> return",
        "failed",
        "fail!",
    ),
    (
        "a report after the deadline settles, and is no success",
        "ask a; ask b; reported a; fail -> fail, abort b; reported b -> return",
        "failed",
        "fail!",
    ),
    (
        "the engine aborts",
        "ask a; ask b; abort -> abort a, abort b; acknowledged a; acknowledged b -> return",
        "aborted",
        "abort!",
    ),
    (
        "the engine aborts what is failing",
        "ask a; ask b; failed a -> fail, abort a, abort b; abort; acknowledged a; dead b -> return",
        "aborted",
        "failed a!",
    ),
    (
        "an abort crosses the last report",
        "ask a; ask b; reported a; abort -> abort b; reported b -> return",
        "aborted",
        "abort!",
    ),
    (
        "prefill gave up by itself",
        "ask a; ask b; acknowledged a -> fail, abort b; acknowledged b -> return",
        "failed",
        "prefill stopped",
    ),
    (
        "late messages change nothing",
        "ask a; ask b; reported a; reported a; reported b -> return; failed a; dead b; abort; fail",
        "loaded",
        "",
    ),
]


@pytest.mark.parametrize(("flow", "end", "reason"), [row[1:] for row in FLOWS], ids=[row[0] for row in FLOWS])
def test_flows(flow: str, end: str, reason: str) -> None:
    record = Receiving("r", [A, B])
    for step in flow.split("; "):
        event, _, expected = step.partition(" -> ")
        assert said(tell(record, event)) == expected, step
    assert (record.state.value, record.reason) == (end, reason)


EMPTY = [
    ("ask a; ask b; reported a; reported b", "released"),
    ("ask a; reported a; abort; ask b; reported b", "released"),
    ("ask a; ask b; failed a; refused b", "released"),
    ("dead a; ask b; dead b", "released"),
    ("ask a; ask b; acknowledged a; fail", "released"),
    ("ask a; reported a", "releasing"),
    ("ask a; fail; reported a; dead b", "released"),
]


@pytest.mark.parametrize(("flow", "end"), EMPTY)
def test_an_empty_pull_returns_nothing(flow: str, end: str) -> None:
    record = Receiving("r", [A, B], empty=True)
    for event in flow.split("; "):
        assert tell(record, event) == []
        assert not record.may_be_written
    assert record.state.value == end


@pytest.mark.parametrize(
    "flow", ["ask a", "ask a; ask b; reported a", "ask a; fail", "ask a; abort", "fail", "ask a; refused a"]
)
def test_nobody_is_asked_twice_nor_after_a_failure(flow: str) -> None:
    record = Receiving("r", [A, B])
    for event in flow.split("; "):
        tell(record, event)
    before = (record.state, dict(record.peers))
    with pytest.raises(HandoffStateError, match="'ask' is not legal in"):
        record.ask(A)
    assert (record.state, record.peers) == before


def test_workers_that_are_not_its_own() -> None:
    with pytest.raises(TransferPlanError, match="request r: there is no prefill worker"):
        Receiving("r", [])
    record = Receiving("r", [A])
    with pytest.raises(TransferPlanError, match=r"prefill worker \(1, 0\) is none of its 1"):
        record.ask(B)
    assert record.reported(B) == []
    assert (record.late, record.state.value) == (1, "connecting")


EVENTS = ["fail", "abort"]
EVENTS += [f"{e} {w}" for w in "ab" for e in ("ask", "ask", "reported", "refused", "failed", "acknowledged", "dead")]


@given(st.lists(st.sampled_from(EVENTS), max_size=20), st.booleans())
def test_blocks_go_back_once_and_never_while_somebody_may_write(events: list[str], empty: bool) -> None:
    record = Receiving("r", [A, B], empty=empty)
    may_write: set[str] = set()
    doubtful: set[str] = set()
    returned: list[str] = []
    told: list[str] = []

    def step(event: str) -> None:
        name, _, worker = event.partition(" ")
        if name in ("acknowledged", "dead") or (name in ("reported", "refused") and worker not in doubtful):
            may_write.discard(worker)
        elif name == "failed" and worker in may_write:
            doubtful.add(worker)  # what it says of this transfer later is not believed
        for action, _ in tell(record, event):
            if action is ReceiveAction.RETURN:
                assert not may_write
                returned.append(record.state.value)
            if action is ReceiveAction.FAIL:
                assert may_write
                assert not returned
                told.append(record.state.value)
        if name == "ask":
            may_write.add(worker)
        assert not empty or not returned
        assert len(returned) <= 1
        assert len(told) <= 1
        assert bool(told) >= (record.state.value == "failing")
        if not empty:
            assert record.may_be_written == bool(may_write)
            assert set(record.unsettled) == {NAMED[w] for w in may_write}
            assert bool(returned) == (record.state in RECEIVE_TERMINAL)
            if record.state in RECEIVE_FENCED:
                assert may_write, "a fence without a reason"

    for event in events:
        try:
            step(event)
        except HandoffStateError:
            assert event.startswith("ask")
    # whatever happened, it ends when its time is up and the connections are gone
    step("fail")
    assert record.state in RECEIVE_TERMINAL or any(state in PEER_MAY_WRITE for state in record.peers.values())
    step("dead a")
    step("dead b")
    assert record.state in RECEIVE_TERMINAL
    assert len(returned) == (not empty)
    if returned == ["loaded"]:
        assert {state.value for state in record.peers.values()} == {"reported"}
