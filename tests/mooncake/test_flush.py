"""`kvactors store flush`: the objects of one namespace go, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvactors.cli import cli
from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.store import Outcome
from kvactors.stores import LocalMaster, MooncakeStore
from kvactors.stores.mooncake.config import CONFIG_PATH

OK = Outcome.OK


def flush(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["store", "flush", *arguments])


def key(model: str, number: int = 0, namespace: str | None = None) -> str:
    layout = KVLayout(model, [Group(0, GroupKind.FULL, 16, {0: [CacheEntry("k", 8)]})])
    if namespace is not None:
        layout = layout.with_namespace(namespace)
    return layout.key(0, bytes([number] * 8))


@pytest.fixture(scope="module")
def patient() -> Iterator[LocalMaster]:
    """Its leases last longer than a test."""
    with LocalMaster(lease_s=600.0) as master:
        yield master


@pytest.fixture(scope="module")
def store(patient: LocalMaster) -> Iterator[MooncakeStore]:
    made = MooncakeStore(**patient.options(), global_segment_size=16 << 20)
    yield made
    made.close()


@pytest.fixture
def put(store: MooncakeStore) -> Iterator[list[str]]:
    """Keys that the test puts; gone afterwards."""
    keys: list[str] = []
    yield keys
    for one in keys:
        store.remove(one, force=True)


def fill(store: MooncakeStore, put: list[str], *keys: str) -> None:
    put.extend(keys)
    assert store.put_open(keys, [8] * len(keys)) == [OK] * len(keys)
    assert store.put_commit(keys) == [OK] * len(keys)


def there(store: MooncakeStore, keys: list[str]) -> list[str]:
    return [one for one, here in zip(keys, store.readable(keys), strict=True) if here]


def test_only_the_namespaces_own_objects_go(store: MooncakeStore, patient: LocalMaster, put: list[str]) -> None:
    mine = [key("meta/llama", n, "v1.0") for n in range(3)] + [key("qwen", 0, "v1.0")]
    others = [
        key("meta/llama"),
        key("meta/llama", 0, "v1.0b"),
        key("meta/llama", 0, "av1.0"),
        key("meta/llama", 0, "v1x0"),
        key("meta/llama", 0, "v1"),
        key("v1.0"),
        key("v1.0/x"),
        key("v1.0", 0, "other"),
        key("m", 0, "other/v1.0"),
        key("V1.0", 0, "V1.0"),
    ]
    fill(store, put, *mine, *others)
    result = flush("--namespace", "v1.0", "--master", patient.address)
    assert (result.exit_code, result.stdout) == (0, "4 objects of namespace v1.0 removed\n")
    assert "in the last 10 s stays" in result.stderr
    assert there(store, put) == others


def test_what_is_under_a_lease_or_being_written_stays(store: MooncakeStore, patient: LocalMaster, put: list[str]) -> None:
    leased, looked_up, free, writing = (key("m", n, "epoch-7") for n in range(4))
    fill(store, put, leased, looked_up, free)
    assert store.put_open([writing], [8]) == [OK]
    assert store.get_open([leased], [8]) == [OK]
    assert store.readable([looked_up]) == [True]
    result = flush("--namespace", "epoch-7", "--master", patient.address)
    assert (result.exit_code, result.stdout) == (0, "1 object of namespace epoch-7 removed\n")
    assert there(store, put) == [leased, looked_up]
    assert store.put_commit([writing]) == [OK]
    put.append(writing)


def test_an_empty_namespace_is_no_error(patient: LocalMaster) -> None:
    result = flush("--namespace", "nobody", "--master", patient.address)
    assert (result.exit_code, result.stdout) == (0, "0 objects of namespace nobody removed\n")


def test_the_master_comes_from_the_usual_file(
    store: MooncakeStore, patient: LocalMaster, put: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the file says about memory is for those that serve: flush gives none to the pool."""
    path = tmp_path / "mooncake.json"
    path.write_text(f'{{"master_server_address": "{patient.address}", "global_segment_size": "64GB"}}')
    monkeypatch.setenv(CONFIG_PATH, str(path))
    fill(store, put, key("m", 0, "n"))
    assert flush("--namespace", "n").stdout == "1 object of namespace n removed\n"
    assert there(store, put) == []


def one_line(result: Result, code: int) -> str:
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    return line


def test_no_master_is_one_line_and_exit_code_1() -> None:
    with LocalMaster() as gone:
        pass
    line = one_line(flush("--namespace", "n", "--master", gone.address), 1)
    assert f"is a master running at {gone.address}" in line


@pytest.mark.parametrize("namespace", ["", "a b", "a::b", "ä", ".*|x", "a\n", "a@b"])
def test_a_name_that_is_no_namespace_is_one_line_and_exit_code_2(namespace: str, patient: LocalMaster) -> None:
    assert "must be made of letters" in one_line(flush("--namespace", namespace, "--master", patient.address), 2)


@pytest.mark.parametrize("master", ["", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:port", ":50051"])
def test_an_address_that_is_none_is_one_line_and_exit_code_2(master: str) -> None:
    assert "must be host:port" in one_line(flush("--namespace", "n", "--master", master), 2)


def test_a_master_must_be_named_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_PATH, raising=False)
    assert "master_server_address is missing" in one_line(flush("--namespace", "n"), 2)
    assert "--namespace" in one_line(flush("--master", "127.0.0.1:1"), 2)
