"""Engines with and without the connector: what each model needs so that a reload computes in the same chunks as a cold run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvactors.errors import ConfigError
from kvactors.stores import LocalMaster, MooncakeStore
from kvactors.stores.mooncake.client import INSTALL, native_module
from kvactors.stores.mooncake.master import find_master
from tests.vllm.connector_cases import Outcomes, Request
from tests.vllm.led import Led

CHUNKS: dict[str, int] = {"qwen3": 128, "gptoss": 128, "gemma3": 128, "qwen3next": 384, "granite": 256, "dsv3": 128}
"""`max_num_batched_tokens`: a block, so that every chunk of a prompt ends on a boundary."""

POOL_BYTES = 256 << 20


def arguments(model: str, **changes: Any) -> dict[str, Any]:
    return {"max_model_len": 1280, "max_num_batched_tokens": CHUNKS[model], "num_gpu_blocks_override": 160} | changes


def connector(backend: str, **extra: Any) -> dict[str, Any]:
    """Fields of a `KVTransferConfig`."""
    return {
        "kv_connector": "KVActorsConnector",
        "kv_connector_module_path": "kvactors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"backend": backend, **extra},
    }


def no_mooncake() -> str:
    """Why no Mooncake can be run here; empty if it can."""
    try:
        native_module()
    except ConfigError as error:
        return str(error)
    return "" if find_master() is not None else f"there is no mooncake_master here; {INSTALL}"


def has_amx() -> bool:
    """Whether this CPU has the tiles that vLLM's kernel for latent vectors needs to use what is cached of a prompt."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


class Model:
    """One model in a process of its own: what it answers without a connector, and engines with one."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str] | None = None, **changes: Any) -> None:
        self.name, self.folder = name, folder
        self.arguments = arguments(name, **changes)
        self.environment = environment
        self.led = Led(environment)
        self.block = 0
        self.policy = "recompute"
        self.cold: dict[str, Any] = {}

    def begin(self, extra: Mapping[str, Any] | None, **changes: Any) -> None:
        """`start`, without waiting for it; `begun` does."""
        self.revive()
        transfer = None if extra is None else connector(**extra)
        self.led.send("start", self.name, str(self.folder), transfer, **{**self.arguments, **changes})

    def revive(self) -> None:
        """A new process, if an earlier test ended this one's."""
        if not self.led.lives():
            self.led.close()
            self.led = Led(self.environment)

    def begun(self) -> dict[str, Any]:
        started: dict[str, Any] = self.led.receive()
        self.block = started["boundary"]
        return started

    def start(self, extra: Mapping[str, Any] | None, **changes: Any) -> Led:
        """An engine with these settings of the connector (None = without it) and an empty cache of its own."""
        self.begin(extra, **changes)
        self.begun()
        return self.led

    def run_cold(self, requests: list[Request]) -> Outcomes:
        """Computes each request alone in the engine that runs, one without a connector, and keeps what it answered."""
        outcomes: Outcomes = self.led.one_by_one(requests)
        self.cold.update(outcomes)
        return outcomes

    def close(self) -> None:
        self.led.close()


class Pool:
    """A master and a client in this process whose memory is the pool, so that a process with vLLM may end any time."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.master = LocalMaster(**options)
        self.owner = MooncakeStore(global_segment_size=POOL_BYTES, **self.master.options())
        path = folder / f"mooncake-{self.master.port}.json"
        settings = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.master.address,
            "protocol": "tcp",
            "mode": "embedded",
            "global_segment_size": 0,
            "local_buffer_size": 64 << 20,
        }
        path.write_text(json.dumps(settings))
        self.environment = {"MOONCAKE_CONFIG_PATH": str(path)}

    def close(self) -> None:
        self.owner.close()
        self.master.close()


@contextmanager
def pool(folder: Path, **options: Any) -> Iterator[Pool]:
    made = Pool(folder, **options)
    try:
        yield made
    finally:
        made.close()
