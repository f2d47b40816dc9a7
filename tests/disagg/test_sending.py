"""A request on a prefill worker: what it answers in each flow, and that its blocks are freed once, never under a send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.disagg import SendAction, Sending, SendInstruction, Worker
from kvactors.disagg.states import PULL_RUNNING, SEND_TERMINAL, SEND_TRANSITIONS, SendEvent, SendState
from kvactors.errors import HandoffStateError

A, B, C = Worker(0, 0), Worker(0, 1), Worker(1, 0)
NAMED = {"a": A, "b": B, "c": C}


def said(instructions: list[SendInstruction]) -> str:
    names = {worker: name for name, worker in NAMED.items()}
    return ", ".join(f"{i.action.value} {names[i.worker]}" if i.worker else i.action.value for i in instructions)


def tell(record: Sending, event: str, pullers: int = 2) -> list[SendInstruction]:
    """`event` is a method, and where it concerns a worker its name."""
    name, _, worker = event.partition(" ")
    given: dict[str, list[object]] = {"pull": [pullers], "abort": [pullers]}
    given |= {key: ["why"] for key in ("failed", "refused", "cancel", "expire")}
    whose = [NAMED[worker]] if worker else []
    return list(getattr(record, name)(*whose, *given.get(name, [])))


FLOWS = [
    (
        "both pull, both are told",
        "request; prefilled; pull a -> send a; pull b -> send b; sent a -> report a; sent b -> report b, free",
        "sent",
    ),
    (
        "one after the other",
        "request; prefilled; pull a -> send a; sent a -> report a; pull b -> send b; sent b -> report b, free",
        "sent",
    ),
    (
        "decode comes first",
        "pull a; request; pull b; prefilled -> send a, send b; sent b -> report b; sent a -> report a, free",
        "sent",
    ),
    (
        "decode comes while it is computed, and aborts",
        "request; pull a; abort a -> acknowledge a; abort b -> acknowledge b; prefilled -> free",
        "aborted",
    ),
    (
        "decode aborts before prefill knows of it",
        "abort a -> acknowledge a; abort b -> acknowledge b; request; prefilled -> free",
        "aborted",
    ),
    (
        "decode aborts before it pulls",
        "request; prefilled; abort a -> acknowledge a; abort b -> acknowledge b, free",
        "aborted",
    ),
    (
        "an abort waits for its send",
        "request; prefilled; pull a -> send a; abort b -> acknowledge b; abort a; sent a -> acknowledge a, free",
        "aborted",
    ),
    (
        "an abort of a send that fails",
        "request; prefilled; pull a -> send a; abort a; abort a; failed a -> acknowledge a; abort b -> acknowledge b, free",
        "aborted",
    ),
    (
        "a failed send waits for the abort",
        "request; prefilled; pull a -> send a; failed a -> fail a; pull b -> send b; sent b -> report b; "
        "abort a -> acknowledge a, free",
        "aborted",
    ),
    (
        "blocks that do not match",
        "request; prefilled; pull a -> send a; refused a -> refuse a; pull b -> send b; refused b -> refuse b, free",
        "aborted",
    ),
    (
        "a refusal of an aborted pull",
        "request; prefilled; pull a -> send a; abort a; refused a -> acknowledge a; abort b -> acknowledge b, free",
        "aborted",
    ),
    ("nobody comes", "request; prefilled; expire -> free", "expired"),
    ("one comes, the other never", "request; prefilled; pull a -> send a; sent a -> report a; expire -> free", "expired"),
    (
        "a failed send and no abort",
        "request; prefilled; pull a -> send a; failed a -> fail a; expire -> free; abort a -> acknowledge a",
        "expired",
    ),
    ("a pull after expiry", "request; prefilled; expire -> free; pull a -> refuse a; abort a -> acknowledge a", "expired"),
    ("an orphan pull", "pull a; expire -> refuse a; pull a -> refuse a", "dropped"),
    ("an orphan abort", "abort a -> acknowledge a; expire", "dropped"),
    ("the client gives up at prefill", "pull a; request; cancel -> refuse a; pull b -> refuse b", "dropped"),
    (
        "a second pull",
        "request; prefilled; pull a -> send a; pull a; sent a -> report a; pull a -> report a; pull b -> send b; pull b; "
        "sent b -> report b, free; pull b -> report b",
        "sent",
    ),
    ("a second pull before the blocks are there", "pull a; pull a; request; pull a; prefilled -> send a", "sending"),
    ("a pull after its abort", "abort a -> acknowledge a; pull a -> refuse a", "awaited"),
    ("a pull after its failure", "request; prefilled; pull a -> send a; failed a -> fail a; pull a -> refuse a", "held"),
    ("a second abort", "abort a -> acknowledge a; abort a -> acknowledge a", "awaited"),
    (
        "more workers than were said",
        "request; prefilled; pull a -> send a; pull b -> send b; pull c -> refuse c; abort c -> acknowledge c",
        "sending",
    ),
]


@pytest.mark.parametrize(("flow", "end"), [row[1:] for row in FLOWS], ids=[row[0] for row in FLOWS])
def test_flows(flow: str, end: str) -> None:
    record = Sending("t")
    for step in flow.split("; "):
        event, _, expected = step.partition(" -> ")
        assert said(tell(record, event)) == expected, step
    assert record.state.value == end


def test_workers_that_say_different_numbers() -> None:
    record = Sending("t")
    assert record.pull(A, 2) == []
    (refusal,) = record.pull(B, 3)
    assert refusal == SendInstruction(SendAction.REFUSE, B, "3 workers are said to pull; 2 are expected and 1 spoke already")
    assert said(record.pull(C, 0)) == "refuse c"
    assert record.pull(B, 2) == []


@pytest.mark.parametrize(
    ("flow", "event", "says"),
    [
        ("", "prefilled", "transfer t: 'prefilled' is not legal in 'awaited'"),
        ("request", "request", "'request' is not legal in 'prefilling'"),
        ("request", "expire", "'expire' is not legal in 'prefilling'"),
        ("request; prefilled; pull a", "expire", "'expire' is not legal in 'sending'"),
        ("request; prefilled", "cancel", "'cancel' is not legal in 'held'"),
        ("request; prefilled", "sent a", r"decode worker \(0, 0\): 'sent' is not legal where nothing is being sent to it"),
        ("pull a", "refused a", "'refuse' is not legal where nothing"),
    ],
)
def test_what_is_no_transition_changes_nothing(flow: str, event: str, says: str) -> None:
    record = Sending("t")
    for step in filter(None, flow.split("; ")):
        tell(record, step)
    before = (record.state, dict(record.pulls))
    with pytest.raises(HandoffStateError, match=says):
        tell(record, event)
    assert (record.state, dict(record.pulls)) == before


EVENTS = ["request", "prefilled", "cancel", "expire"]
EVENTS += [f"{event} {worker}" for worker in "abc" for event in ("pull", "abort", "sent", "failed", "refused")]


@given(st.lists(st.sampled_from(EVENTS), max_size=25), st.integers(1, 3), st.booleans())
def test_blocks_are_freed_once_and_never_under_a_send(events: list[str], pullers: int, patient: bool) -> None:
    record = Sending("t")
    running: set[Worker] = set()
    acknowledged: set[Worker] = set()
    held = freed = 0

    def step(event: str) -> None:
        nonlocal held, freed
        worker = NAMED.get(event.partition(" ")[2])
        if event.split()[0] in ("sent", "failed", "refused") and worker in running:
            running.discard(worker)
        for action, to, _ in tell(record, event, pullers):
            if action is SendAction.SEND:
                assert to is not None
                assert to not in acknowledged, "an acknowledged worker is never sent to"
                running.add(to)
            elif action is SendAction.FREE:
                assert not running
                freed += 1
            elif action in (SendAction.ACKNOWLEDGE, SendAction.REFUSE):
                assert to is not None
                assert to not in running, "no write follows"
                acknowledged.add(to)
        held += event == "prefilled"
        assert running == {w for w, state in record.pulls.items() if state in PULL_RUNNING}
        assert (record.state is SendState.SENDING) == bool(running)
        assert freed <= held
        assert record.may_expire == ((record.state, SendEvent.EXPIRE) in SEND_TRANSITIONS)

    for event in events:
        before = set(running)
        try:
            step(event)
        except HandoffStateError:
            running |= before
    # whatever happened, it can end: sends return, decode aborts or the time is up
    for name, worker in NAMED.items():
        if worker in running:
            step(f"failed {name}")
    if record.state is SendState.PREFILLING:
        step("prefilled")
        for name, worker in NAMED.items():
            if worker in running:
                step(f"sent {name}")
    if patient and record.state is SendState.HELD:
        for name in NAMED:
            step(f"abort {name}")
    if record.may_expire:
        step("expire")
    assert record.state in SEND_TERMINAL
    assert freed == held
