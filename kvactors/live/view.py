"""A live view of one engine: what its endpoint answers, and what its owner adds to it."""

from __future__ import annotations

import asyncio
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from kvactors import __version__
from kvactors.core.metrics import COUNTERS, LIVE_COUNTERS, WAIT_BUCKETS_S, WAITS
from kvactors.core.story import StoryBook, StoryEvent
from kvactors.engine.asynchronous import Inside
from kvactors.errors import ConfigError
from kvactors.live.address import Address, live_address
from kvactors.live.exposition import CONTENT_TYPE, exposition
from kvactors.live.printable import encoded
from kvactors.live.server import TEXT, Reply, Server, error
from kvactors.live.snapshot import REST_S, EnginePart, Snapshot, WaitView, look
from kvactors.log import get_logger

log = get_logger("kvactors.live")

FRESH_S = 0.2
"""How old a snapshot may be that is answered again."""

SLICE_LINES = 500
MOST_LIVES = 8
"""Attempts at one request that are told at once: in vLLM each has a name of its own, NAME#1, NAME#2, …"""

_PLAIN_COUNTERS = {key for metrics in (COUNTERS, LIVE_COUNTERS) for key, metric in metrics.items() if not metric.label}


class Looked(Protocol):
    """What a view needs of an engine, of either face."""

    def inside(self) -> Inside: ...
    def keep_stories(self) -> StoryBook: ...


class StoryPart(msgspec.Struct, frozen=True):
    """The story of one attempt at a request: seconds since its first event, group, block, what happened; a group of -1 stands
    for the whole request."""

    request: str
    events: list[tuple[float, int, int, str]]


