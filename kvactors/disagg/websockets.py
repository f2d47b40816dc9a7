"""Links between workers over WebSockets: `LinkServer` on a prefill worker, `connect` on a decode worker.

A link is one TCP connection. Its end is noticed at once when the other process ends, and within half a minute when its machine
vanishes (TCP keepalive; if it vanishes while a message is on its way, when the kernel gives up sending, after some 15 minutes).
Nothing else ends it: a frozen process is not dead, so there are no heartbeats.
Needs aiohttp, the extra `disagg`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
from aiohttp import WSCloseCode, WSMsgType, web

from kvactors.disagg.links import Serve
from kvactors.disagg.listening import authority, check_host, is_wildcard, keep_alive, listening_socket
from kvactors.disagg.wire import MAX_FRAME_BYTES, Message, Problem, decode, encode
from kvactors.errors import ConfigError, LinkClosedError, PeerGoneError, PeerUnreachableError, WireError
from kvactors.log import get_logger

PATH = "/handoff"
MARGIN_BYTES = 1 << 20
"""A frame that is larger than allowed by less than this is read, and answered; beyond it the connection is closed with 1009."""
CLOSE_S = 2.0
"""What a peer gets to take its last messages and to say goodbye; then the connection is dropped."""

log = get_logger("kvactors.disagg.links", burst=10)


class _Bounded:
    """What both kinds of WebSocket lack: closing ends in `CLOSE_S` seconds, even if the peer reads nothing.

    aiohttp closes by itself when a frame breaks the protocol, hence a method of the sockets and not of the link.
    """

    transport: asyncio.Transport | None = None

    async def close(self, **how: Any) -> bool:
        transport = self.transport
        try:
            async with asyncio.timeout(CLOSE_S):
                closed: bool = await super().close(**how)  # type: ignore[misc]
        except BaseException as error:
            if transport is not None:
                transport.abort()
            if not isinstance(error, TimeoutError):
                raise
            return True
        if transport is not None and transport.get_write_buffer_size():  # would be kept for a peer that reads nothing
            asyncio.get_running_loop().call_later(CLOSE_S, transport.abort)
        return closed


class _ServerSocket(_Bounded, web.WebSocketResponse):
    pass


class _ClientSocket(_Bounded, aiohttp.ClientWebSocketResponse):
    pass


class WebSocketLink:
    """A `Link` over an open WebSocket; made by `LinkServer` and `connect`.

    One frame at a time is handed to the connection, and it is handed over when the connection has room again: a peer that does
    not read holds up `send` (limit it with `asyncio.timeout`), and never makes memory grow.
    """

    def __init__(self, socket: _ServerSocket | _ClientSocket, peer: str, session: aiohttp.ClientSession | None = None) -> None:
        self.peer = peer
        self._socket, self._session = socket, session
        self._order = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        """The frame on its way to the connection; it outlives a `send` that was given up."""
        self._ended = ""
        """Why the link has ended; empty while it lives."""

    async def send(self, message: Message) -> None:
        """Sends a message; messages arrive in the order of the calls.

        Returns when the connection has taken it. Given up (cancelled), the message may still be sent, and the link goes on.
        Where it fails, `receive` still gives what arrived before the end, which may say why; then `close` the link.

        Raises:
            LinkClosedError: the link has ended.
            WireError: the message is too large; the link goes on.
        """
        self._check()
        frame = encode(message)
        try:
            await self._write(frame)
        except (ConnectionError, RuntimeError, aiohttp.ClientError) as error:
            self._check()
            raise LinkClosedError(f"the link to {self.peer} has ended: sending failed: {error}") from error
        self._check()

    async def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. What is malformed, too large or of another version is answered with a `Problem`, and the end.

        Giving up (cancelling) loses no message.

        Args:
            timeout_s: how long to wait; None = without end.

        Raises:
            LinkClosedError: the link has ended; says why.
            TimeoutError: the time is up; the link goes on.
        """
        self._check()
        async with asyncio.timeout(timeout_s):
            frame = await self._socket.receive()
        problem, code = "", WSCloseCode.UNSUPPORTED_DATA
        if frame.type is WSMsgType.BINARY:
            try:
                return decode(frame.data)
            except WireError as error:
                problem, code = str(error), WSCloseCode.POLICY_VIOLATION
        elif frame.type is WSMsgType.TEXT:
            problem = f"a text frame of {len(frame.data)} characters; messages are binary frames"
        if problem:
            log.warning("a peer sent something that is no message", peer=self.peer, problem=problem)
            await self._end(f"the peer sent something that is no message: {problem}", problem, code)
        elif frame.type is WSMsgType.ERROR and isinstance(frame.data, aiohttp.WebSocketError):
            log.warning("a peer broke the WebSocket protocol", peer=self.peer, code=frame.data.code, problem=str(frame.data))
            await self._end(f"the peer broke the WebSocket protocol ({frame.data.code}): {frame.data}")
        elif frame.type is WSMsgType.CLOSE:
            await self._end(f"closed by the peer ({frame.data}{': ' + frame.extra if frame.extra else ''})")
        else:
            await self._end(f"the connection was lost{f': {frame.data}' if frame.data else ''}")
        raise self._error()

    async def close(self, reason: str = "") -> None:
        """Ends the link, within a few seconds; with a reason, the other end is told first. Idempotent."""
        await self._end(f"closed on this side{': ' + reason if reason else ''}", reason)

    async def _end(self, why: str, problem: str = "", code: int = WSCloseCode.OK, goodbye: str = "") -> None:
        """Ends the link, the first time that it is called."""
        if self._ended:
            return
        self._ended = why
        try:
            if problem:
                with contextlib.suppress(ConnectionError, RuntimeError, aiohttp.ClientError, TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await self._write(encode(Problem(problem[:1000])), last=True)
            await self._socket.close(code=code, message=goodbye.encode())
        except asyncio.CancelledError:
            if self._socket.transport is not None:
                self._socket.transport.abort()
            raise
        finally:
            if self._session is not None:
                await self._session.close()

    async def _write(self, frame: bytes, last: bool = False) -> None:
        async with self._order:
            if self._writing is not None:
                await asyncio.wait([self._writing])
            if self._ended and not last:
                return
            self._writing = asyncio.create_task(self._socket.send_bytes(frame))
            self._writing.add_done_callback(_retrieve)
            await asyncio.wait([self._writing])
            self._writing.result()

    def _check(self) -> None:
        if self._ended:
            raise self._error()

    def _error(self) -> LinkClosedError:
        return LinkClosedError(f"the link to {self.peer} has ended: {self._ended}")


def _retrieve(task: asyncio.Task[None]) -> None:
    """Takes the result of a task whose waiter may have given up, so that asyncio reports nothing."""
    if not task.cancelled():
        task.exception()


class LinkServer:
    """Accepts links, and gives each to `serve`; a link ends when `serve` returns or raises.

    Args:
        host, port: where to listen; port 0 = any that is free.
        public: the host is not of the loopback network, and that is meant: other machines reach it, without a password.
        advertise: the host that peers dial; empty = `host`. Needed where `host` is 0.0.0.0 or ::.
        setting: where the port is set, for messages to people.

    Raises:
        ConfigError: a host that is not allowed, see `public` and `advertise`.
    """

    def __init__(
        self,
        serve: Serve,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        public: bool = False,
        advertise: str = "",
        setting: str = "port",
    ) -> None:
        check_host(host, public, "server of links")
        if is_wildcard(host) and not advertise:
            raise ConfigError(
                f"the server of links listens on {host!r}, which no peer can dial; give advertise='<host to dial>'"
            )
        self._serve, self._host, self._port = serve, host, port
        self._advertise, self._setting = advertise or host, setting
        self._runner: web.AppRunner | None = None
        self._listening = False
        self._links: set[WebSocketLink] = set()

    async def start(self) -> str:
        """Starts to listen; returns the address for `connect`.

        Raises:
            ConfigError: the port is in use, or the host is none of this machine's.
        """
        sock = listening_socket(self._host, self._port, "server of links", self._setting)
        app = web.Application()
        app.router.add_get(PATH, self._accept)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        self._listening = True
        await web.SockSite(self._runner, sock, backlog=1024).start()
        return f"ws://{authority(self._advertise, sock.getsockname()[1])}{PATH}"

    async def stop(self) -> None:
        """Ends every link and stops listening, within a few seconds. Idempotent; if it is cancelled, the next one goes on."""
        self._listening = False
        runner = self._runner
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        why = "the worker stops"
        await asyncio.gather(*(link._end(why, code=WSCloseCode.GOING_AWAY, goodbye=why) for link in list(self._links)))
        await runner.cleanup()
        self._runner = None

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        socket = _ServerSocket(max_msg_size=MAX_FRAME_BYTES + MARGIN_BYTES, compress=False)
        socket.transport = request.transport
        await socket.prepare(request)
        address = request.transport and request.transport.get_extra_info("peername")
        link = WebSocketLink(socket, authority(*address[:2]) if address else "a peer that is gone")
        self._links.add(link)
        try:
            if self._listening:
                await self._serve(link)
        except LinkClosedError:
            pass
        except Exception:
            log.exception("serving a link failed", peer=link.peer)
        finally:
            self._links.discard(link)
            await link.close()
        return socket


async def connect(address: str, timeout_s: float) -> WebSocketLink:
    """Opens a link to a worker's address, "ws://host:port/handoff".

    Raises:
        PeerGoneError: the connection is refused: no process listens there any more.
        PeerUnreachableError: no answer in `timeout_s` seconds, or one that is no link; says the address and the cause.
    """
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=1, force_close=True, use_dns_cache=False),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        ws_response_class=_ClientSocket,
    )
    try:
        async with unreachable("worker", address, timeout_s):
            opened = await session.ws_connect(address, max_msg_size=MAX_FRAME_BYTES + MARGIN_BYTES)
            socket = cast(_ClientSocket, opened)
            connection = socket._response.connection
            socket.transport = connection and connection.transport
            sock = socket.get_extra_info("socket")
            if sock is None:
                raise ConnectionResetError("the connection was lost as soon as it was open")
            keep_alive(sock)
    except BaseException:
        await session.close()
        raise
    return WebSocketLink(socket, address, session)


@contextlib.asynccontextmanager
async def unreachable(what: str, address: str, timeout_s: float) -> AsyncIterator[None]:
    """Turns what aiohttp raises on the way to an address into the errors of the hand-off; limits the time.

    Raises:
        PeerGoneError: the connection is refused.
        PeerUnreachableError: anything else, and the time is up.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise PeerUnreachableError(
            f"the {what} at {address} does not answer in {timeout_s:g} s; its process or machine may be frozen or overloaded"
        ) from error
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno == errno.ECONNREFUSED:
            raise PeerGoneError(f"no {what} listens at {address} any more: {error.os_error}") from error
        raise PeerUnreachableError(f"the {what} at {address} cannot be reached: {error.os_error}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise PeerUnreachableError(f"the {what} at {address} cannot be reached: {type(error).__name__}: {error}") from error
