"""What a live view shows, as data: bounded in size, and taken in slices so that the engine never waits for who looks.

A snapshot is taken on the view's own thread by plain reads of what the engine's loop changes. Its parts are a moment apart;
each number is one that the engine had. Long tables are counted in slices, with a rest after each in which the thread gives up
the interpreter's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kvactors.core.layout import Group
from kvactors.core.sessions import GetState, PutState, SessionTable
from kvactors.core.stats import EngineStats
from kvactors.engine.asynchronous import Inside

SCHEMA = 1
SLICE = 500
"""Sessions that are counted at a time: some 0.1 ms."""

REST_S = 0.001
MOST_GROUPS = 256
MOST_CALLS = 64
MOST_CAUSES = 64
"""Beyond these a snapshot leaves out; layouts have a few groups, a pool a few workers, revokes a few causes."""

OTHER_CAUSES = "other"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group: what it is, its counters since the start, and its sessions under way by state.

    Attributes:
        block_tokens: raw tokens per block.
        puts, gets: state -> sessions; only states that any is in.
        oldest_s: age of its oldest session that is open in the store, seconds.
        messages: that wait for its actor.
    """

    id: int
    kind: str
    block_tokens: int
    saved: int
    loaded: int
    load_failed: int
    skipped_existing: int
    skipped_no_space: int
    paused_no_space: int
    skipped_tainted: int
    bytes_saved: int
    bytes_loaded: int
    puts: dict[str, int]
    gets: dict[str, int]
    oldest_s: float
    poisoned: int
    abandoned: int
    messages: int


@dataclass(frozen=True, slots=True)
class CallView:
    """A store call under way."""

    worker: str
    call: str
    group: int
    step: int
    keys: int
    for_s: float


@dataclass(frozen=True, slots=True)
class WaitView:
    """Waits of steps that waited: how many, their sum, and how many were at most as long as each of WAIT_BUCKETS_S."""

    count: int = 0
    sum_s: float = 0.0
    at_most: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """See the module. Counters go by the keys of `kvactors.core.metrics`.

    Attributes:
        at_s: Unix time.
        state: running, degraded, draining, drained, closed or dead; empty where there is no engine (vLLM's scheduler).
        counters: those without a label.
        put_ended: how puts ended -> how many.
        queued: priority -> calls that wait for a worker.
        gauges: values now, by name.
    """

    name: str
    rank: str
    pid: int
    version: str
    model: str
    at_s: float
    uptime_s: float
    state: str = ""
    circuit: str = ""
    counters: dict[str, int | float] = field(default_factory=dict)
    gauges: dict[str, int | float] = field(default_factory=dict)
    put_ended: dict[str, int] = field(default_factory=dict)
    revoked_by: dict[str, int] = field(default_factory=dict)
    queued: dict[str, int] = field(default_factory=dict)
    waits: dict[str, WaitView] = field(default_factory=dict)
    groups: list[GroupView] = field(default_factory=list)
    calls: list[CallView] = field(default_factory=list)
    coordinator_messages: int = 0
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class EnginePart:
    """The part of a snapshot that comes from an engine; as it is where there is none."""

    model: str = ""
    state: str = ""
    circuit: str = ""
    counters: dict[str, int | float] = field(default_factory=dict)
    gauges: dict[str, int | float] = field(default_factory=dict)
    put_ended: dict[str, int] = field(default_factory=dict)
    revoked_by: dict[str, int] = field(default_factory=dict)
    queued: dict[str, int] = field(default_factory=dict)
    groups: list[GroupView] = field(default_factory=list)
    calls: list[CallView] = field(default_factory=list)
    coordinator_messages: int = 0


