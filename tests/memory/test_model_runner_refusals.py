"""The plugin for vLLM-Ascend's model runner V1, on a stand-in: what it refuses, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvactors.errors import ConfigError
from kvactors.vllm.ascend_support import ACCEPTS, GRAPHS, VIEWS
from tests.memory import npu_plugin
from tests.memory.npu_runner import (
    ALIGNED,
    BLOCKS,
    AttentionSpec,
    Fractal,
    StandInRunner,
    attention,
    built,
    gqa,
    hybrid,
    states,
)

runner_module, views_on = npu_plugin.runner_module, npu_plugin.views_on  # fixtures


def compressed(**more: Any) -> StandInRunner:
    return StandInRunner({"a.attn": attention(compress_ratio=4, **more)})


class DeclaredSpec(AttentionSpec):
    accepts_strided_kv_cache = True


REFUSED: list[tuple[Callable[[], StandInRunner], str]] = [
    (lambda: gqa(use_aclgraph=True), f"graph capture .*{GRAPHS}=1"),
    (lambda: gqa(use_aclgraph=None, cudagraph_mode="FULL", enforce_eager=False), "graph capture"),
    (lambda: gqa(use_sparse=True), "sparse attention"),
    (lambda: StandInRunner({"a.attn": attention(cache_sparse_sfa_c8=True)}), r"the sparse cache of a\.attn"),
    (lambda: StandInRunner({"a.attn": attention(cache_sparse_li_c8=False)}), r"the sparse cache of a\.attn"),
    (lambda: gqa(use_compress=True), f"the compressed cache of layers.0.attn, whose AttentionSpec does not declare {ACCEPTS}"),
    (compressed, f"the compressed cache of a.attn, whose AttentionSpec does not declare {ACCEPTS}"),
    (lambda: StandInRunner({"a.attn": attention(tokens_per_state=2)}), r"the compressed cache of a\.attn"),
    (lambda: gqa(sparse_kv_offload_enabled=True), "KV offload"),
    (lambda: gqa(kv_offloading_size=4.0), "KV offload"),
    (lambda: StandInRunner({"a.attn": attention(store_on_host=True)}), r"KV offload of a\.attn"),
    (lambda: gqa(quant_config=SimpleNamespace(enable_fa_quant=True)), "fa_quant"),
    (lambda: StandInRunner({"a.attn": attention(scale_dim=1)}), r"the quantised cache of a\.attn with its scales"),
    (lambda: StandInRunner({"cache_only_layers.4.attn": attention()}), r"the hidden states in cache_only_layers\.4\.attn"),
    (
        lambda: StandInRunner(
            {"a.attn": attention(heads=1, head=10, head_v=0, page=128), "s": states(128)}, rows=[["a.attn", "s"]]
        ),
        r"the latent vectors \(MLA\) of a\.attn in one tensor",
    ),
    (
        lambda: StandInRunner({"a.attn": attention(page=256), "s": states(128)}, rows=[["a.attn", "s"]]),
        r"s and a\.attn, which share memory with pages of 128 and 256 bytes",
    ),
    (
        lambda: StandInRunner({"a.attn": SimpleNamespace(page_size_bytes=64, block_size=4, head_size=1, head_size_v=1)}),
        r"the cache of a\.attn, a SimpleNamespace, which is neither attention nor a recurrent state",
    ),
    (
        lambda: StandInRunner({"a.attn": attention()}, third_part=64),
        r"the cache of a\.attn in 3 tensors, where K and V are two",
    ),
    (lambda: gqa(backend=Fractal), r"Fractal wants caches of shape \(3, 20, 128, 16\)"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_known_to_take_the_views_is_refused_by_name(
    views_on: type[Any], make: Callable[[], StandInRunner], says: str
) -> None:
    runner = make()
    before = repr(vars(runner))
    with pytest.raises(ConfigError, match=says) as caught:
        built(views_on, runner)
    assert f"unset {VIEWS}" in str(caught.value)
    del runner.raw
    assert repr(vars(runner)) == before


def test_all_that_stands_against_the_views_is_named_at_once(views_on: type[Any]) -> None:
    with pytest.raises(ConfigError, match=r"graph capture.*; sparse attention; KV offload"):
        built(views_on, gqa(use_aclgraph=True, use_sparse=True, kv_offloading_size=1.0))


def test_graphs_have_a_switch_of_their_own(views_on: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRAPHS, "1")
    assert built(views_on, gqa(use_aclgraph=True))


def test_eager_runs_have_no_graphs_whatever_their_mode(views_on: type[Any]) -> None:
    assert built(views_on, gqa(use_aclgraph=None, cudagraph_mode="FULL", enforce_eager=True))


def test_a_compressed_cache_may_declare_that_its_specification_is_physical(views_on: type[Any]) -> None:
    k, v = built(views_on, compressed(kind=DeclaredSpec))["a.attn"]
    assert k.shape == v.shape == (BLOCKS, 2, 4, 6)


# -- connectors ------------------------------------------------------------------------------------------------------------


class Undeclared:
    """A connector that says nothing of strided caches."""


class Declared:
    accepts_strided_kv_cache = True


class MultiConnector:
    def __init__(self, *connectors: Any) -> None:
        self._connectors = list(connectors)


def with_connector(monkeypatch: pytest.MonkeyPatch, connector: Any, role: str = "kv_both") -> SimpleNamespace:
    """vLLM's state of the connector in this process; the configuration that belongs to it."""
    agents: Any = ModuleType("vllm.distributed.kv_transfer")
    agents.has_kv_transfer_group = lambda: connector is not None
    agents.get_kv_transfer_group = lambda: connector
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", ModuleType("vllm.distributed"))
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer", agents)
    return SimpleNamespace(kv_connector=type(connector).__name__, kv_role=role)


