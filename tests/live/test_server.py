"""The endpoint: what it serves, whom it refuses, and that nobody can stop it or hold it up."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvactors.errors import ConfigError
from kvactors.live import Address, LiveView, server
from kvactors.live.address import MOST_PATH_BYTES
from kvactors.live.client import get as client_get
from kvactors.live.client import read_snapshot
from kvactors.live.listener import Listener
from tests.engine.rig import Rig, full_layout, hashes
from tests.live.asking import get, parsed, send, viewed


async def until(holds: Callable[[], bool]) -> None:
    """Waits for something on the view's own thread."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - an event of another thread
            await asyncio.sleep(0.002)


def inside(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_every_path_answers_and_nothing_else_does(tmp_path: Path) -> None:
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path, name="rig") as view:
            await rig.save("a", hashes(1))
            at = view.address.path
            assert (await get(at, "/")).body.startswith(b"kvactors ")
            snapshot = await get(at, "/snapshot")
            assert "Content-Type: application/json\r\n" in snapshot.head
            assert f"Content-Length: {len(snapshot.body)}" in snapshot.head
            assert snapshot.json["name"] == "rig"
            assert b"# TYPE kvactors_saved_bytes_total counter" in (await get(at, "/metrics?x=1")).body
            assert (await get(at, "/stories")).json == ["a"]
            assert (await get(at, "/story?request=a")).json[0]["request"] == "a"
            assert (await get(at, "/story?request=b")).status == 404
            assert (await get(at, "/story")).status == 400
            assert (await get(at, "/etc/passwd")).status == 404
            assert (await get(at, "/../snapshot")).status == 404


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /snapshot HTTP/1.0\r\n\r\n", 405),
        (b"HEAD /snapshot HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"GET /snapshot\r\n\r\n", 400),
        (b"GET /snapshot HTTP/2\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x00\xff\xfe\n\n", 400),
        (b"\x16\x03\x01 tls hello\r\n\r\n", 400),
        (b"GET http://[/ HTTP/1.0\r\n\r\n", 400),
        (b"GET /story?request=%00%ff HTTP/1.0\r\n\r\n", 404),
        (b"GET /story?" + b"a=1&" * 20 + b" HTTP/1.0\r\n\r\n", 400),
        (b"GET /snapshot HTTP/1.0\nHost: localhost\n\n", 200),
        (b"GET /" + b"x" * 8000 + b" HTTP/1.0\r\n\r\n", 431),
        (b"GET /snapshot HTTP/1.0\r\n" + b"X: y\r\n" * 1000 + b"\r\n", 431),
    ],
)
async def test_garbage_gets_one_answer(tmp_path: Path, request_: bytes, status: int) -> None:
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path) as view:
            answer = await send(view.address.path, request_)
            assert answer.status == status
            assert status == 200 or set(answer.json) == {"error"}
            assert (await get(view.address.path, "/snapshot")).status == 200


async def test_a_request_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_S", 0.05)
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path) as view:
            reader, writer = await asyncio.open_unix_connection(view.address.path)
            writer.write(b"GET /snapshot HTTP/1.0\r\n")
            assert parsed(await asyncio.wait_for(reader.read(), 10)).status == 408
            writer.close()
            reader, writer = await asyncio.open_unix_connection(view.address.path)
            writer.write(b"GET /snapshot HTTP/1.0\r\n")
            writer.write_eof()
            assert parsed(await asyncio.wait_for(reader.read(), 10)).status == 400
            writer.close()


async def test_a_client_that_goes_away_is_no_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path) as view:
            for request in (b"", b"GET /snap", b"GET /snapshot HTTP/1.0\r\n\r\n"):
                for _ in range(5):
                    client = socket.socket(socket.AF_UNIX)
                    client.connect(view.address.path)
                    client.sendall(request)
                    client.close()
            await until(lambda: not view._server._clients)
            assert (await get(view.address.path, "/snapshot")).status == 200
    assert not [r for r in caplog.records if r.name == "kvactors.live"]


async def test_a_client_that_takes_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_S", 0.05)
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path) as view:
            big = server.Reply(200, b"x" * (4 << 20))

            async def answer(_query: object) -> server.Reply:
                return big

            view._server._routes = {**view._server._routes, "/big": answer}
            reader, writer = await asyncio.open_unix_connection(view.address.path)
            writer.write(b"GET /big HTTP/1.0\r\n\r\n")
            await until(lambda: bool(view._server._clients))
            await until(lambda: not view._server._clients)
            assert len(await asyncio.wait_for(reader.read(), 10)) < len(big.body)
            writer.close()


async def test_a_hundred_clients_and_a_hundred_that_say_nothing_hold_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "READ_S", 0.05)
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path) as view:
            silent = [socket.socket(socket.AF_UNIX) for _ in range(100)]  # more than are heard at once, and wait
            for each in silent:
                each.setblocking(False)
                each.connect_ex(view.address.path)
            await rig.save("a", hashes(1))  # the engine takes no notice
            assert (await rig.engine.lookup(hashes(1), 17)).tokens == 16
            for each in silent:
                each.close()
            monkeypatch.undo()
            answers = await asyncio.gather(*(get(view.address.path, "/snapshot") for _ in range(100)))
            assert {a.status for a in answers} == {200}
            assert len({a.json["at_s"] for a in answers}) < 60, "many readers cost as much as one"


