"""A prefill and a decode instance from vLLM's requests to the bytes of their caches: both sides of the connector over real
links; only the engines are missing, and the bytes move within this process."""

from __future__ import annotations

import ctypes
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# It imports all that is needed of vLLM, and keeps quiet about the warnings.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM is not importable", exc_type=ImportError)
pytest.importorskip("aiohttp")

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from kvactors.disagg.descriptors import Descriptors
from kvactors.disagg.transports import mooncake
from kvactors.errors import ConfigError
from kvactors.vllm.handoff_start import start_handoff
from kvactors.vllm.handoff_worker import HandoffSide
from kvactors.vllm.layouts import ModelFacts
from kvactors.vllm.messages import WorkerReport
from kvactors.vllm.settings import CONSUMER, PRODUCER, ConnectorSettings
from tests.vllm.handoff_rig import BLOCKS, DECODE, LAYOUTS, PREFILL, Instance, full
from tests.vllm.test_handoff_connector import vllm_config

ABORTED = RequestStatus.FINISHED_ABORTED
FACTS = ModelFacts(model="m", hidden_layers=8, kv_heads=1)
PATIENCE_S = 20.0


class Copier:
    """In Mooncake's place."""

    def __init__(self, host: str, protocol: str, device: str) -> None:
        self.memory = f"{host} {protocol} {device}"
        self.registered: list[tuple[int, int]] = []

    def register(self, address: int, nbytes: int) -> None:
        self.registered.append((address, nbytes))

    async def write(self, memory: str, descriptors: Descriptors) -> None:  # noqa: ARG002 - there is one memory
        for src, dst, n in zip(*(a.tolist() for a in (descriptors.src, descriptors.dst, descriptors.nbytes)), strict=True):
            ctypes.memmove(dst, src, n)

    async def forget(self, memory: str) -> None: ...

    def close(self) -> None: ...


