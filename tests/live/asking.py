"""Clients of a live view, polite and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvactors.live import Address, LiveView


class Answer(NamedTuple):
    status: int
    head: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def send(path: Path | str, request: bytes) -> Answer:
    """Sends raw bytes to a socket, and reads what comes until its end."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(request)
        await writer.drain()
        return parsed(await asyncio.wait_for(reader.read(), 10))
    finally:
        writer.close()


async def get(path: Path | str, target: str) -> Answer:
    return await send(path, f"GET {target} HTTP/1.0\r\n\r\n".encode())


def parsed(answer: bytes) -> Answer:
    head, _, body = answer.partition(b"\r\n\r\n")
    return Answer(int(head.split(b" ")[1]), head.decode(), body)


@contextmanager
def viewed(engine: Any, folder: Path, **options: Any) -> Iterator[LiveView]:
    """A view of an engine at `folder`/live.sock."""
    with LiveView(engine, Address.of(str(folder / "live.sock")), **options) as view:
        yield view
