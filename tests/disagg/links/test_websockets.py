"""Links over real sockets: bad frames, killed and frozen peers, what a server may listen on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import msgspec
import pytest
import uvloop
from aiohttp import WSMsgType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvactors.disagg import websockets
from kvactors.disagg.links import Link
from kvactors.disagg.wire import MAX_FRAME_BYTES, Message, Problem, Refused, Sent, decode, encode
from kvactors.errors import ConfigError, LinkClosedError, PeerGoneError, PeerUnreachableError
from kvactors.log import get_logger
from tests.disagg.links.both import LIMIT_S, Held, Place, echo, raw, websocket_place

AT_ONCE_S = 5.0
"""On a busy machine; keepalive takes 25 s."""


class Kept:
    """Serves links by keeping what arrives, and why they ended."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, link: Link) -> None:
        try:
            while True:
                self.messages.append(await link.receive())
        except LinkClosedError as error:
            await self.ends.put(str(error))
            raise


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the links log, with limits of its own."""
    monkeypatch.setattr(websockets, "log", get_logger("kvactors.disagg.links", burst=10))
    handler = Logged()
    logger = logging.getLogger("kvactors.disagg.links")
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


async def works(address: str) -> None:
    """The server still serves a link."""
    link = await websockets.connect(address, LIMIT_S)
    await link.send(Sent("next"))
    await link.close()


HELLO = {"type": "hello", "protocol": 99, "anything": [1, 2]}
BAD: list[tuple[str, bytes | str, str]] = [
    # what, the frame, what the answer says
    ("nothing", b"", "0 bytes is no message"),
    ("no msgpack", b"\xc1", "1 bytes is no message"),
    ("cut short", encode(Sent("abcdef"))[:-2], "is no message"),
    ("more behind it", encode(Sent("a")) + b"\x00", "is no message"),
    ("an unknown message", msgspec.msgpack.encode({"type": "launch"}), "launch"),
    ("a field of another type", msgspec.msgpack.encode({"type": "sent", "transfer_id": 7}), "transfer_id"),
    ("a field is missing", msgspec.msgpack.encode({"type": "sent"}), "transfer_id"),
    ("an empty name", msgspec.msgpack.encode({"type": "sent", "transfer_id": ""}), "transfer_id"),
    ("broken text", b"\x82\xa4type\xa4sent\xabtransfer_id\xa1\xff", "is no message"),
    ("deep", b"\x91" * 100_000, "is no message"),
    ("another version", msgspec.msgpack.encode(HELLO), "protocol version 99"),
    ("one byte too large", b"\x00" * (MAX_FRAME_BYTES + 1), f"{MAX_FRAME_BYTES + 1} bytes is larger"),
    ("text", "hello", "a text frame of 5 characters"),
    ("empty text", "", "a text frame of 0 characters"),
]


@pytest.mark.parametrize(("frame", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
async def test_bad_frames_are_answered(frame: bytes | str, says: str, logged: list[str]) -> None:
    kept = Kept()
    async with websocket_place(kept) as place:
        async with raw(place.address) as peer:
            await (peer.send_str(frame) if isinstance(frame, str) else peer.send_bytes(frame))
            answer = decode((await peer.receive(LIMIT_S)).data)
            assert isinstance(answer, Problem)
            assert says in answer.reason
            assert (await peer.receive(LIMIT_S)).type is WSMsgType.CLOSE
            assert peer.close_code in (1003, 1008)
        assert says in await kept.ends.get()
        await works(place.address)
    assert kept.messages == [Sent("next")]
    assert any(says in text for text in logged)


BROKEN: list[tuple[str, bytes, int]] = [
    # what, bytes of a masked WebSocket frame, close code
    ("far too large", b"\x82\xff" + (1 << 40).to_bytes(8, "big"), 1009),
    ("far too large, in parts", b"\x02\x80" + bytes(4) + b"\x80\xff" + (1 << 30).to_bytes(8, "big"), 1009),
    ("an unknown kind of frame", b"\x83\x80" + bytes(4), 1002),
    ("a reserved bit", b"\xc2\x80" + bytes(4), 1002),
    ("a large control frame", b"\x89\xfe\x01\x00" + bytes(4), 1002),
    ("text that is no UTF-8", b"\x81\x81" + bytes(4) + b"\xff", 1007),
]


@pytest.mark.parametrize(("sent", "code"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
async def test_broken_frames_end_the_link(sent: bytes, code: int, logged: list[str]) -> None:
    kept = Kept()
    async with websocket_place(kept) as place:
        async with raw(place.address) as peer:
            peer._writer.transport.write(sent)
            assert (await peer.receive(LIMIT_S)).type is WSMsgType.CLOSE
            assert peer.close_code == code
        assert str(code) in await kept.ends.get()
        await works(place.address)
    assert any(f"{code}" in text for text in logged)


async def test_nothing_is_compressed() -> None:
    """A small compressed frame could grow to a large message."""
    async with (
        websocket_place(echo) as place,
        aiohttp.ClientSession() as session,
        session.ws_connect(place.address, compress=15) as peer,
    ):
        assert not peer.compress
        await peer.send_bytes(encode(Sent("a")))
        assert decode((await peer.receive(LIMIT_S)).data) == Sent("a")


async def test_a_client_answers_bad_frames_too(logged: list[str]) -> None:
    async def serve(link: Any) -> None:
        await link._socket.send_bytes(b"\xc1")
        assert isinstance(await link.receive(), Problem)
        with pytest.raises(LinkClosedError, match="1008"):
            await link.receive()
        done.set()

    done = asyncio.Event()
    async with websocket_place(serve) as place:
        link = await websockets.connect(place.address, LIMIT_S)
        with pytest.raises(LinkClosedError, match="no message"):
            await link.receive()
        await asyncio.wait_for(done.wait(), LIMIT_S)
    assert logged


async def test_bad_frames_are_logged_a_few_times_a_minute(logged: list[str]) -> None:
    kept = Kept()
    async with websocket_place(kept) as place:
        for _ in range(15):
            async with raw(place.address) as peer:
                await peer.send_bytes(b"\xc1")
                await peer.receive(LIMIT_S)
    assert len(logged) == 10


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from("btrp"), st.binary(max_size=200)), min_size=1, max_size=6))
def test_whatever_arrives_the_server_goes_on(frames: list[tuple[str, bytes]]) -> None:
    async def run() -> None:
        kept = Kept()
        async with websocket_place(kept) as place:
            async with raw(place.address) as peer:
                with contextlib.suppress(ConnectionError):
                    for kind, data in frames:
                        if kind == "b":
                            await peer.send_bytes(data)
                        elif kind == "t":
                            await peer.send_str(data.decode("latin-1"))
                        elif kind == "p":
                            await peer.ping(data[:125])
                        else:
                            peer._writer.transport.write(data)
                    await works(place.address)
                    peer._writer.transport.write_eof()
                answer = await peer.receive(LIMIT_S)
                while answer.type is WSMsgType.BINARY:
                    assert isinstance(decode(answer.data), Problem)
                    answer = await peer.receive(LIMIT_S)
                assert answer.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR)
            await asyncio.wait_for(kept.ends.get(), LIMIT_S)

    logging.disable(logging.WARNING)
    try:
        asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    finally:
        logging.disable(logging.NOTSET)


async def test_a_peer_that_sends_garbage_and_reads_nothing_is_dropped() -> None:
    """Neither the answer nor the goodbye gets through; the connection is dropped all the same, with what was kept for it."""

    async def serve(link: Any) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                while True:
                    await link.send(Refused("a", "x" * 60_000))
        full.set()
        try:
            await link.receive()
        except LinkClosedError as error:
            transport = link._socket.transport
            while transport.get_write_buffer_size():  # noqa: ASYNC110 - a transport announces nothing
                await asyncio.sleep(0.01)
            ends.put_nowait(str(error))

    ends: asyncio.Queue[str] = asyncio.Queue()
    for bad in (b"\x82\x80" + bytes(4), b"\x82\xff" + (1 << 40).to_bytes(8, "big"), b"\x88\x80" + bytes(4)):
        full = asyncio.Event()
        async with websocket_place(serve) as place, raw(place.address) as peer:
            peer._writer.transport.pause_reading()
            await full.wait()
            peer._writer.transport.write(bad)
            await asyncio.wait_for(ends.get(), LIMIT_S)


async def test_sends_that_are_given_up_do_not_pile_up() -> None:
    held = Held()
    async with websocket_place(held) as place:
        link = await websockets.connect(place.address, LIMIT_S)
        await held.links.get()
        message = Refused("a", "x" * 60_000)
        given_up = 0
        while given_up < 30:
            try:
                async with asyncio.timeout(0.002):
                    await link.send(message)
            except TimeoutError:
                given_up += 1
        assert link._socket.transport is not None
        assert link._socket.transport.get_write_buffer_size() < 5 * 60_000
        await link.close()
        held.release.set()


async def lost(link: websockets.WebSocketLink) -> None:
    """Until the connection is."""
    assert link._socket.transport is not None
    while not link._socket.transport.is_closing():  # noqa: ASYNC110 - a transport announces nothing
        await asyncio.sleep(0.001)


async def test_what_arrived_before_the_end_is_received_after_a_failed_send() -> None:
    async def serve(link: Any) -> None:
        await link.send(Sent("a"))
        await link.close("I leave")
        left.set()

    left = asyncio.Event()
    async with websocket_place(serve) as place:
        link = await websockets.connect(place.address, LIMIT_S)
        await left.wait()
        await lost(link)
        with pytest.raises(LinkClosedError, match="sending failed"):
            await link.send(Sent("b"))
        assert [await link.receive(), await link.receive()] == [Sent("a"), Problem("I leave")]
        with pytest.raises(LinkClosedError, match="closed by the peer"):
            await link.receive()


async def test_links_that_say_nothing_cost_the_caller_its_own_time_limit() -> None:
    async def serve(link: Any) -> None:
        with pytest.raises(TimeoutError):
            await link.receive(0.01)
        await link.close("say Hello at once")

    async with websocket_place(serve) as place, raw(place.address) as peer:
        assert decode((await peer.receive(LIMIT_S)).data) == Problem("say Hello at once")
        assert (await peer.receive(LIMIT_S)).type is WSMsgType.CLOSE


async def test_a_serve_that_raises_is_logged_and_others_go_on(logged: list[str]) -> None:
    async def serve(link: Link) -> None:
        message = await link.receive()
        if message == Sent("bad"):
            raise ValueError("a bug")
        await link.send(message)

    async with websocket_place(serve) as place:
        bad, good = [await websockets.connect(place.address, LIMIT_S) for _ in range(2)]
        await bad.send(Sent("bad"))
        with pytest.raises(LinkClosedError):
            await bad.receive()
        await good.send(Sent("good"))
        assert await good.receive() == Sent("good")
        await good.close()
    assert any("a bug" in text for text in logged)


async def test_keepalive_is_on_at_both_ends() -> None:
    held = Held()
    async with websocket_place(held) as place:
        link = await websockets.connect(place.address, LIMIT_S)
        far = await held.links.get()
        for end in (link, far):
            sock = end._socket.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [10, 5, 3]
        await link.close()
        held.release.set()


async def test_nobody_is_kept_when_links_have_ended() -> None:
    """Links that come and go leave neither tasks nor memory."""
    async with websocket_place(echo) as place:
        before = len(asyncio.all_tasks())
        tracemalloc.start()
        try:
            for i in range(60):
                if i == 20:
                    began = tracemalloc.get_traced_memory()[0]
                link = await websockets.connect(place.address, LIMIT_S)
                await link.send(Refused("a", "x" * 60_000))
                await link.receive()
                await link.close()
            grown = tracemalloc.get_traced_memory()[0] - began
        finally:
            tracemalloc.stop()
        await place.stop()
        assert len(asyncio.all_tasks()) <= before
        assert grown < 1_000_000, "40 links of 60 KB"


CHILD = """
import asyncio, sys
from kvactors.disagg.websockets import LinkServer, connect

