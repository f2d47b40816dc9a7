"""The states of a hand-off on each side: every legal transition of a request, and of what each peer is to it.

On the prefill side there is one record for each request and worker:

    awaited ── request ──> prefilling ── prefilled ──> held ── send ──> sending ── send ──> sending
       │ expire               │ cancel                  │ ^── idle ────────┘
       v                      v                         │
    dropped                dropped                      └── reported / aborted / expire ──> sent / aborted / expired

`awaited`: a decode worker spoke of the request before it came; such a record expires. `held`: the blocks are kept for decode
and nothing is being sent. `sending` neither expires nor ends: blocks are never freed under a running send. What each decode
worker is to the request:

    queued ── start ──> running ── sent ──> reported
       │                   ├── failed ──> failed ── abort ──> aborted
       │                   ├── abort ──> stopping ── sent / failed / refuse ──> aborted
       │ refuse / abort    └── refuse ──> refused
       v
    refused / aborted

The request ends when all decode workers have settled. An abort is acknowledged when the worker is `aborted`, never before: the
acknowledgement promises that no write follows. `refuse` means that nothing was sent.

On the decode side there is one record for each request and worker, too:

    connecting ── ask ──> pulling ── ask ──> pulling ── loaded ──> loaded
       │                     ├── fail ──> failing ── settled ──> failed
       │ fail / abort        │              │ abort
       v                     │              v
    failed / aborted         └── abort ─> aborting ── settled ──> aborted
    releasing (an empty pull: no blocks) ── settled / fail ──> released

In `failing` and `aborting` the destination blocks are fenced: a failed or late transfer may still write (measured: a write that
had timed out landed when its peer woke up). What each prefill worker is to the request:

    idle ── ask ──> asked ── report ──> reported
       │ dead          ├── refuse / acknowledge / dead ──> settled
       v               └── failed ──> doubtful ── acknowledge / dead ──> settled
    settled

A worker that is `asked` or `doubtful` may write; blocks go back when none is. `dead`: the connection is known to be dead.
`sending.py` and `receiving.py` walk these tables, docs/design/disagg.md tells the flows. Whatever is not in a table raises
`HandoffStateError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from kvactors.errors import HandoffStateError


class Worker(NamedTuple):
    """One worker of the other instance."""

    pp_rank: int
    tp_rank: int


class SendState(Enum):
    AWAITED = "awaited"
    PREFILLING = "prefilling"
    HELD = "held"
    SENDING = "sending"
    SENT = "sent"
    ABORTED = "aborted"
    EXPIRED = "expired"
    DROPPED = "dropped"


class SendEvent(Enum):
    REQUEST = "request"
    PREFILLED = "prefilled"
    CANCEL = "cancel"
    SEND = "send"
    IDLE = "idle"
    REPORTED = "reported"
    ABORTED = "aborted"
    EXPIRE = "expire"


SEND_TRANSITIONS: Mapping[tuple[SendState, SendEvent], SendState] = MappingProxyType(
    {
        (SendState.AWAITED, SendEvent.REQUEST): SendState.PREFILLING,
        (SendState.AWAITED, SendEvent.EXPIRE): SendState.DROPPED,
        (SendState.PREFILLING, SendEvent.PREFILLED): SendState.HELD,
        (SendState.PREFILLING, SendEvent.CANCEL): SendState.DROPPED,
        (SendState.HELD, SendEvent.SEND): SendState.SENDING,
        (SendState.HELD, SendEvent.REPORTED): SendState.SENT,
        (SendState.HELD, SendEvent.ABORTED): SendState.ABORTED,
        (SendState.HELD, SendEvent.EXPIRE): SendState.EXPIRED,
        (SendState.SENDING, SendEvent.SEND): SendState.SENDING,
        (SendState.SENDING, SendEvent.IDLE): SendState.HELD,
    }
)
SEND_TERMINAL = frozenset({SendState.SENT, SendState.ABORTED, SendState.EXPIRED, SendState.DROPPED})


class PullState(Enum):
    """What a decode worker is to a request on the prefill side."""

    QUEUED = "queued"
    RUNNING = "running"
    FAILED = "failed"
    STOPPING = "stopping"
    REPORTED = "reported"
    ABORTED = "aborted"
    REFUSED = "refused"


class PullEvent(Enum):
    START = "start"
    SENT = "sent"
    FAILED = "failed"
    ABORT = "abort"
    REFUSE = "refuse"


PULL_TRANSITIONS: Mapping[tuple[PullState, PullEvent], PullState] = MappingProxyType(
    {
        (PullState.QUEUED, PullEvent.START): PullState.RUNNING,
        (PullState.QUEUED, PullEvent.ABORT): PullState.ABORTED,
        (PullState.QUEUED, PullEvent.REFUSE): PullState.REFUSED,
        (PullState.RUNNING, PullEvent.SENT): PullState.REPORTED,
        (PullState.RUNNING, PullEvent.FAILED): PullState.FAILED,
        (PullState.RUNNING, PullEvent.ABORT): PullState.STOPPING,
        (PullState.RUNNING, PullEvent.REFUSE): PullState.REFUSED,
        (PullState.FAILED, PullEvent.ABORT): PullState.ABORTED,
        (PullState.STOPPING, PullEvent.SENT): PullState.ABORTED,
        (PullState.STOPPING, PullEvent.FAILED): PullState.ABORTED,
        (PullState.STOPPING, PullEvent.REFUSE): PullState.ABORTED,
    }
)
PULL_TERMINAL = frozenset({PullState.REPORTED, PullState.ABORTED, PullState.REFUSED})
PULL_RUNNING = frozenset({PullState.RUNNING, PullState.STOPPING})


class ReceiveState(Enum):
    CONNECTING = "connecting"
    PULLING = "pulling"
    FAILING = "failing"
    ABORTING = "aborting"
    RELEASING = "releasing"
    LOADED = "loaded"
    FAILED = "failed"
    ABORTED = "aborted"
    RELEASED = "released"


class ReceiveEvent(Enum):
    ASK = "ask"
    LOADED = "loaded"
    FAIL = "fail"
    ABORT = "abort"
    SETTLED = "settled"


RECEIVE_TRANSITIONS: Mapping[tuple[ReceiveState, ReceiveEvent], ReceiveState] = MappingProxyType(
    {
        (ReceiveState.CONNECTING, ReceiveEvent.ASK): ReceiveState.PULLING,
        (ReceiveState.CONNECTING, ReceiveEvent.FAIL): ReceiveState.FAILED,
        (ReceiveState.CONNECTING, ReceiveEvent.ABORT): ReceiveState.ABORTED,
        (ReceiveState.PULLING, ReceiveEvent.ASK): ReceiveState.PULLING,
        (ReceiveState.PULLING, ReceiveEvent.LOADED): ReceiveState.LOADED,
        (ReceiveState.PULLING, ReceiveEvent.FAIL): ReceiveState.FAILING,
        (ReceiveState.PULLING, ReceiveEvent.ABORT): ReceiveState.ABORTING,
        (ReceiveState.FAILING, ReceiveEvent.ABORT): ReceiveState.ABORTING,
        (ReceiveState.FAILING, ReceiveEvent.SETTLED): ReceiveState.FAILED,
        (ReceiveState.ABORTING, ReceiveEvent.SETTLED): ReceiveState.ABORTED,
        (ReceiveState.RELEASING, ReceiveEvent.ASK): ReceiveState.RELEASING,
        (ReceiveState.RELEASING, ReceiveEvent.SETTLED): ReceiveState.RELEASED,
        (ReceiveState.RELEASING, ReceiveEvent.FAIL): ReceiveState.RELEASED,
    }
)
RECEIVE_TERMINAL = frozenset({ReceiveState.LOADED, ReceiveState.FAILED, ReceiveState.ABORTED, ReceiveState.RELEASED})
RECEIVE_FENCED = frozenset({ReceiveState.FAILING, ReceiveState.ABORTING})


class PeerState(Enum):
    """What a prefill worker is to a request on the decode side."""

    IDLE = "idle"
    ASKED = "asked"
    DOUBTFUL = "doubtful"
    REPORTED = "reported"
    SETTLED = "settled"


class PeerEvent(Enum):
    ASK = "ask"
    REPORT = "report"
    REFUSE = "refuse"
    FAILED = "failed"
    ACKNOWLEDGE = "acknowledge"
    DEAD = "dead"


PEER_TRANSITIONS: Mapping[tuple[PeerState, PeerEvent], PeerState] = MappingProxyType(
    {
        (PeerState.IDLE, PeerEvent.ASK): PeerState.ASKED,
        (PeerState.IDLE, PeerEvent.DEAD): PeerState.SETTLED,
        (PeerState.ASKED, PeerEvent.REPORT): PeerState.REPORTED,
        (PeerState.ASKED, PeerEvent.REFUSE): PeerState.SETTLED,
        (PeerState.ASKED, PeerEvent.FAILED): PeerState.DOUBTFUL,
        (PeerState.ASKED, PeerEvent.ACKNOWLEDGE): PeerState.SETTLED,
        (PeerState.ASKED, PeerEvent.DEAD): PeerState.SETTLED,
        (PeerState.DOUBTFUL, PeerEvent.ACKNOWLEDGE): PeerState.SETTLED,
        (PeerState.DOUBTFUL, PeerEvent.DEAD): PeerState.SETTLED,
    }
)
PEER_TERMINAL = frozenset({PeerState.REPORTED, PeerState.SETTLED})
PEER_MAY_WRITE = frozenset({PeerState.ASKED, PeerState.DOUBTFUL})

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


def walk(table: Mapping[tuple[S, E], S], state: S, event: E, what: str) -> S:
    """The state after an event.

    Raises:
        HandoffStateError: the table has no such transition; `what` says whose.
    """
    after = table.get((state, event))
    if after is None:
        raise HandoffStateError(f"{what}: {event.value!r} is not legal in {state.value!r}")
    return after
