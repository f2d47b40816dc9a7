"""Links of both kinds, for tests that hold for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvactors.disagg.links import Link, Serve
from kvactors.disagg.memory_links import MemoryNetwork
from kvactors.disagg.websockets import LinkServer, _ClientSocket, connect

LIMIT_S = 20.0
"""For what must happen: none of it takes as long."""


@dataclass
class Place:
    """Somewhere to connect to."""

    address: str
    connect: Callable[[], Awaitable[Any]]
    stop: Callable[[], Awaitable[None]]


@asynccontextmanager
async def websocket_place(serve: Serve) -> AsyncIterator[Place]:
    server = LinkServer(serve)
    address = await server.start()
    try:
        yield Place(address, lambda: connect(address, LIMIT_S), server.stop)
    finally:
        await server.stop()


@asynccontextmanager
async def memory_place(serve: Serve) -> AsyncIterator[Place]:
    network = MemoryNetwork()
    network.listen("p0", serve)
    try:
        yield Place("p0", lambda: network.connect("p0"), network.stop)
    finally:
        await network.stop()
        assert network.failures == []


PLACES = {"websocket": websocket_place, "memory": memory_place}


async def echo(link: Link) -> None:
    while True:
        await link.send(await link.receive())


class Held:
    """Serves links by doing nothing with them, and hands them to the test."""

    def __init__(self) -> None:
        self.links: asyncio.Queue[Any] = asyncio.Queue()
        self.release = asyncio.Event()

    async def __call__(self, link: Link) -> None:
        await self.links.put(link)
        await self.release.wait()


@asynccontextmanager
async def raw(address: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A peer that writes what it likes, and waits for nobody when it leaves."""
    async with aiohttp.ClientSession(ws_response_class=_ClientSocket) as session, session.ws_connect(address) as socket:
        yield socket
