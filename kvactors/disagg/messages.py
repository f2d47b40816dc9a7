"""The messages of the sender and the receiver actor; what crosses between processes is in `wire.py`.

Prefill, the happy flow, one decode worker:

    engine   Requested(t)                 awaited or new -> prefilling
    link     Heard(Pull t)                queued
    engine   Prefilled(t, blocks)         held -> sending; a task writes
    task     WriteEnded(t)                Sent goes out; the last decode worker has settled: t is freed

and the ways it ends otherwise: Cancelled (the engine ended it before it was computed), Heard(Abort), LinkDown (as if all that
the link asked for were aborted), TimeUp (nobody came in time).

Decode, the happy flow, one prefill worker:

    engine   Receive(r, t)                the bootstrap server is asked
    task     Located                      the prefill workers are known; a link to each is opened
    task     LinkUp                       Pull goes out
    link     Heard(Sent t)                loaded; the blocks are the engine's

and otherwise: Heard(Refused), Heard(Failed), LinkDown, TimeUp, GiveUp: Abort goes to every prefill worker that may write, FAIL
goes to the engine; the blocks stay fenced until each of them has said Stopped, or is known to be gone, and GRACE has passed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvactors.disagg.blocks import RequestBlocks
from kvactors.disagg.links import Link
from kvactors.disagg.states import Worker
from kvactors.disagg.wire import Message, Welcome


@dataclass(frozen=True, slots=True)
class Source:
    """Where a request's prefill is: what vLLM's `kv_transfer_params` say.

    Attributes:
        transfer_id: names the request on both sides.
        engine_id: of the prefill instance.
        bootstrap: address of its bootstrap server.
    """

    transfer_id: str
    engine_id: str
    bootstrap: str


class OutcomeKind(Enum):
    LOADED = "loaded"
    """All of it arrived."""
    FAILED = "failed"
    """It will not arrive; see `Outcome.fenced` for its blocks."""
    ABORTED = "aborted"
    """The engine gave it up, and its blocks are the engine's again."""
    RETURNED = "returned"
    """Nothing can be written any more into the blocks of a request that FAILED fenced."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine is told of a request on decode: LOADED, FAILED or ABORTED once; RETURNED after a fenced FAILED.

    Attributes:
        reason: for people.
        fenced: a late write may still come into the blocks; they must not be used again before RETURNED.
    """

    request_id: str
    kind: OutcomeKind
    reason: str = ""
    fenced: bool = False


# -- from the engine, prefill ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Requested:
    """The request came to this worker."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """It is computed; its blocks are held until it is said to be free."""

    transfer_id: str
    blocks: RequestBlocks


@dataclass(frozen=True, slots=True)
class Cancelled:
    """It ended before it was computed."""

    transfer_id: str
    reason: str


# -- from the engine, decode -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Receive:
    """Get the request's blocks from its prefill; without ids, only let prefill free its own."""

    request_id: str
    source: Source
    blocks: RequestBlocks


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The engine aborts the request."""

    request_id: str
    reason: str


# -- from links, tasks and timers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LinkUp:
    """A link is open, and both ends have said who they are. `peer`: the actor's own record of the other end."""

    peer: Any
    link: Link
    welcome: Welcome | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """A peer said something. `room`: to be released when it is handled; a link has only so many messages in a mailbox."""

    peer: Any
    link: Link
    message: Message
    room: asyncio.Semaphore | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LinkDown:
    """A link has ended, or could not be opened (`link` is None).

    Attributes:
        gone: the other process is known to be gone.
        refused: the other end refuses this one, for a reason that stands as long as both live.
    """

    peer: Any
    link: Link | None
    reason: str
    gone: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """The bootstrap server was asked. `entry`: what it said of the instance; None: `reason` says why not."""

    instance: Any
    entry: Any
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """A send has ended, and nothing of it follows.

    Attributes:
        failed: why it failed; None: all of it arrived.
        refused: nothing was sent, because the blocks do not fit.
    """

    transfer_id: str
    worker: Worker
    failed: str | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TimeUp:
    """A request's time is up. `of`: the actor's own record of it."""

    of: Any


@dataclass(frozen=True, slots=True, eq=False)
class Grace:
    """A slice of the time for late bytes has passed. It is counted in slices so that a pause of this process counts as one."""

    of: Any
    worker: Worker
    dead: bool
    left: int
    slice_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Reconnect:
    """Time to try a peer again."""

    peer: Any


@dataclass(frozen=True, slots=True, eq=False)
class Reached:
    """Everything that came before it has been handled when it is."""

    event: asyncio.Event
