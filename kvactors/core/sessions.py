"""Sessions of one group: the transition tables, who owns what, and what is remembered.

A put session (one per key being written in this process, I10) runs through

    opening ── opened ──> open ── commit ──> committing ── committed ──> committed
       │                   │                     │
       │ refused           │ revoke              │ commit failed
       v                   v                     v
    refused             revoking <───────────────┘
                           │ revoked / poison
                           v
                    revoked / poisoned

and from every state that is not terminal `lost` leads to `abandoned`: a store call on the key never returned, or the
session was dropped (lost master, too old) and its one best-effort revoke failed. An abandoned or poisoned key is never
opened again by this client, because a late write could land in it. A get session (one per distinct key, shared by all who
read it, closed with its last owner) is shorter:

    opening ── opened ──> open ── close ──> closing ── closed ──> closed
       │ failed             │ expire           ^
       v                    v       close      │
     failed              expired ──────────────┘

`closing` exists because ONE end of a get session drops it for everyone in the client: a key is not opened again before
its close has returned. A get whose open or close did not return is `lost`: whether the store has the session is unknown, so
the key is not opened until the call returned (loads of it fail at once); then the session is closed. All legal transitions
stand in `PUT_TRANSITIONS` and `GET_TRANSITIONS`; anything else raises `SessionError`.
Source: the session rules of the store contract (docs/design/store-contract.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from kvactors.core.stats import SessionStats, cause_label
from kvactors.errors import SessionError


class Owner(NamedTuple):
    """Who a block belongs to: block 0 of one group is not block 0 of another (I3)."""

    request_id: str
    group_id: int
    block_index: int


class _Hashed(Enum):
    """Members are equal only if they are the same, so they can hash so; Enum's own hash is a function in Python, and the
    tables below ask for it two or three times a transition."""

    __hash__ = object.__hash__


class PutState(_Hashed):
    OPENING = "opening"
    OPEN = "open"
    COMMITTING = "committing"
    COMMITTED = "committed"
    REVOKING = "revoking"
    REVOKED = "revoked"
    REFUSED = "refused"
    POISONED = "poisoned"
    ABANDONED = "abandoned"


class PutEvent(_Hashed):
    OPENED = "opened"
    REFUSED = "refused"
    COMMIT = "commit"
    COMMITTED = "committed"
    COMMIT_FAILED = "commit failed"
    REVOKE = "revoke"
    REVOKED = "revoked"
    POISON = "poison"
    LOST = "lost"


class GetState(_Hashed):
    OPENING = "opening"
    OPEN = "open"
    EXPIRED = "expired"
    CLOSING = "closing"
    LOST = "lost"
    CLOSED = "closed"
    FAILED = "failed"


class GetEvent(_Hashed):
    OPENED = "opened"
    FAILED = "failed"
    EXPIRE = "expire"
    CLOSE = "close"
    CLOSED = "closed"
    LOST = "lost"


PUT_TRANSITIONS: Mapping[tuple[PutState, PutEvent], PutState] = MappingProxyType(
    {
        (PutState.OPENING, PutEvent.OPENED): PutState.OPEN,
        (PutState.OPENING, PutEvent.REFUSED): PutState.REFUSED,
        (PutState.OPENING, PutEvent.LOST): PutState.ABANDONED,
        (PutState.OPEN, PutEvent.COMMIT): PutState.COMMITTING,
        (PutState.OPEN, PutEvent.REVOKE): PutState.REVOKING,
        (PutState.OPEN, PutEvent.LOST): PutState.ABANDONED,
        (PutState.COMMITTING, PutEvent.COMMITTED): PutState.COMMITTED,
        (PutState.COMMITTING, PutEvent.COMMIT_FAILED): PutState.REVOKING,
        (PutState.COMMITTING, PutEvent.LOST): PutState.ABANDONED,
        (PutState.REVOKING, PutEvent.REVOKED): PutState.REVOKED,
        (PutState.REVOKING, PutEvent.POISON): PutState.POISONED,
        (PutState.REVOKING, PutEvent.LOST): PutState.ABANDONED,
    }
)
PUT_TERMINAL = frozenset({PutState.COMMITTED, PutState.REVOKED, PutState.REFUSED, PutState.POISONED, PutState.ABANDONED})

GET_TRANSITIONS: Mapping[tuple[GetState, GetEvent], GetState] = MappingProxyType(
    {
        (GetState.OPENING, GetEvent.OPENED): GetState.OPEN,
        (GetState.OPENING, GetEvent.FAILED): GetState.FAILED,
        (GetState.OPEN, GetEvent.CLOSE): GetState.CLOSING,
        (GetState.OPEN, GetEvent.EXPIRE): GetState.EXPIRED,
        (GetState.EXPIRED, GetEvent.CLOSE): GetState.CLOSING,
        (GetState.CLOSING, GetEvent.CLOSED): GetState.CLOSED,
        (GetState.OPENING, GetEvent.LOST): GetState.LOST,
        (GetState.CLOSING, GetEvent.LOST): GetState.LOST,
        (GetState.LOST, GetEvent.CLOSE): GetState.CLOSING,
        (GetState.LOST, GetEvent.CLOSED): GetState.CLOSED,
    }
)
GET_TERMINAL = frozenset({GetState.CLOSED, GetState.FAILED})


@dataclass(slots=True, eq=False)
class PutSession:
    """One key being written. `opened_at` and `epoch` say how old it is and under which life of the master it began."""

    key: str
    owner: Owner
    step: int
    memory: dict[int, str]
    """the request's memory of committed keys in this life of its id; forgotten with it"""
    state: PutState = PutState.OPENING
    opened_at: float = 0.0
    epoch: int = 0
    attempts: int = 0
    dropped: bool = False
    """The store lost it (I11): one best-effort revoke, no further range or commit."""