async def look(inside: Inside) -> EnginePart:
    """Reads an engine, in slices."""
    now, stats, pool = inside.clock.now(), inside.stats, inside.pool
    glance = pool.glance()
    tables = {table.group_id: table for table in inside.tables}
    messages = {mailbox.name: len(mailbox) for mailbox in inside.mailboxes}
    groups = [
        await _group(group, tables.get(group.id), stats, now, messages.get(f"group-{group.id}", 0))
        for group in inside.layout.groups[:MOST_GROUPS]
    ]
    ages = [now - call.started_s for call in glance.running]
    sessions = stats.sessions
    return EnginePart(
        model=inside.layout.model,
        state=stats.state,
        circuit=stats.circuit,
        counters=_counters(stats, pool.lost_workers, pool.joined_transfers),
        gauges={
            "queue_depth": sum(glance.queued.values()),
            "pending_saves": inside.gate.pending,
            "sessions_open": sessions.open_now,
            "circuit_open": int(stats.circuit == "open"),
            "gated": glance.gated,
            "running": len(glance.running),
            "longest_call_s": max([0.0, *ages]),
            "late": len(glance.late),
            "missing_workers": glance.missing,
            "fenced": len(inside.fences),
        },
        put_ended={
            "committed": sessions.put_committed,
            "revoked": sessions.put_revoked,
            "refused": sessions.put_refused,
            "poisoned": sessions.put_poisoned,
            "abandoned": sessions.put_abandoned,
        },
        revoked_by=_most(sessions.revoked_by),
        queued={priority.name.lower(): count for priority, count in glance.queued.items()},
        groups=groups,
        calls=[
            CallView(c.worker, c.call, c.group_id, c.step, c.keys, round(max(0.0, age), 6))
            for c, age in list(zip(glance.running, ages, strict=True))[:MOST_CALLS]
        ],
        coordinator_messages=messages.get("coordinator", 0),
    )


def _counters(stats: EngineStats, lost_workers: int, joined: int) -> dict[str, int | float]:
    groups = list(stats.groups.values())
    return {
        "saved_bytes": sum(g.bytes_saved for g in groups),
        "loaded_bytes": sum(g.bytes_loaded for g in groups),
        "steps": stats.steps,
        "steps_passed_through": stats.steps_passed_through,
        "lost_workers": lost_workers,
        "lookups": stats.lookups,
        "lookup_errors": stats.lookup_errors,
        "lookup_misses": stats.lookup_misses,
        "lookup_tokens": stats.lookup_tokens,
        "lookup_hit_tokens": stats.lookup_hit_tokens,
        "put_opened": stats.sessions.put_opened,
        "get_opened": stats.sessions.get_opened,
        "get_closed": stats.sessions.get_closed,
        "get_expired": stats.sessions.get_expired,
        "bad_requests": stats.bad_requests,
        "stale_messages": stats.stale_messages,
        "joined_transfers": joined,
    }


async def _group(group: Group, table: SessionTable | None, stats: EngineStats, now_s: float, messages: int) -> GroupView:
    s = stats.groups[group.id]
    puts: dict[str, int] = {}
    gets: dict[str, int] = {}
    oldest_s = now_s
    if table is not None:
        async for some_puts in _slices(table.puts.values()):
            for put in some_puts:
                state = put.state._value_  # a plain read, where `value` is a call
                puts[state] = puts.get(state, 0) + 1
                if put.state is not PutState.OPENING:
                    oldest_s = min(oldest_s, put.opened_at)
        async for some_gets in _slices(table.gets.values()):
            for get in some_gets:
                state = get.state._value_
                gets[state] = gets.get(state, 0) + 1
                if get.state in (GetState.OPEN, GetState.EXPIRED):
                    oldest_s = min(oldest_s, get.opened_at)
    return GroupView(
        id=group.id,
        kind=group.kind.value,
        block_tokens=group.block_tokens,
        saved=s.saved,
        loaded=s.loaded,
        load_failed=s.load_failed,
        skipped_existing=s.skipped_existing,
        skipped_no_space=s.skipped_no_space,
        paused_no_space=s.paused_no_space,
        skipped_tainted=s.skipped_tainted,
        bytes_saved=s.bytes_saved,
        bytes_loaded=s.bytes_loaded,
        puts=puts,
        gets=gets,
        oldest_s=round(now_s - oldest_s, 6),
        poisoned=0 if table is None else len(table.poisoned),
        abandoned=0 if table is None else len(table.abandoned),
        messages=messages,
    )


async def _slices(values: Iterable[T]) -> AsyncIterator[list[T]]:
    """The values in parts, with a rest between two of them. They are copied first, at once: nobody changes them meanwhile."""
    copied = list(values)
    for start in range(0, len(copied), SLICE):
        if start:
            await asyncio.sleep(REST_S)
        yield copied[start : start + SLICE]


def _most(causes: Mapping[str, int]) -> dict[str, int]:
    """The most frequent causes, the others together."""
    counts = sorted(dict(causes).items(), key=lambda item: -item[1])
    kept = dict(counts[:MOST_CAUSES])
    if len(counts) > MOST_CAUSES:
        kept[OTHER_CAUSES] = kept.get(OTHER_CAUSES, 0) + sum(n for _, n in counts[MOST_CAUSES:])
    return kept
