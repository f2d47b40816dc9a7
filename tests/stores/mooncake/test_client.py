"""The guards of the native client: what is missing is named, and no call and no answer gets through that must not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvactors.errors import ConfigError, StoreError, StoreUnreachableError
from kvactors.stores import MooncakeConfig, MooncakeStore
from kvactors.stores.mooncake import client as clients
from kvactors.stores.mooncake.canary import PREFIX
from kvactors.stores.mooncake.client import SESSION_CALLS, Client, check_sessions, native_module
from tests.stores.memory_world import Background
from tests.stores.mooncake.fake_native import FakeNative, Gate

CONFIG = MooncakeConfig("127.0.0.1:50051", close_deadline_s=0.05)
BAD_ANSWERS = [[], [0], [0, 0, 0], None, "00", ["0", "0"], [0, None], [0, True], (0, 0), {0: 0, 1: 0}, [0.0, 0.0], 0]


def importing(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Any]) -> None:
    """Lets `mooncake.store` be what `answer` returns or raises."""
    real = importlib.import_module

    def found(name: str, *more: Any) -> Any:
        return answer() if name == "mooncake.store" else real(name, *more)

    monkeypatch.setattr(importlib, "import_module", found)


def failing(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


# Installation


def test_a_missing_client_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    importing(monkeypatch, failing(ModuleNotFoundError("No module named 'mooncake'")))
    with pytest.raises(ConfigError, match=r"not installed; pip install 'kvactors\[mooncake\]'"):
        native_module()


def test_a_missing_library_is_named_with_the_packages_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    importing(monkeypatch, failing(ImportError("libibverbs.so.1: cannot open shared object file")))
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1: cannot open .*apt-get install libibverbs1 libnuma1 libcurl4"):
        native_module()


def test_a_client_that_wants_cuda_is_named_with_the_version_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "installed_version", lambda: ("mooncake-transfer-engine-non-cuda", "0.3.13"))
    importing(monkeypatch, failing(ImportError("libcudart.so.12: cannot open shared object file")))
    with pytest.raises(ConfigError, match=r"non-cuda 0\.3\.13 needs the CUDA runtime .*0\.3\.13\.post1 or newer") as caught:
        native_module()
    assert "apt-get" not in str(caught.value)


@pytest.mark.parametrize("lacking", SESSION_CALLS)
def test_a_client_without_sessions_is_refused_with_the_version_to_install(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setattr(clients, "installed_version", lambda: ("mooncake-transfer-engine", "0.3.12"))
    old = type("Old", (), {call: None for call in SESSION_CALLS if call != lacking})
    needed = r"0\.3\.13\.post1 or newer is needed: pip install"
    told = rf"^mooncake-transfer-engine 0\.3\.12 is too old, it has no {lacking}; {needed}"
    with pytest.raises(ConfigError, match=told):
        check_sessions(SimpleNamespace(MooncakeDistributedStore=old))


def test_a_client_of_unknown_version_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "installed_version", lambda: None)
    importing(monkeypatch, lambda: SimpleNamespace(MooncakeDistributedStore=object))
    with pytest.raises(ConfigError, match="mooncake of unknown version is too old"):
        native_module()


# Setting up


class FakeModule:
    """The client's module, with clients that note how they were set up."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.options = code, dict[str, str]()
        self.native = FakeNative()
        self.native.setup = self._setup  # type: ignore[attr-defined]
        self.ReplicateConfig = SimpleNamespace
        self.MooncakeDistributedStore = lambda: self.native

    def _setup(self, options: dict[str, str]) -> int:
        self.options = options
        return self.code


def test_sets_a_client_up_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeModule()
    monkeypatch.setattr(clients, "native_module", lambda: module)
    Client(MooncakeConfig("10.0.0.1:50051", protocol="RDMA", device_name="mlx5_0", global_segment_size="1GB", tenant_id="t"))
    assert module.options == {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "1073741824",
        "local_buffer_size": "16777216",
        "protocol": "rdma",
        "rdma_devices": "mlx5_0",
        "master_server_addr": "10.0.0.1:50051",
        "tenant_id": "t",
    }


def test_a_refused_set_up_names_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "native_module", lambda: FakeModule(code=-900))
    with pytest.raises(StoreUnreachableError, match=r"\(-900\): is a master running at 127\.0\.0\.1:50051"):
        Client(CONFIG)