@dataclass(slots=True, eq=False)
class GetSession:
    """One key being read, by `refs` owners."""

    key: str
    state: GetState = GetState.OPENING
    refs: int = 0
    lost_refs: int = 0
    """owners that are store calls past their deadline: they give up the session when they return, if ever"""
    attempts: int = 0
    opened_at: float = 0.0
    epoch: int = 0

    @property
    def held_by_lost_calls(self) -> bool:
        """Whether nobody but calls past their deadline holds it."""
        return self.state is GetState.LOST or 0 < self.refs == self.lost_refs


_PUT_STORY = {(before, after): f"put {before.value} -> {after.value}" for (before, _), after in PUT_TRANSITIONS.items()}

Record = Callable[[str, int, int, str], None]
"""(request id, group id, block index, what happened) -> noted for `story`."""


@dataclass(slots=True)
class SessionTable:
    """All sessions of one group. It belongs to the supervisor's scope and outlives a crashed actor.

    Attributes:
        puts: owner -> its put session, only while not terminal.
        writing: key -> its one writer (I10); the same sessions as `puts`.
        gets: key -> the shared get session, until closed.
        record: notes what happens; None = nobody wants to know.
        memory: request id -> block index -> key, for keys known to be committed.
        poisoned, abandoned: keys that are never opened again.
    """

    group_id: int
    stats: SessionStats
    record: Record | None = None
    puts: dict[Owner, PutSession] = field(default_factory=dict)
    writing: dict[str, PutSession] = field(default_factory=dict)
    gets: dict[str, GetSession] = field(default_factory=dict)
    memory: dict[str, dict[int, str]] = field(default_factory=dict)
    poisoned: set[str] = field(default_factory=set)
    abandoned: set[str] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Whether every session has reached its end, less those that only a call which does not return still holds."""
        return not self.puts and all(g.held_by_lost_calls for g in self.gets.values())

    # -- puts --------------------------------------------------------------------------------------------------------

    def may_open(self, key: str) -> bool:
        """Whether nobody in this process writes the key and it is usable."""
        return key not in self.writing and key not in self.poisoned and key not in self.abandoned

    def begin_put(self, key: str, owner: Owner, step: int) -> PutSession:
        """Begins to write a key.

        Raises:
            SessionError: the key has a writer or is unusable, or its owner writes another (I10).
        """
        if not self.may_open(key) or owner in self.puts:
            raise SessionError(f"{owner}: key {key} already has a writer, or is unusable in this process (I10)")
        session = PutSession(key, owner, step, self.memory.setdefault(owner.request_id, {}))
        self.puts[owner] = session
        self.writing[key] = session
        return session

    def put(self, session: PutSession, event: PutEvent, cause: str = "") -> PutState:
        """Moves a put session along its table; counts, remembers and forgets as its new state asks.

        Raises:
            SessionError: the table has no such transition; nothing changes.
        """
        before = session.state
        after = PUT_TRANSITIONS.get((before, event))
        if after is None:
            raise SessionError(
                f"put session of {session.owner} ({session.key}): {event.value!r} is not legal in {before.value!r}"
            )
        session.state = after
        stats = self.stats
        if after is PutState.OPEN:
            stats.put_opened += 1
            stats.open_now += 1
        elif after is PutState.REVOKING:
            label = cause_label(cause)
            stats.revoked_by[label] = stats.revoked_by.get(label, 0) + 1
        elif after in PUT_TERMINAL:
            self._end_put(session, before, after)
        if self.record is not None:
            what = _PUT_STORY[before, after]
            self.record(*session.owner, f"{what} ({cause})" if cause else what)
        return after

    def _end_put(self, session: PutSession, before: PutState, after: PutState) -> None:
        stats, owner = self.stats, session.owner
        if before is not PutState.OPENING:
            stats.open_now -= 1
        elif after is PutState.ABANDONED:
            stats.put_opened += 1
        del self.puts[owner]
        del self.writing[session.key]
        if after is PutState.COMMITTED:
            stats.put_committed += 1
            session.memory[owner.block_index] = session.key
        elif after is PutState.REVOKED:
            stats.put_revoked += 1
        elif after is PutState.REFUSED:
            stats.put_refused += 1
        elif after is PutState.POISONED:
            stats.put_poisoned += 1
            self.poisoned.add(session.key)
        else:
            stats.put_abandoned += 1
            self.abandoned.add(session.key)

    # -- gets --------------------------------------------------------------------------------------------------------

    def acquire_get(self, key: str) -> tuple[GetSession, bool]:
        """The key's get session with one more owner, and whether the caller must have it opened (at the store)."""
        session = self.gets.get(key)
        if session is None:
            session = self.gets[key] = GetSession(key)
            session.refs = 1
            return session, True
        session.refs += 1
        return session, False

    def get(self, session: GetSession, event: GetEvent) -> GetState:
        """Moves a get session along its table.

        Raises:
            SessionError: the table has no such transition; nothing changes.
        """
        after = GET_TRANSITIONS.get((session.state, event))
        if after is None:
            raise SessionError(f"get session of {session.key}: {event.value!r} is not legal in {session.state.value!r}")
        before, session.state = session.state, after
        stats = self.stats
        if after is GetState.OPEN or (before is GetState.OPENING and after is GetState.LOST):
            stats.get_opened += 1
            stats.open_now += 1
        elif after is GetState.EXPIRED:
            stats.get_expired += 1
        elif after is GetState.CLOSED:
            stats.get_closed += 1
            stats.open_now -= 1
        if after in GET_TERMINAL and self.gets.get(session.key) is session:
            del self.gets[session.key]
        return after

    # -- the end ---------------------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """Every session that has not reached its end, one line each."""
        puts = [f"put {s.key} of {s.owner.request_id}: {s.state.value}" for s in self.puts.values()]
        return puts + [f"get {s.key}: {s.state.value}" for s in self.gets.values()]

    def abandon_all(self, cause: str) -> None:
        """Ends every session without the store: puts are abandoned, gets count as closed."""
        for put in list(self.puts.values()):
            self.put(put, PutEvent.LOST, cause)
        for get in list(self.gets.values()):
            if get.state is GetState.OPENING:
                self.get(get, GetEvent.FAILED)
                continue
            if get.state in (GetState.OPEN, GetState.EXPIRED):
                self.get(get, GetEvent.CLOSE)
            self.get(get, GetEvent.CLOSED)

    # -- memory of committed keys ------------------------------------------------------------------------------------

    def remembered(self, request_id: str, block_index: int) -> str | None:
        known = self.memory.get(request_id)
        return None if known is None else known.get(block_index)

    def forget(self, request_id: str) -> None:
        """Ends this life of a request id: its memory goes; commits still under way note their keys in what nobody reads."""
        self.memory.pop(request_id, None)
