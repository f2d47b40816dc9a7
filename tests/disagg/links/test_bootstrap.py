"""The registry of prefill workers, and its server and clients over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec
import pytest

from kvactors.disagg.bootstrap import BootstrapServer, EngineEntry, Registration, query, register
from kvactors.disagg.registry import RegistrationConflictError, Registry
from kvactors.errors import ConfigError, PeerGoneError, PeerUnreachableError, WireError
from tests.disagg.links.both import LIMIT_S


def worker(**fields: Any) -> Registration:
    whole = {"engine_id": "e", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "ws://h:1/handoff", "tp_size": 2, "pp_size": 2}
    return Registration(**{**whole, **fields})


@asynccontextmanager
async def bootstrap() -> AsyncIterator[str]:
    server = BootstrapServer()
    try:
        yield await server.start()
    finally:
        await server.stop()


def test_an_engine_is_complete_when_all_its_workers_are_there() -> None:
    ranks = list(itertools.product(range(2), range(2)))
    random.Random(1).shuffle(ranks)
    registry = Registry()
    for tp_rank, pp_rank in ranks:
        assert not any(engine.complete for engine in registry.engines.values())
        for _ in range(2):  # said twice is said once
            registry.register(worker(tp_rank=tp_rank, pp_rank=pp_rank, addr=f"ws://{tp_rank}-{pp_rank}"))
    assert registry.engines[0].complete
    assert registry.engines[0].worker_addr == {
        tp_rank: {pp_rank: f"ws://{tp_rank}-{pp_rank}" for pp_rank in range(2)} for tp_rank in range(2)
    }


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"addr": "ws://other"}, r"addr: .*ws://h:1/handoff.*ws://other"),
        ({"tp_rank": 1, "tp_size": 4}, r"tp_size: .*tp_size 2.*says 4"),
        ({"pp_rank": 1, "pp_size": 3}, r"pp_size: .*pp_size 2.*says 3"),
    ],
)
def test_what_contradicts_is_refused(fields: dict[str, Any], says: str) -> None:
    registry = Registry()
    registry.register(worker())
    before = msgspec.json.encode(registry.engines)
    with pytest.raises(RegistrationConflictError, match=says):
        registry.register(worker(**fields))
    assert msgspec.json.encode(registry.engines) == before


def test_an_engine_that_starts_again_replaces_the_former_one() -> None:
    registry = Registry()
    for rank in range(2):
        registry.register(worker(tp_rank=rank, pp_size=1))
        registry.register(worker(tp_rank=rank, pp_size=1, dp_rank=1, engine_id="neighbour"))
    registry.register(worker(engine_id="e2", tp_size=1, pp_size=1, addr="ws://new"))
    assert registry.engines[0] == EngineEntry(engine_id="e2", worker_addr={0: {0: "ws://new"}}, tp_size=1, pp_size=1)
    assert registry.engines[1].complete
    with pytest.raises(RegistrationConflictError, match="taken over from engine e by engine e2"):
        registry.register(worker(tp_rank=1, pp_size=1))
    assert registry.engines[0].engine_id == "e2"


async def test_the_answer_is_what_proxies_read() -> None:
    async with bootstrap() as address:
        await register(address, worker(tp_size=1, pp_size=1), LIMIT_S, 1)
        async with aiohttp.ClientSession() as session, session.get(f"{address}/query") as answer:
            assert answer.content_type == "application/json"
            assert json.loads(await answer.text()) == {
                "0": {"engine_id": "e", "worker_addr": {"0": {"0": "ws://h:1/handoff"}}, "tp_size": 1, "pp_size": 1}
            }


@pytest.mark.parametrize("form", ["{}", "{}/", "bare"])
async def test_addresses_with_and_without_a_scheme(form: str) -> None:
    async with bootstrap() as address:
        given = address.removeprefix("http://") if form == "bare" else form.format(address)
        assert await query(given, LIMIT_S) == {}
        await register(given, worker(), LIMIT_S, 1)
        (engine,) = (await query(given, LIMIT_S)).values()
        assert not engine.complete


async def test_registrations_race() -> None:
    ranks = list(itertools.product(range(3), range(4), range(2)))
    random.Random(2).shuffle(ranks)
    async with bootstrap() as address:

        async def one(dp_rank: int, tp_rank: int, pp_rank: int) -> None:
            entry = worker(
                engine_id=f"e{dp_rank}",
                dp_rank=dp_rank,
                tp_rank=tp_rank,
                pp_rank=pp_rank,
                tp_size=4,
                addr=f"ws://{tp_rank}.{pp_rank}",
            )
            await register(address, entry, LIMIT_S, 1)

        await asyncio.gather(*(one(*rank) for rank in ranks for _ in range(2)))
        engines = await query(address, LIMIT_S)
    assert sorted(engines) == [0, 1, 2]
    for dp_rank, engine in engines.items():
        assert engine.engine_id == f"e{dp_rank}"
        assert engine.complete
        assert engine.worker_addr == {tp: {pp: f"ws://{tp}.{pp}" for pp in range(2)} for tp in range(4)}


GOOD = json.loads(msgspec.json.encode(worker()))
BAD_BODIES: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "truncated"),
    ("no JSON", b"\xff{", "malformed"),
    ("a list", b"[]", "object"),
    *[(f"without {field}", json.dumps({k: v for k, v in GOOD.items() if k != field}).encode(), field) for field in GOOD],
    *[(f"{field} null", json.dumps({**GOOD, field: None}).encode(), field) for field in GOOD],
    ("an empty id", json.dumps({**GOOD, "engine_id": ""}).encode(), "engine_id"),
    ("a long address", json.dumps({**GOOD, "addr": "x" * 513}).encode(), "addr"),
    ("a negative rank", json.dumps({**GOOD, "dp_rank": -1}).encode(), "dp_rank"),
    ("a rank as text", json.dumps({**GOOD, "tp_rank": "0"}).encode(), "tp_rank"),
    ("a rank beyond the size", json.dumps({**GOOD, "tp_rank": 2}).encode(), "tp_rank"),
    ("a stage beyond the size", json.dumps({**GOOD, "pp_rank": 2}).encode(), "pp_rank"),
    ("no ranks at all", json.dumps({**GOOD, "tp_size": 0}).encode(), "tp_size"),
    ("a huge number", json.dumps({**GOOD, "pp_size": 1 << 70}).encode(), "pp_size"),
]


@pytest.mark.parametrize(("body", "says"), [row[1:] for row in BAD_BODIES], ids=[row[0] for row in BAD_BODIES])
async def test_bad_bodies_are_refused(body: bytes, says: str) -> None:
    async with bootstrap() as address, aiohttp.ClientSession() as session:
        async with session.post(f"{address}/register", data=body) as answer:
            assert answer.status == 400
            assert says in await answer.text()
        assert await query(address, LIMIT_S) == {}


async def test_other_requests_are_refused() -> None:
    def parts() -> AsyncIterator[bytes]:
        async def each() -> AsyncIterator[bytes]:
            for _ in range(9):
                yield b" " * 8192

        return each()

    rows: list[tuple[str, str, Any, int]] = [
        ("GET", "/", None, 404),
        ("GET", "/query/more", None, 404),
        ("POST", "/elsewhere", b"{}", 404),
        ("GET", "/register", None, 405),
        ("POST", "/query", b"{}", 405),
        ("POST", "/register", b" " * (65 << 10), 413),
        ("POST", "/register", parts(), 413),
    ]
    async with bootstrap() as address, aiohttp.ClientSession() as session:
        for method, path, body, status in rows:
            async with session.request(method, address + path, data=body) as answer:
                assert answer.status == status, (method, path)
        await register(address, worker(), LIMIT_S, 1)


async def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvactors.disagg.bootstrap.BODY_S", 0.05)
    async with bootstrap() as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]))
        writer.write(b"POST /register HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), LIMIT_S)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_conflict_is_told_and_not_tried_again() -> None:
    async with bootstrap() as address:
        await register(address, worker(), LIMIT_S, 1)
        with pytest.raises(WireError, match=r"409.*addr"):
            await register(address, worker(addr="ws://other"), LIMIT_S, 5, sleep=never)


async def never(_delay_s: float) -> None:
    raise AssertionError("it waits")


async def test_a_server_that_comes_up_later() -> None:
    server = BootstrapServer()
    address = await server.start()
    await server.stop()
    delays: list[float] = []
    late: list[BootstrapServer] = []

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)
        if len(delays) == 8:
            late.append(BootstrapServer(port=int(address.rsplit(":", 1)[1])))
            await late[0].start()

    await register(address, worker(), LIMIT_S, 10, sleep=sleep)
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert late[0].registry.engines[0].engine_id == "e"
    await late[0].stop()
    delays.clear()
    with pytest.raises(PeerGoneError, match=address):
        await register(address, worker(), LIMIT_S, 3, sleep=sleep)
    assert delays == [0.1, 0.2]
    with pytest.raises(PeerGoneError, match=address):
        await query(address, LIMIT_S)
    with pytest.raises(ConfigError, match="attempts = 0"):
        await register(address, worker(), LIMIT_S, 0)


NONSENSE: list[tuple[str, bytes | None, type[Exception], str]] = [
    # what, what is answered (None: nothing), the error, what it says
    ("nothing", None, PeerUnreachableError, "does not answer"),
    ("not HTTP", b"SSH-2.0\r\n", PeerUnreachableError, "cannot be reached"),
    ("closed", b"", PeerUnreachableError, "cannot be reached"),
    ("no JSON", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", WireError, "no bootstrap server"),
    ("no UTF-8", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe", WireError, "no bootstrap server"),
    ("other JSON", b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"a": {}}', WireError, "no bootstrap server"),
    (
        "no sizes",
        b'HTTP/1.1 200 OK\r\nContent-Length: 45\r\n\r\n{"0": {"engine_id": "e", "worker_addr": {} }}\n',
        WireError,
        "tp_size",
    ),
    ("another page", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", WireError, "404"),
    ("elsewhere", b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", WireError, "302"),
    ("in trouble", b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", PeerUnreachableError, "503"),
    ("cut short", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", PeerUnreachableError, "cannot be reached"),
]


@pytest.mark.parametrize(("says", "error", "told"), [row[1:] for row in NONSENSE], ids=[row[0] for row in NONSENSE])
async def test_answers_that_make_no_sense(says: bytes | None, error: type[Exception], told: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        if says is None:
            await reader.read()
        else:
            writer.write(says)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    answering: list[Any] = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(error, match=told) as caught:
        await query(address, 0.1 if says is None else LIMIT_S)
    assert type(caught.value) is error
    assert address in str(caught.value)
    server.close()
    await asyncio.gather(*answering)


async def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvactors.disagg.bootstrap.MOST_ANSWER_BYTES", 20)
    async with bootstrap() as address:
        await register(address, worker(), LIMIT_S, 1)
        with pytest.raises(WireError, match="more than 20 bytes"):
            await query(address, LIMIT_S)


@pytest.mark.parametrize("address", ["", "http://", "ftp://127.0.0.1:1", "127.0.0.1:70000"])
async def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(PeerUnreachableError) as caught:
        await query(address, LIMIT_S)
    assert not isinstance(caught.value, PeerGoneError)


async def test_hosts_and_ports() -> None:
    with pytest.raises(ConfigError, match=r"bootstrap server.*public=True"):
        BootstrapServer("0.0.0.0", 0)
    BootstrapServer("0.0.0.0", 0, public=True)
    async with bootstrap() as address:
        port = int(address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"bootstrap server: port {port} .*bootstrap_port"):
            await BootstrapServer("127.0.0.1", port, setting="bootstrap_port").start()


def test_aiohttp_is_imported_by_nothing_else() -> None:
    modules = "kvactors, kvactors.disagg, kvactors.disagg.memory_links, kvactors.disagg.registry, kvactors.disagg.listening"
    code = f"import sys; sys.modules['aiohttp'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
