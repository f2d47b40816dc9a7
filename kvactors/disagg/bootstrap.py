"""The bootstrap server, where decode workers ask for the addresses of prefill workers, over HTTP; and its clients.

It runs on one prefill worker. `POST /register` takes a `Registration`, `GET /query` answers with the engines by data-parallel
rank, as JSON. Needs aiohttp, the extra `disagg`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
from aiohttp import web

from kvactors.disagg.listening import authority, check_host, listening_socket
from kvactors.disagg.registry import EngineEntry, Registration, RegistrationConflictError, Registry
from kvactors.disagg.websockets import unreachable
from kvactors.errors import ConfigError, PeerUnreachableError, WireError
from kvactors.log import get_logger

__all__ = ["BootstrapServer", "EngineEntry", "Registration", "query", "register"]

MOST_BODY_BYTES = 64 << 10
MOST_ANSWER_BYTES = 16 << 20
"""What a client reads of an answer: 65,536 workers, some 200 bytes each."""
BODY_S = 10.0
"""How long a client may take to send its body."""
STOP_S = 1.0
"""What requests under way get to end when the server stops."""
FIRST_DELAY_S, MOST_DELAY_S = 0.1, 5.0
"""Between attempts to register: doubled each time."""

log = get_logger("kvactors.disagg.bootstrap", burst=10)


class BootstrapServer:
    """The registry of the prefill workers.

    Args:
        host, port: where to listen; port 0 = any that is free.
        public: the host is not of the loopback network, and that is meant: other machines reach it, without a password.
        setting: where the port is set, for messages to people.

    Raises:
        ConfigError: the host is not allowed, see `public`.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, public: bool = False, *, setting: str = "port") -> None:
        check_host(host, public, "bootstrap server")
        self.registry = Registry()
        self._host, self._port, self._setting = host, port, setting
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Starts to listen; returns the server's address.

        Raises:
            ConfigError: the port is in use, or the host is none of this machine's.
        """
        sock = listening_socket(self._host, self._port, "bootstrap server", self._setting)
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.router.add_post("/register", self._register)
        app.router.add_get("/query", self._query)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S)
        await self._runner.setup()
        await web.SockSite(self._runner, sock, backlog=1024).start()
        return f"http://{authority(self._host, sock.getsockname()[1])}"

    async def stop(self) -> None:
        """Stops listening. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _register(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"the body did not arrive in {BODY_S:g} s") from None
        try:
            worker = msgspec.json.decode(body, type=Registration)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("a registration makes no sense", peer=request.remote, problem=str(error))
            raise web.HTTPBadRequest(text=f"this is no registration of a worker: {error}") from None
        try:
            self.registry.register(worker)
        except RegistrationConflictError as error:
            log.warning("a registration was refused", peer=request.remote, problem=str(error))
            raise web.HTTPConflict(text=str(error)) from None
        return web.json_response({"status": "ok"})

    async def _query(self, _request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.registry.engines), content_type="application/json")


async def register(
    address: str,
    entry: Registration,
    timeout_s: float,
    attempts: int,
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Registers a prefill worker; tries again while the server is not there: the worker that runs it may come up later.

    Args:
        address: the server's, with or without "http://".
        timeout_s: of one attempt.
        attempts: at least 1; between them it waits 0.1 s, then twice as long each time, 5 s at most.

    Raises:
        ConfigError: `attempts` is below 1.
        PeerGoneError: the connection was refused, the last time too.
        PeerUnreachableError: no answer, the last time too.
        WireError: the server refuses the registration, and says why; or what answers is no bootstrap server.
    """
    if attempts < 1:
        raise ConfigError(f"attempts = {attempts}: must be at least 1")
    body, delay_s = msgspec.json.encode(entry), FIRST_DELAY_S
    for left in range(attempts - 1, -1, -1):
        try:
            await _ask("POST", address, "/register", timeout_s, body)
            return
        except PeerUnreachableError as error:
            if not left:
                raise
            log.info("the bootstrap server does not answer yet", address=address, attempts_left=left, problem=str(error))
        await sleep(delay_s)
        delay_s = min(2 * delay_s, MOST_DELAY_S)


async def query(address: str, timeout_s: float) -> dict[int, EngineEntry]:
    """The prefill engines that a bootstrap server knows, by data-parallel rank; workers may be missing (`complete`).

    Args:
        address: the server's, with or without "http://".

    Raises:
        PeerGoneError: the connection is refused.
        PeerUnreachableError: no answer in time.
        WireError: what answers is no bootstrap server of this kind.
    """
    body = await _ask("GET", address, "/query", timeout_s)
    try:
        return msgspec.json.decode(body, type=dict[int, EngineEntry])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"what answers at {address} is no bootstrap server of kvactors: {error}; check host and port") from None


async def _ask(method: str, address: str, path: str, timeout_s: float, body: bytes | None = None) -> bytes:
    url = (address if "://" in address else f"http://{address}").rstrip("/") + path
    answer = bytearray()
    async with (
        unreachable("bootstrap server", address, timeout_s),
        aiohttp.ClientSession() as session,
        session.request(method, url, data=body, allow_redirects=False) as response,
    ):
        async for chunk in response.content.iter_chunked(1 << 16):
            answer += chunk
            if len(answer) > MOST_ANSWER_BYTES:
                raise WireError(f"{url} answers with more than {MOST_ANSWER_BYTES} bytes; check host and port")
        status = response.status
    said = answer[:500].decode(errors="replace")
    if status >= 500:
        raise PeerUnreachableError(f"the bootstrap server at {address} answers {status}: {said}")
    if status != 200:
        raise WireError(f"{url} answers {status}: {said}")
    return bytes(answer)