class Waits:
    """A histogram of waits; added to by one thread, read by another."""

    def __init__(self) -> None:
        self._counts = [0] * (len(WAIT_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """One step waited so long."""
        self._counts[bisect_left(WAIT_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def view(self) -> WaitView:
        counts, sum_s, total, at_most = list(self._counts), self._sum_s, 0, []
        for count in counts[:-1]:
            total += count
            at_most.append(total)
        return WaitView(total + counts[-1], sum_s, at_most)


class LiveView:
    """Shows an engine at an address, from its making to `close`; keeps the stories of its requests from then on.

    Args:
        engine: None = only what its owner counts is shown (vLLM's scheduler has no engine).
        address: where; one view each.
        name: what runs here, for people.
        rank: of the worker, for the label of that name.
        totals: what the owner counts besides, since the start, by the keys of COUNTERS without a label; asked on the view's
            thread. What the engine counts by the same name is added.
        gauges: values now, by the keys of LIVE_GAUGES; asked on the view's thread.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(
        self,
        engine: Looked | None,
        address: Address,
        *,
        name: str = "",
        rank: str = "0",
        totals: Callable[[], Mapping[str, float]] | None = None,
        gauges: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self.address = address
        self._inside = None if engine is None else engine.inside()
        self._name, self._rank = name, rank
        self._totals, self._gauges = totals, gauges
        self._waits = {key: Waits() for key in WAITS}
        self._began_s = time.monotonic()
        self._latest: tuple[float, Snapshot] | None = None
        self._taking = asyncio.Lock()
        routes = {
            "/": self._index,
            "/snapshot": self._snapshot,
            "/metrics": self._metrics,
            "/stories": self._stories,
            "/story": self._story,
        }
        self._book: StoryBook | None = None
        self._server = Server(address, routes)
        if engine is not None:
            self._book = engine.keep_stories()  # last: not without a server

    def close(self) -> None:
        """Ends the endpoint. Idempotent; the engine goes on, and keeps its stories."""
        self._server.close()

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def note_waits(self, waits: Mapping[str, Any]) -> None:
        """How long a step waited, in seconds by the keys of WAITS: a number each, or several; other keys are left alone."""
        for key, histogram in self._waits.items():
            value = waits.get(key)
            if value is not None:
                for seconds in value if isinstance(value, list) else (value,):
                    histogram.add(seconds)

    # -- what is answered ----------------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        """What goes on now, at most `FRESH_S` old: many readers cost as much as one."""
        async with self._taking:
            now_s = time.monotonic()
            if self._latest is None or now_s - self._latest[0] > FRESH_S:
                self._latest = (now_s, await self._take())
            return self._latest[1]

    async def _take(self) -> Snapshot:
        part = EnginePart() if self._inside is None else await look(self._inside)
        counters, gauges = dict(part.counters), dict(part.gauges)
        for key, value in ({} if self._totals is None else dict(self._totals())).items():
            if key in _PLAIN_COUNTERS:
                counters[key] = counters.get(key, 0) + value
        if self._gauges is not None:
            gauges.update(self._gauges())
        if self._book is not None:
            gauges["stories"] = len(self._book)
        return Snapshot(
            name=self._name,
            rank=self._rank,
            pid=os.getpid(),
            version=__version__,
            model=part.model,
            at_s=round(time.time(), 3),
            uptime_s=round(time.monotonic() - self._began_s, 3),
            state=part.state,
            circuit=part.circuit,
            counters=counters,
            gauges=gauges,
            put_ended=part.put_ended,
            revoked_by=part.revoked_by,
            queued=part.queued,
            waits={key: waits.view() for key, waits in self._waits.items()},
            groups=part.groups,
            calls=part.calls,
            coordinator_messages=part.coordinator_messages,
        )

    async def _index(self, _query: Mapping[str, str]) -> Reply:
        text = (
            f"kvactors {__version__}, {self._name or 'an engine'}, rank {self._rank}, process {os.getpid()}\n\n"
            "/snapshot            groups, sessions, queues, workers, counters (JSON)\n"
            "/metrics             the same for Prometheus\n"
            "/stories             the requests whose story is kept, the latest last (JSON)\n"
            "/story?request=NAME  what happened to a request and its sessions (JSON)\n"
        )
        return Reply(200, text.encode(), TEXT)

    async def _snapshot(self, _query: Mapping[str, str]) -> Reply:
        return Reply(200, encoded(await self.snapshot()))

    async def _metrics(self, _query: Mapping[str, str]) -> Reply:
        return Reply(200, exposition(await self.snapshot()).encode(), CONTENT_TYPE)

    async def _stories(self, _query: Mapping[str, str]) -> Reply:
        return Reply(200, encoded([] if self._book is None else self._book.requests()))

    async def _story(self, query: Mapping[str, str]) -> Reply:
        request = query.get("request", "")
        if not request:
            return error(400, "which request? ask /story?request=NAME; /stories has the names")
        parts = []
        for life in _lives(request):
            events = [] if self._book is None else self._book.events(life)
            if events:
                parts.append(StoryPart(life, await _since_the_first(events)))
        if not parts:
            return error(404, f"there is no story of {request!r:.200}; /stories has the names of those that are kept")
        return Reply(200, encoded(parts))


def _lives(request: str) -> Iterator[str]:
    """The names under which the engine may know a request."""
    yield request
    if "#" not in request:
        for number in range(1, MOST_LIVES):
            yield f"{request}#{number}"


async def _since_the_first(events: list[StoryEvent]) -> list[tuple[float, int, int, str]]:
    """The events with times since the first, made in slices."""
    told: list[tuple[float, int, int, str]] = []
    for start in range(0, len(events), SLICE_LINES):
        if start:
            await asyncio.sleep(REST_S)
        part = events[start : start + SLICE_LINES]
        told += [(round(e.at_s - events[0].at_s, 6), e.group_id, e.block_index, e.what) for e in part]
    return told


def view_of_rank(
    given: str, engine: Looked | None, rank: str, *, ranks: int = 1, replica: int = 0, **options: Any
) -> LiveView | None:
    """A view of one rank, if one was asked for. An address that cannot be had is logged: that is no reason not to serve.

    Args:
        given: the configured address; empty = as the environment says.
        options: of `LiveView`.

    Raises:
        ConfigError: what was asked for is no address.
    """
    asked = live_address(given)
    if asked is None:
        return None
    address = asked.of_rank(rank, ranks=ranks, replica=replica)
    try:
        view = LiveView(engine, address, rank=rank, **options)
    except ConfigError as problem:
        log.warning("there is no live view", rank=rank, problem=str(problem))
        return None
    log.info("live view", rank=rank, address=str(address))
    return view
