"""Two processes with real vLLM, one for prefill and one for decode, as a proxy leads them."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.vllm.connector_cases import MADE, Outcomes, Request
from tests.vllm.connector_engines import Model

STATES = {"qwen3next", "granite"}


def free_port() -> int:
    """Below the ports that connections get, so that none of them takes it before prefill's bootstrap server does."""
    draw = random.Random()
    while True:
        port = draw.randrange(20000, 30000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def transfer(role: str, port: int, **extra: Any) -> dict[str, Any]:
    """Fields of a `KVTransferConfig` of an instance without a pool."""
    return {
        "kv_connector": "KVActorsConnector",
        "kv_connector_module_path": "kvactors.vllm",
        "kv_role": role,
        "kv_connector_extra_config": {"backend": "none", "handoff": True, "bootstrap_port": port, **extra},
    }


class Pair:
    """Prefill and decode of one model. `params`: what a proxy puts into a request for either."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.prefill, self.decode = Model(model, folder), Model(model, folder)
        self.port = free_port()
        self.block = 0
        self.where: list[str] = []
        self._number = 0

    def begin(self, prefill: Mapping[str, Any] | None = None, decode: Mapping[str, Any] | None = None) -> None:
        """Starts both instances (anew if their settings differ), at the same time."""
        for model, role, extra in ((self.prefill, "kv_producer", prefill), (self.decode, "kv_consumer", decode)):
            model.revive()
            settings = transfer(role, self.port, **(extra or {})) | {"kv_load_failure_policy": model.policy}
            model.led.send("start", self.model, str(self.folder), settings, **model.arguments)
        self.block = self.prefill.begun()["boundary"]
        self.decode.begun()
        self.where = self.prefill.led.where()

    def transfer_id(self) -> str:
        self._number += 1
        return f"transfer-{self.model}-{self._number}"

    def params(self, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        engine_id, bootstrap = self.where
        return (
            {"do_remote_decode": True, "transfer_id": transfer_id},
            {
                "do_remote_prefill": True,
                "transfer_id": transfer_id,
                "remote_engine_id": engine_id,
                "remote_bootstrap_addr": bootstrap,
            },
        )

    def run(self, requests: list[Request]) -> tuple[Outcomes, Outcomes, dict[str, str]]:
        """Each alone, first at prefill and then at decode: what came of it there, and its transfer id."""
        ids = {name: self.transfer_id() for name, _, _ in requests}
        at_prefill: dict[str, Any] = {}
        at_decode: dict[str, Any] = {}
        for name, prompt, count in requests:
            at_p, at_d = self.params(ids[name])
            at_prefill |= self.prefill.led.one_by_one([(name, prompt, 1)], resets=False, params={name: at_p})
            at_decode |= self.decode.led.one_by_one([(name, prompt, count)], params={name: at_d})
        return at_prefill, at_decode, ids

    def settle(self) -> None:
        """Steps both until no block is held any more."""
        self.prefill.led.reset()
        self.decode.led.reset()

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@contextmanager
def pair(model: str, folder: Path) -> Iterator[Pair]:
    made = Pair(model, folder)
    try:
        yield made
    finally:
        made.close()


def random_prompts(block: int, count: int, most: int) -> list[Request]:
    """Of one token, two, around a block, and of several chunks."""
    draw = random.Random(f"prompts {block}")
    lengths = [1, 2, 3, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 191]
    lengths += [draw.randint(1, most) for _ in range(count - len(lengths))]
    return [(f"{i}: {n}", [draw.randrange(3, 512) for _ in range(n)], MADE) for i, n in enumerate(lengths)]