async def serve(link):
    while True:
        await link.send(await link.receive())

async def main():
    if len(sys.argv) > 1:
        link = await connect(sys.argv[1], 20.0)
        await serve(link)
    print(await LinkServer(serve).start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def child(*args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD,
        *args,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_server_is_noticed_at_once() -> None:
    async with child() as process:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        link = await websockets.connect(address, LIMIT_S)
        await link.send(Sent("a"))
        assert await link.receive() == Sent("a")
        waiting = asyncio.create_task(link.receive())
        await asyncio.sleep(0)
        process.kill()
        with pytest.raises(LinkClosedError):
            await asyncio.wait_for(waiting, AT_ONCE_S)
        with pytest.raises(LinkClosedError):
            await link.send(Sent("b"))
        await process.wait()
        with pytest.raises(PeerGoneError, match=address):
            await websockets.connect(address, LIMIT_S)


async def test_a_killed_client_is_noticed_at_once() -> None:
    held = Held()
    async with websocket_place(held) as place, child(place.address) as process:
        far = await asyncio.wait_for(held.links.get(), LIMIT_S)
        waiting = asyncio.create_task(far.receive())
        await asyncio.sleep(0)
        process.kill()
        with pytest.raises(LinkClosedError):
            await asyncio.wait_for(waiting, AT_ONCE_S)
        held.release.set()


async def test_a_frozen_server_is_not_gone() -> None:
    async with child() as process:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        link = await websockets.connect(address, LIMIT_S)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerUnreachableError, match=r"does not answer in 0\.1 s") as caught:
            await websockets.connect(address, 0.1)
        assert not isinstance(caught.value, PeerGoneError)
        await link.send(Sent("a"))
        with pytest.raises(TimeoutError):
            await link.receive(0.02)
        process.send_signal(signal.SIGCONT)
        assert await link.receive(LIMIT_S) == Sent("a")
        await link.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


async def test_who_does_not_answer() -> None:
    gone = f"ws://127.0.0.1:{free_port()}/handoff"
    with pytest.raises(PeerGoneError, match=f"listens at {gone}"):
        await websockets.connect(gone, LIMIT_S)
    async with websocket_place(echo) as place:
        for address in (place.address + "/other", "nonsense", "ws://127.0.0.1:70000/", "ws://", "ftp://127.0.0.1/"):
            with pytest.raises(PeerUnreachableError, match=address) as caught:
                await websockets.connect(address, LIMIT_S)
            assert not isinstance(caught.value, PeerGoneError), address


@pytest.mark.parametrize(
    ("number", "gone"),
    [
        (errno.ECONNREFUSED, True),
        (errno.ENETUNREACH, False),
        (errno.EHOSTUNREACH, False),
        (errno.ETIMEDOUT, False),
        (errno.ECONNRESET, False),
        (errno.EMFILE, False),
        (None, False),
    ],
)
async def test_only_a_refused_connection_says_that_a_peer_is_gone(number: int | None, gone: bool) -> None:
    error = aiohttp.ClientConnectorError(cast(Any, None), OSError(number, "as if"))
    with pytest.raises(PeerUnreachableError, match="ws://h:1") as caught:
        async with websockets.unreachable("worker", "ws://h:1", LIMIT_S):
            raise error
    assert isinstance(caught.value, PeerGoneError) == gone
    assert "as if" in str(caught.value)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"SSH-2.0-x\r\n"])