@pytest.mark.parametrize("make", [gqa, hybrid])
def test_a_connector_that_declared_it_gets_the_views_on_aligned_memory(
    views_on: type[Any], monkeypatch: pytest.MonkeyPatch, make: Callable[..., StandInRunner]
) -> None:
    runner = make(transfer=with_connector(monkeypatch, Declared()))
    k = built(views_on, runner)["layers.1.attn"][0]
    assert k.data_ptr() % ALIGNED == 0
    assert k.storage_offset() > 0 or k.untyped_storage().data_ptr() % ALIGNED == 0


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
@pytest.mark.parametrize(
    "connector",
    [Undeclared(), MultiConnector(Declared(), Undeclared()), MultiConnector(Declared(), MultiConnector(Undeclared()))],
    ids=["alone", "one of two", "nested"],
)
def test_a_connector_that_did_not_is_refused_whether_for_a_store_or_for_prefill_and_decode(
    views_on: type[Any], monkeypatch: pytest.MonkeyPatch, connector: Any, role: str
) -> None:
    transfer = with_connector(monkeypatch, connector, role)
    with pytest.raises(ConfigError, match=rf"KV connector Undeclared \({role}\), which does not declare {ACCEPTS}"):
        built(views_on, gqa(transfer=transfer))


def test_several_connectors_that_all_declared_it_are_taken(views_on: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(views_on, gqa(transfer=with_connector(monkeypatch, MultiConnector(Declared(), Declared()))))


def test_a_connector_that_is_not_there_yet_cannot_be_asked(views_on: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="which is not there yet"):
        built(views_on, gqa(transfer=with_connector(monkeypatch, None)))


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_declaration_is_true_and_nothing_else(views_on: type[Any], monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    connector = type("Undeclared", (), {ACCEPTS: value})()
    with pytest.raises(ConfigError, match="does not declare"):
        built(views_on, gqa(transfer=with_connector(monkeypatch, connector)))
