"""The endpoint: HTTP/1.0 GET requests, one a connection, answered on a thread of its own.

A protocol that `curl` and Prometheus speak, in as much of it as they need. The thread keeps a client's slowness away from the
engine's loop, and three limits keep its greed away: what one client may send, take and cost in time, how many are heard at
once, and how much the thread works: after each request it rests `REST_FACTOR` times as long as it worked, so that a flood of
requests costs the engine some percent of the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from kvactors.live.address import Address
from kvactors.live.listener import Listener
from kvactors.log import get_logger

log = get_logger("kvactors.live", burst=5)

MOST_REQUEST_BYTES = 4096
MOST_READS = 16
"""Of one request: a client that sends it byte by byte costs a wake-up each."""

READ_S = 1.0
"""How long a request may take to come: clients are on this machine, and send it at once."""

WRITE_S = 5.0
"""How long an answer may take to go."""

MOST_CLIENTS = 32
"""That are heard at once; others wait in the socket's backlog."""

REST_FACTOR = 19
LONGEST_REST_S = 0.5
CLOSE_S = 5.0

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered to a request."""

    status: int
    body: bytes
    content_type: str = JSON


Route = Callable[[Mapping[str, str]], Awaitable[Reply]]
"""Answers a path, given its query."""

_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


def error(status: int, text: str) -> Reply:
    """An answer that says what is wrong, as JSON."""
    return Reply(status, json.dumps({"error": text}).encode() + b"\n")


class Refused(Exception):
    """A request that is not served."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.reply = error(status, text)


class Server:
    """Listens from its making to `close`.

    Args:
        address: where; other machines cannot reach it.
        routes: path -> who answers it, on the server's own loop.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(self, address: Address, routes: Mapping[str, Route]) -> None:
        self._listener = Listener(address)
        self._routes = routes
        self._loop = asyncio.SelectorEventLoop()  # whatever policy the process has
        self._main: asyncio.Task[None] | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvactors live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and takes the socket's file away. Idempotent, from any thread."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(CLOSE_S)
        self._listener.close()

    def _stop(self) -> None:
        if self._main is not None:
            self._main.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._main = self._loop.create_task(self._accept())
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main)
            for client in self._clients:
                client.cancel()
            if self._clients:
                self._loop.run_until_complete(asyncio.gather(*self._clients, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        except Exception as problem:
            log.error("the live view ended", error=repr(problem), exc_info=True)
        finally:
            self._loop.close()

    async def _accept(self) -> None:
        free, loop = asyncio.Semaphore(MOST_CLIENTS), asyncio.get_running_loop()
        rested_at_s = time.thread_time()
        while True:
            await free.acquire()
            try:
                client, _ = await loop.sock_accept(self._listener.socket)
            except OSError as problem:  # too many open files, most likely
                log.warning("the live view cannot take a client", error=repr(problem))
                free.release()
                await asyncio.sleep(LONGEST_REST_S)
                continue
            task = loop.create_task(self._serve(client))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)
            task.add_done_callback(lambda _: free.release())
            await asyncio.sleep(0)
            now_s = time.thread_time()
            worked_s, rested_at_s = now_s - rested_at_s, now_s
            await asyncio.sleep(min(LONGEST_REST_S, REST_FACTOR * worked_s))

    async def _serve(self, client: socket.socket) -> None:
        with contextlib.closing(client), contextlib.suppress(OSError, TimeoutError):
            client.setblocking(False)
            try:
                reply = await self._reply(await self._read(client))
            except Refused as refused:
                reply = refused.reply
            except OSError:  # the client went away
                return
            except Exception as problem:
                log.warning("the live view could not answer", error=repr(problem), exc_info=True)
                reply = error(500, "the engine could not be looked at; its log says why")
            async with asyncio.timeout(WRITE_S):
                await asyncio.get_running_loop().sock_sendall(client, _message(reply))

    async def _read(self, client: socket.socket) -> bytes:
        loop, data = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(READ_S):
                for _ in range(MOST_READS):
                    part = await loop.sock_recv(client, MOST_REQUEST_BYTES)
                    data += part
                    if len(data) > MOST_REQUEST_BYTES:
                        break
                    if b"\r\n\r\n" in data or b"\n\n" in data:
                        return data
                    if not part:
                        raise Refused(400, "the request has no end: send GET /snapshot HTTP/1.0 and an empty line")
        except TimeoutError:
            raise Refused(408, f"the request took longer than {READ_S:g} s") from None
        raise Refused(431, f"the request has more than {MOST_REQUEST_BYTES} bytes, or came in more than {MOST_READS} pieces")

    async def _reply(self, request: bytes) -> Reply:
        first, *headers = request.decode("latin-1").splitlines()
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise Refused(400, "this is no HTTP request: send GET /snapshot HTTP/1.0 and an empty line")
        if words[0] != "GET":
            raise Refused(405, "a live view is read-only: send GET")
        if not self._listener.address.path:
            _check_host(headers)
        try:
            target = urlsplit(words[1])
            query = dict(parse_qsl(target.query, max_num_fields=8))
        except ValueError:
            raise Refused(400, "the path makes no sense") from None
        route = self._routes.get(target.path)
        if route is None:
            raise Refused(404, f"there is {', '.join(self._routes)}, and nothing else")
        return await route(query)


def _check_host(headers: list[str]) -> None:
    """A page in a browser that was tricked into asking this machine names another host."""
    ours = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)
    for header in headers:
        name, _, value = header.partition(":")
        if name.strip().lower() == "host" and not ours.fullmatch(value.strip()):
            raise Refused(403, "the request names another host: ask localhost or 127.0.0.1")


def _message(reply: Reply) -> bytes:
    head = (
        f"HTTP/1.0 {reply.status} {_REASONS[reply.status]}\r\nContent-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + reply.body