async def test_who_answers_something_else(says: bytes) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
        writer.write(says)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    answering: list[Any] = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    with pytest.raises(PeerUnreachableError) as caught:
        await websockets.connect(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/handoff", LIMIT_S)
    assert not isinstance(caught.value, PeerGoneError)
    server.close()
    await asyncio.gather(*answering)


async def test_a_connect_that_is_given_up_leaves_nothing() -> None:
    connected = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
            writer.close()
            await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    task = asyncio.create_task(websockets.connect(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/handoff", LIMIT_S))
    await connected.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), LIMIT_S)
    server.close()


@pytest.mark.parametrize("turns", range(8))
async def test_a_stop_that_is_cancelled_is_gone_on_with(turns: int) -> None:
    """Wherever it was: nobody listens afterwards, and the link has ended."""
    served = Kept()
    server = websockets.LinkServer(served)
    address = await server.start()
    link = await websockets.connect(address, LIMIT_S)
    await link.send(Sent("a"))
    stopping = asyncio.ensure_future(server.stop())
    for _ in range(turns):
        await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait({stopping})
    await asyncio.wait_for(server.stop(), LIMIT_S)
    with pytest.raises(LinkClosedError):
        await asyncio.wait_for(link.receive(), LIMIT_S)
    await link.close()
    with pytest.raises(PeerUnreachableError):
        await websockets.connect(address, LIMIT_S)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7", "a-name"])
def test_hosts_that_others_reach_have_to_be_asked_for(host: str) -> None:
    with pytest.raises(ConfigError, match="public=True"):
        websockets.LinkServer(echo, host)
    if host in ("0.0.0.0", "::", ""):
        with pytest.raises(ConfigError, match="advertise="):
            websockets.LinkServer(echo, host, public=True)
    websockets.LinkServer(echo, host, public=True, advertise="prefill-0")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_hosts_of_this_machine_alone(host: str) -> None:
    websockets.LinkServer(echo, host)


async def test_ports() -> None:
    first = websockets.LinkServer(echo)
    address = await first.start()
    port = int(address.split(":")[2].split("/")[0])
    with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use.*link_port"):
        await websockets.LinkServer(echo, port=port, setting="link_port").start()
    await first.stop()
    await first.stop()
    again = websockets.LinkServer(echo, port=port)
    assert await again.start() == address
    await again.stop()
    with pytest.raises(ConfigError, match="link_port = 65536"):
        await websockets.LinkServer(echo, port=65536, setting="link_port").start()
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7"):
        await websockets.LinkServer(echo, "192.0.2.7", public=True).start()


def test_it_works_on_uvloop() -> None:
    async def run() -> None:
        async with websocket_place(echo) as place:
            link = await websockets.connect(place.address, LIMIT_S)
            await link.send(Refused("a", "x" * 60_000))
            assert await link.receive() == Refused("a", "x" * 60_000)
            await place.stop()
            with pytest.raises(LinkClosedError, match="1001: the worker stops"):
                await link.receive()
            with pytest.raises(PeerGoneError):
                await websockets.connect(place.address, LIMIT_S)

    uvloop.run(run())


def test_stopping_while_links_are_opened() -> None:
    async def run(place: Place) -> None:
        async def talk() -> None:
            link = await websockets.connect(place.address, LIMIT_S)
            await link.receive()

        tasks = [asyncio.create_task(talk()) for _ in range(20)]
        await asyncio.sleep(0.005)
        await place.stop()
        for task in tasks:
            with pytest.raises((LinkClosedError, PeerUnreachableError)):
                await asyncio.wait_for(task, LIMIT_S)

    async def main() -> None:
        async with websocket_place(echo) as place:
            await run(place)

    asyncio.run(main())
