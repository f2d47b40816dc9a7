"""Where a live view may be, and how its readers find it."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from kvactors.errors import ConfigError
from kvactors.live.address import MOST_PATH_BYTES, SCHEDULER, VARIABLE, Address, found_addresses, live_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("/run/x/live.sock", Address(path="/run/x/live.sock")),
        ("live.sock", Address(path="live.sock")),
        ("here/live", Address(path="here/live")),
        ("./name", Address(path="./name")),
        ("/run/a:1", Address(path="/run/a:1")),
        ("127.0.0.1:9400", Address(host="127.0.0.1", port=9400)),
        ("127.8.0.1:1", Address(host="127.8.0.1", port=1)),
        ("localhost:9400", Address(host="127.0.0.1", port=9400)),
        ("[::1]:9400", Address(host="::1", port=9400)),
    ],
)
def test_an_address_is_a_path_or_a_port_of_this_machine(text: str, address: Address) -> None:
    assert Address.of(text) == address
    assert Address.of(str(address)) == address


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no address"),
        (" ", "no address"),
        ("a\0b", "no address"),
        ("relative", r"a path has a slash or ends in .sock \(./relative, relative.sock\)"),
        ("9400", "and a port is given as 127.0.0.1:PORT"),
        ("1", "no address of a live view"),
        ("0.0.0.0:9400", "not this machine's loopback"),
        ("10.0.0.1:9400", "not this machine's loopback"),
        ("[::]:9400", "not this machine's loopback"),
        ("[::ffff:10.0.0.1]:9400", "not this machine's loopback"),
        ("example.org:9400", "not this machine's loopback"),
        (":9400", "no host is not this machine's loopback"),
        ("127.0.0.1:0", "no port"),
        ("127.0.0.1:65536", "no port"),
        ("127.0.0.1:x", "no port"),
        ("127.0.0.1:", "no port"),
        (f"/{'x' * MOST_PATH_BYTES}", f"longer than the {MOST_PATH_BYTES} bytes"),
    ],
)
def test_what_others_could_reach_or_nobody_could_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Address.of(text)


@pytest.mark.parametrize(
    ("text", "rank", "replica", "becomes"),
    [
        ("/run/live.sock", "0", 0, "/run/live.rank0.sock"),
        ("/run/live.sock", "11", 0, "/run/live.rank11.sock"),
        ("/run/live.sock", SCHEDULER, 0, "/run/live.scheduler.sock"),
        ("/run/live.sock", "1", 2, "/run/live.dp2.rank1.sock"),
        ("/run/live", "0", 0, "/run/live.rank0.sock"),
        ("127.0.0.1:9400", SCHEDULER, 0, "127.0.0.1:9400"),
        ("127.0.0.1:9400", "0", 0, "127.0.0.1:9401"),
        ("127.0.0.1:9400", "3", 1, "127.0.0.1:9409"),
    ],
)
def test_each_rank_has_an_address_of_its_own(text: str, rank: str, replica: int, becomes: str) -> None:
    assert str(Address.of(text).of_rank(rank, ranks=4, replica=replica)) == becomes


def test_a_port_out_of_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="65536"):
        Address.of("127.0.0.1:65535").of_rank("0")


def test_an_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert live_address() is None
    monkeypatch.setenv(VARIABLE, "/run/a.sock")
    assert live_address() == Address(path="/run/a.sock")
    assert live_address("/run/b.sock") == Address(path="/run/b.sock")
    monkeypatch.setenv(VARIABLE, "0.0.0.0:1")
    with pytest.raises(ConfigError):
        live_address()


def test_readers_find_sockets_by_path_directory_and_base_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for name in ("live.rank1.sock", "live.rank0.sock", "live.scheduler.sock", "other.sock"):
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].bind(str(tmp_path / name))
    (tmp_path / "live.notes.sock").write_text("no socket")

    def names(*given: str) -> list[str]:
        return [Path(a.path).name for a in found_addresses(given)]

    ranks = ["live.rank0.sock", "live.rank1.sock", "live.scheduler.sock"]
    assert names(str(tmp_path)) == [*ranks, "other.sock"]
    assert names(str(tmp_path / "live.sock")) == ranks
    assert names(str(tmp_path / "live")) == ranks
    with contextlib.chdir(tmp_path):  # a name alone is enough to read from
        assert [str(a) for a in found_addresses(["live"])] == ranks
        with socket.socket(socket.AF_UNIX) as bare:
            bare.bind("bare")
            assert found_addresses(["bare"]) == [Address(path="./bare")]
        Path("bare").unlink()
        with pytest.raises(ConfigError, match="nothing: there is nothing of this name"):
            found_addresses(["nothing"])
    assert names(str(tmp_path / "other.sock"), str(tmp_path)) == ["other.sock", *ranks]
    assert found_addresses(["127.0.0.1:9"]) == [Address(host="127.0.0.1", port=9)]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "live.sock"))
    assert names() == ranks
    monkeypatch.delenv(VARIABLE)
    (tmp_path / "empty").mkdir()
    bad = {(): "which engine", (str(tmp_path / "no.sock"),): "nothing of this name", (str(tmp_path / "empty"),): "no socket is"}
    for given, says in bad.items():
        with pytest.raises(ConfigError, match=says):
            found_addresses(given)
    for each in made:
        each.close()