def caches(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """As on a CPU: for attention whole pages, for a state bytes with padding behind them."""
    made: dict[str, torch.Tensor] = {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            if hasattr(group.kv_cache_spec, "shapes"):
                made[name] = torch.as_strided(torch.zeros(BLOCKS * 64, dtype=torch.int8), (BLOCKS, 32), (64, 1))
            else:
                made[name] = torch.zeros(BLOCKS, 1, group.kv_cache_spec.block_size, 16, dtype=torch.bfloat16)
    return made


class Node:
    """One instance: a scheduler and a worker, which step together."""

    def __init__(self, layout: Callable[[], KVCacheConfig], role: str, port: int, **extra: Any) -> None:
        config = layout()
        self.scheduler = Instance(config, sends=role == PRODUCER, receives=role == CONSUMER)
        self.caches = caches(config)
        settings = ConnectorSettings.of({"backend": "none", "bootstrap_port": port, "handoff_deadline_s": PATIENCE_S, **extra})
        side = start_handoff(vllm_config(role, {}), config, self.caches, FACTS, settings)
        assert side is not None
        self.side: HandoffSide = side
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: list[str] = []
        self.report = WorkerReport()

    def step(self) -> None:
        """A step that computes nothing."""
        self.side.begin(self.scheduler.side.plan(), runs=False)
        self.side.start_loads()
        sent, received, failed = self.side.finished(self.report)
        self.scheduler.side.reported(received, sent)
        self.sent += sent
        self.received += received
        self.failed += failed

    def fill(self, request: Request, salt: int) -> None:
        """Writes something into every block of a request."""
        for group, table in zip(self.scheduler.config.kv_cache_groups, self.scheduler.tables(request), strict=True):
            for name in group.layer_names:
                for position, block in enumerate(table):
                    if block:
                        self.caches[name][block] = salt + position

    def contents(self, request: Request, tokens: int) -> list[list[float]]:
        """The first element of every block of a request that holds some of its first tokens."""
        found = []
        for group, table in zip(self.scheduler.config.kv_cache_groups, self.scheduler.tables(request), strict=True):
            past = -(-tokens // group.kv_cache_spec.block_size)
            found.append([self.caches[group.layer_names[0]][block].flatten()[0].item() for block in table[:past] if block])
        return found


class Both:
    def __init__(self, layout: Callable[[], KVCacheConfig], port: int) -> None:
        self.p = Node(layout, PRODUCER, port)
        self.d = Node(layout, CONSUMER, port)
        self.where = f"http://127.0.0.1:{port}"

    def until(self, what: Callable[[], object]) -> None:
        """Steps both instances until something is so."""
        end = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < end, "it does not come about"
            for node in (self.p, self.d):
                node.step()

    def prefill(self, tokens: int, transfer: str = "t") -> Request:
        request = self.p.scheduler.request(f"p-{transfer}", tokens, {**PREFILL, "transfer_id": transfer})
        self.p.scheduler.compute(request)
        self.p.fill(request, 1)
        request.append_output_token_ids(5)
        assert self.p.scheduler.end(request)
        return request

    def decode(self, tokens: int, transfer: str = "t", **more: Any) -> Request:
        params = {**DECODE, "transfer_id": transfer, "remote_engine_id": "e", "remote_bootstrap_addr": self.where}
        request = self.d.scheduler.request(f"d-{transfer}", tokens, params, **more)
        self.d.scheduler.admit(request)
        return request

    def close(self) -> None:
        for node in (self.d, self.p):
            node.side.close()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@pytest.fixture(autouse=True)
def copier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "MooncakeTransport", Copier)


@pytest.fixture
def start(port: int) -> Iterator[Callable[..., Both]]:
    made: list[Both] = []

    def make(layout: Callable[[], KVCacheConfig] = full) -> Both:
        made.append(Both(layout, port))
        return made[-1]

    yield make
    for both in made:
        both.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_request_is_handed_over(layout: str, first: str, start: Callable[..., Both]) -> None:
    both = start(LAYOUTS[layout])
    if first == "prefill":
        at_p, at_d = both.prefill(71), both.decode(71)
    else:
        at_d = both.decode(71)
        for _ in range(3):
            both.d.step()
        at_p = both.prefill(71)
    both.until(lambda: both.d.received and both.p.sent)
    assert (both.d.received, both.d.failed, both.p.sent) == (["d-t"], [], ["p-t"])
    tokens = at_d.num_computed_tokens
    wanted = both.d.contents(at_d, tokens)
    assert wanted == [of[-len(mine) :] for of, mine in zip(both.p.contents(at_p, tokens), wanted, strict=True)]
    assert all(all(of) for of in wanted)
    assert not both.d.report
    totals = both.d.side.totals()
    assert (totals["handoff_received"], both.p.side.totals()["handoff_sent_bytes"]) == (1, totals["handoff_received_bytes"])


def test_an_empty_pull_frees_prefill_and_tells_decode_nothing(start: Callable[..., Both]) -> None:
    both = start()
    both.prefill(40)
    both.decode(40, skip_reading_prefix_cache=True)
    both.until(lambda: both.p.sent)
    both.until(lambda: not both.d.side._worker.pending)
    both.d.step()
    assert (both.d.received, both.d.failed) == ([], [])


def test_a_request_that_decode_gives_up_comes_back_once(start: Callable[..., Both]) -> None:
    """Prefill has not come to it."""
    both = start()
    request = both.decode(40)
    both.d.step()
    both.d.scheduler.side.finished(request, both.d.scheduler.tables(request))
    both.until(lambda: both.d.received)
    assert (both.d.received, both.d.failed) == (["d-t"], [])


def test_what_prefill_gives_up_fails_at_decode(start: Callable[..., Both]) -> None:
    both = start()
    both.decode(40)
    request = both.p.scheduler.request("p-t", 40, PREFILL)
    for _ in range(3):
        both.p.step()
        both.d.step()
    both.p.scheduler.compute(request, 16)
    assert not both.p.scheduler.end(request, ABORTED)
    both.until(lambda: both.d.received)
    assert (both.d.received, both.d.failed, both.p.sent) == (["d-t"], ["d-t"], [])
    assert not both.d.report  # nothing can be written late


def test_another_prompt_fails_and_the_next_request_goes_well(start: Callable[..., Both]) -> None:
    both = start()
    both.prefill(40)
    both.decode(60)
    both.until(lambda: both.d.received)
    assert both.d.failed == ["d-t"]
    both.until(lambda: both.p.sent)
    both.prefill(40, "u")
    both.decode(40, "u")
    both.until(lambda: len(both.d.received) == 2)
    assert both.d.failed == ["d-t"]


def test_several_instances_of_one_machine_that_want_one_port(
    start: Callable[..., Both], port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asked for a hand-off by name: the second goes on without."""
    start()
    config = full()
    given = (vllm_config(PRODUCER, {}), config, caches(config), FACTS)
    with caplog.at_level(logging.WARNING):
        assert start_handoff(*given, ConnectorSettings.of({"bootstrap_port": port})) is None
    assert f"port {port} of 127.0.0.1 is in use" in caplog.text
    with pytest.raises(ConfigError, match="in use"):
        start_handoff(*given, ConnectorSettings.of({"bootstrap_port": port, "handoff": True}))