async def test_the_socket_is_its_owners_alone_and_goes_with_the_view(tmp_path: Path) -> None:
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path) as view:
            mode = os.lstat(view.address.path).st_mode
            assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
            assert inside(tmp_path) == ["live.sock"]
        view.close()
        assert inside(tmp_path) == []


async def test_a_stale_socket_is_replaced_and_a_used_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "live.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path) as view:
            assert (await get(path, "/snapshot")).status == 200
            with pytest.raises(ConfigError, match="in use by another engine"):
                LiveView(rig.engine, view.address)
            assert (await get(path, "/snapshot")).status == 200
            assert inside(tmp_path) == ["live.sock"]
    path.write_text("mine")
    async with Rig(full_layout()) as rig:
        with pytest.raises(ConfigError, match="is no socket"):
            LiveView(rig.engine, Address.of(str(path)))
        with pytest.raises(ConfigError, match="No such file"):
            LiveView(rig.engine, Address.of(str(tmp_path / "no" / "live.sock")))
    assert path.read_text() == "mine"


def test_of_several_that_start_at_the_same_time_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "live.sock"
    for _ in range(5):
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(str(path))
        stale.close()
        won: list[Listener] = []
        lost: list[ConfigError] = []
        ready = threading.Barrier(6)

        def start(won: list[Listener] = won, lost: list[ConfigError] = lost, ready: threading.Barrier = ready) -> None:
            ready.wait(10)
            try:
                won.append(Listener(Address.of(str(path))))
            except ConfigError as error:
                lost.append(error)

        threads = [threading.Thread(target=start) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert (len(won), len(lost)) == (1, 5)
        assert inside(tmp_path) == ["live.sock"]
        won[0].close()
        assert inside(tmp_path) == []


def test_the_longest_name_that_a_socket_may_have(tmp_path: Path) -> None:
    folder = tmp_path
    while len(str(folder)) < MOST_PATH_BYTES - 30:
        folder = folder / "deep"
        folder.mkdir()
    path = folder / ("y" * (MOST_PATH_BYTES - len(str(folder)) - 1))
    with LiveView(None, Address.of(str(path)), name="far") as view:
        assert read_snapshot(view.address).name == "far"


async def test_a_socket_that_took_the_views_place_stays(tmp_path: Path) -> None:
    path = tmp_path / "live.sock"
    async with Rig(full_layout()) as rig:
        with viewed(rig.engine, tmp_path):
            path.unlink()
            other = socket.socket(socket.AF_UNIX)
            other.bind(str(path))
        assert path.is_socket()
        other.close()


async def test_a_port_answers_this_machine_and_refuses_other_hosts_names() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with LiveView(None, Address.of(f"127.0.0.1:{port}"), rank="scheduler") as view:
        assert read_snapshot(view.address).rank == "scheduler"
        for host, status in (("localhost:9", 200), ("127.0.0.1", 200), ("127.1.evil.org", 403), ("evil.org", 403)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /snapshot HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert parsed(await reader.read()).status == status
            writer.close()
        with pytest.raises(ConfigError, match="Address already in use"):
            LiveView(None, view.address)


async def test_a_view_outlives_its_engine_and_ends_while_clients_wait(tmp_path: Path) -> None:
    rig = Rig(full_layout())
    await rig.engine.start()
    with viewed(rig.engine, tmp_path) as view:
        await rig.engine.close()
        assert read_snapshot(view.address).state == "closed"
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(view.address.path)
        assert (await get(view.address.path, "/snapshot")).status == 200
    assert waiting.recv(1) == b""
    waiting.close()
    rig.memory.close()
    assert not any(t.name == "kvactors live" for t in threading.enumerate())


async def test_what_raises_inside_is_an_answer(tmp_path: Path) -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("no counts")

    with viewed(None, tmp_path, totals=broken) as view:
        answer = await get(view.address.path, "/snapshot")
        assert (answer.status, "its log says why" in answer.json["error"]) == (500, True)
        assert client_get(view.address, "/").startswith(b"kvactors")


def test_nothing_is_opened_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvactors.live import view_of_rank

    monkeypatch.delenv("KVACTORS_LIVE", raising=False)
    assert view_of_rank("", None, "0") is None
    monkeypatch.setenv("KVACTORS_LIVE", str(tmp_path / "live.sock"))
    view = view_of_rank("", None, "1")
    assert view is not None
    assert view_of_rank("", None, "1") is None, "taken: serving goes on without"
    assert inside(tmp_path) == ["live.rank1.sock"]
    view.close()
    with pytest.raises(ConfigError):
        view_of_rank("0.0.0.0:9", None, "0")