def test_the_options_for_replicas_go_with_every_put(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeModule()
    monkeypatch.setattr(clients, "native_module", lambda: module)
    store = MooncakeStore(
        MooncakeConfig(
            "127.0.0.1:50051",
            replica_num=2,
            preferred_segments=("10.0.0.2:7", "10.0.0.3:7"),
            prefer_alloc_in_same_node=True,
            with_hard_pin=True,
            staging_bytes=0,
        )
    )
    store.put_open(["k"], [8])
    canary, (keys, sizes, wanted) = module.native.made("batch_put_session_start")
    assert canary[0][0].startswith(PREFIX)
    assert (keys, sizes) == (["k"], [8])
    assert vars(wanted) == {
        "replica_num": 2,
        "preferred_segments": ["10.0.0.2:7", "10.0.0.3:7"],
        "prefer_alloc_in_same_node": True,
        "with_hard_pin": True,
    }


# Answers


@pytest.mark.parametrize("answer", BAD_ANSWERS, ids=repr)
def test_an_answer_of_another_shape_is_an_error(answer: Any) -> None:
    native = FakeNative()
    native.answers["batch_is_exist"] = [answer]
    client = Client(CONFIG, native)
    with pytest.raises(StoreError, match=r"batch_is_exist answered .* for 2 keys; expected one whole number each"):
        client.ask("batch_is_exist", ["k", "l"])
    assert client.ask("batch_is_exist", ["k", "l"]) == [0, 0]


@pytest.mark.parametrize("answer", [None, "0", [0], True, 0.0], ids=repr)
def test_an_answer_that_is_no_number_is_an_error(answer: Any) -> None:
    native = FakeNative()
    native.answers["health_check"] = [answer]
    with pytest.raises(StoreError, match=r"health_check answered .*; expected a whole number"):
        Client(CONFIG, native).tell("health_check")


@pytest.mark.parametrize("answer", [None, [], 0], ids=repr)
def test_replicas_that_are_no_mapping_are_an_error(answer: Any) -> None:
    native = FakeNative()
    native.answers["batch_get_replica_desc"] = [answer]
    with pytest.raises(StoreError, match="batch_get_replica_desc answered"):
        Client(CONFIG, native).replicas(["k"])


def test_a_long_wrong_answer_is_cut_in_the_message() -> None:
    native = FakeNative()
    native.answers["batch_is_exist"] = [["x" * 10000]]
    with pytest.raises(StoreError) as error:
        Client(CONFIG, native).ask("batch_is_exist", ["k"])
    assert len(str(error.value)) < 400


# Closing


def test_close_closes_the_native_client_once() -> None:
    native = FakeNative()
    client = Client(CONFIG, native)
    client.close()
    client.close()
    assert native.made("close") == [()]
    assert client.closed


def test_no_call_reaches_a_closed_client() -> None:
    native = FakeNative()
    client = Client(CONFIG, native)
    client.close()
    native.calls.clear()
    calls: list[Callable[[], object]] = [
        lambda: client.ask("batch_is_exist", ["k"]),
        lambda: client.tell("health_check"),
        lambda: client.replicas(["k"]),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="the Mooncake client was closed; open another store"):
            call()
    assert native.calls == []


def test_close_waits_for_the_calls_under_way() -> None:
    native = FakeNative()
    gate = Gate(native, "health_check")
    client = Client(MooncakeConfig("127.0.0.1:50051", close_deadline_s=30.0), native)
    call = Background(client.tell, "health_check")
    gate.wait_for(1)
    closing = Background(client.close)
    while not client.closed:
        pass
    assert closing.is_alive()
    assert native.made("close") == []
    gate.release.set()
    assert (call.result(), closing.result()) == (0, None)
    assert native.made("close") == [()]


def test_a_client_whose_call_never_returns_is_left_open(caplog: pytest.LogCaptureFixture) -> None:
    native = FakeNative()
    gate = Gate(native, "health_check")
    client = Client(CONFIG, native)
    call = Background(client.tell, "health_check")
    gate.wait_for(1)
    client.close()
    assert native.made("close") == []
    assert "a Mooncake client is left open: calls on it do not return" in caplog.text
    assert any(left is native for left in clients._left_open)  # or it would be destroyed under the call
    with pytest.raises(StoreError, match="was closed"):
        client.tell("health_check")
    gate.release.set()
    assert call.result() == 0
    clients._left_open.remove(native)


def test_a_call_that_raises_is_no_longer_under_way() -> None:
    native = FakeNative()
    native.answers["health_check"] = [RuntimeError("native")]
    client = Client(CONFIG, native)
    with pytest.raises(RuntimeError, match="native"):
        client.tell("health_check")
    client.close()
    assert native.made("close") == [()]
