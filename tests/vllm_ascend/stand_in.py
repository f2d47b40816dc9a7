"""A stand-in for vLLM-Ascend's attention: what its layers call, in the order in which they call it; no operator runs.

Each thing that would be launched is a line in one list, and so is all that a worker's side is told: a test reads the order off.
Source of the order: vLLM-Ascend at 182b75ea, `attention/{attention_v1,mla_v1,sfa_v1,dsa_v1}.py` and `ops/gdn.py`.
"""
# ruff: noqa: ARG002 - parameters are those of vLLM-Ascend

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvactors.core.events import DeviceEvent
from kvactors.devices import CpuEvent
from kvactors.vllm import ascend_windows
from kvactors.vllm.ascend_hooks import AscendLayers, StateLayerOrder

METADATA = SimpleNamespace(num_prefills=1)


@dataclass(frozen=True)
class After(CpuEvent):
    """An event that knows the last thing launched before it."""

    launched: str


class World:
    """The list, a device that records into it, and a worker's side that writes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.launched = "nothing"

    def launch(self, what: str) -> None:
        self.launched = what
        self.told.append(what)

    def record(self) -> DeviceEvent:
        return After(self.launched)

    def wait_layer(self, layer_name: str) -> None:
        self.told.append(f"wait({layer_name})")

    def layer_entry(self, layer_name: str, event: DeviceEvent | None = None) -> None:
        assert isinstance(event, After)
        self.told.append(f"entry({layer_name}) after {event.launched}")

    def layer_exit(self, layer_name: str, event: DeviceEvent | None = None) -> None:
        assert isinstance(event, After)
        self.told.append(f"exit({layer_name}) after {event.launched}")

    def checkpoint(self, layer_name: str) -> None:
        self.told.append(f"checkpoint({layer_name})")

    def layers(self, names_in_order: list[str], named: set[str]) -> AscendLayers:
        return AscendLayers(self, self, StateLayerOrder(names_in_order, named))


class Calls:
    """What vLLM-Ascend calls of a connector, if it calls at all."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.layers: AscendLayers | None = None

    def wait(self, name: str) -> None:
        if self.layers:
            self.layers.wait_for_layer_load(name)

    def written(self, name: str = "") -> None:
        if self.layers:
            self.layers.on_kv_cache_written(name)

    def save(self, name: str) -> None:
        if self.layers:
            self.layers.save_kv_layer(name)


def attention_v1(calls: Calls) -> dict[str, type]:
    launch = calls.world.launch

    class AscendAttentionBackendImpl:
        def forward_impl(self, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any) -> str:
            launch(f"attend {query}")
            return f"output of {query}"

        def forward(self, name: str) -> str:
            calls.wait(name)  # vLLM's decorator of the operator waits and saves
            launch(f"write {name}")
            calls.written()
            output = self.forward_impl(name, None, None, None, METADATA, None)
            calls.save(name)
            return output

    return {"AscendAttentionBackendImpl": AscendAttentionBackendImpl}


def mla_v1(calls: Calls) -> dict[str, type]:
    launch = calls.world.launch

    class AscendMLAImpl:
        def _forward_prefill(self, name: str) -> None:
            launch(f"attend {name}")

        def forward(self, layer_name: str, hidden_states: Any, kv_cache: Any, attn_metadata: Any, output: Any = None) -> None:
            if attn_metadata is None:
                return
            if attn_metadata.num_prefills:
                calls.wait(layer_name)
            launch(f"write {layer_name}")
            calls.written(layer_name)
            launch(f"decode {layer_name}")
            if attn_metadata.num_prefills:
                self._forward_prefill(layer_name)
            launch(f"project {layer_name}")
            calls.save(layer_name)

    return {"AscendMLAImpl": AscendMLAImpl}


def sfa_v1(calls: Calls) -> dict[str, type]:
    launch = calls.world.launch

    class AscendSFAImpl:
        def _execute_sparse_flash_attention_process(self, name: str) -> None:
            launch(f"attend {name}")

        def forward(self, layer_name: str) -> None:
            calls.wait(layer_name)
            launch(f"write {layer_name}")
            calls.written("")  # an implementation that was not told its name
            launch(f"select {layer_name}")
            self._execute_sparse_flash_attention_process(layer_name)
            launch(f"project {layer_name}")
            calls.save(layer_name)

    return {"AscendSFAImpl": AscendSFAImpl}


def dsa_v1(calls: Calls) -> dict[str, type]:
    launch = calls.world.launch

    class AscendDSAImpl:
        says_written = True

        def _forward_attention(self, layer_name: str, hidden_states: Any, kv_cache: Any, layer_metadata: Any) -> None:
            launch(f"compress {layer_name}")
            launch(f"index {layer_name}")
            if self.says_written:
                calls.written(layer_name)
            launch(f"attend {layer_name}")

        def forward(self, layer_name: str) -> None:
            calls.wait(layer_name)
            self._forward_attention(layer_name, None, None, None)
            launch(f"project {layer_name}")
            calls.save(layer_name)

    return {"AscendDSAImpl": AscendDSAImpl}


def gdn(calls: Calls) -> dict[str, type]:
    launch = calls.world.launch

    class QwenGatedDeltaNetAttention:
        def __init__(self, prefix: str) -> None:
            self.prefix = prefix

        def _forward_core(self, mixed_qkv: Any) -> None:
            launch(f"update {self.prefix}")
            calls.save("")

        def forward(self) -> None:
            self._forward_core(None)
            launch(f"project {self.prefix}")

    return {"QwenGatedDeltaNetAttention": QwenGatedDeltaNetAttention}


MODULES = {
    "vllm_ascend.attention.attention_v1": attention_v1,
    "vllm_ascend.attention.mla_v1": mla_v1,
    "vllm_ascend.attention.sfa_v1": sfa_v1,
    "vllm_ascend.attention.dsa_v1": dsa_v1,
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn": gdn,
}


class Ascend:
    """The stand-in, loaded: its classes by name, the calls they make and the world they make them in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = World()
        self.calls = Calls(self.world)
        self.classes: dict[str, Any] = {}
        for name, make in MODULES.items():
            module = ModuleType(name)
            vars(module).update(make(self.calls))
            self.classes.update((key, value) for key, value in vars(module).items() if isinstance(value, type))
            monkeypatch.setitem(sys.modules, name, module)

    def step(self, names_in_order: list[str], named: set[str], *, install: bool = True) -> AscendLayers:
        """A step of a model with these layers begins."""
        layers = self.world.layers(names_in_order, named)
        if install:
            ascend_windows.install(lambda: self.calls.layers)
        self.calls.layers = layers
        layers.begin_step()
        return layers


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ascend]:
    yield Ascend(monkeypatch)
    ascend_windows.install(lambda: None)
