"""The plugin for vLLM-Ascend's model runner V1, on a stand-in: the views it makes, when it acts at all, what it refuses.

No NPU and no vLLM is needed; on hardware nothing of this is verified.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvactors.errors import ConfigError, LayoutError
from kvactors.memory import cache_views
from kvactors.vllm import ascend_views
from kvactors.vllm.ascend_support import ACCEPTS, GRAPHS, VIEWS
from kvactors.vllm.ascend_views import METHOD, MODULE, RUNNER
from tests.memory.npu_runner import (
    ALIGNED,
    BLOCKS,
    AttentionSpec,
    Fractal,
    HeadMajor,
    StandInRunner,
    TokenMajor,
    attention,
    gqa,
    hybrid,
    states,
)


@pytest.fixture
def runner_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vLLM-Ascend that is loaded, with a runner of its own."""
    module = ModuleType(MODULE)
    vars(module)[RUNNER] = type(RUNNER, (StandInRunner,), {METHOD: StandInRunner._reshape_kv_cache_tensors})
    monkeypatch.setitem(sys.modules, "vllm_ascend", ModuleType("vllm_ascend"))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.fixture
def views_on(runner_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The runner's class with the plugin applied."""
    monkeypatch.setenv(VIEWS, "1")
    ascend_views.register()
    runner: type[Any] = vars(runner_module)[RUNNER]
    return runner


def built(views_on: type[Any], runner: StandInRunner) -> dict[str, Any]:
    runner.__class__ = views_on
    return runner.initialize_kv_cache_tensors()


# -- the views, by arithmetic ----------------------------------------------------------------------------------------------


def address(
    raw: torch.Tensor, block: int, page: int, before: int, inner: tuple[int, ...], at: tuple[int, ...], item: int
) -> int:
    """Where an element must be: blocks a page apart, `before` bytes of other payload in front, dense inside."""
    index = 0
    for size, i in zip(inner, at, strict=True):
        index = index * size + i
    return raw.data_ptr() + block * page + before + index * item


def assert_lies(view: torch.Tensor, raw: torch.Tensor, page: int, before: int, inner: tuple[int, ...]) -> None:
    """Every single element."""
    assert view.shape == (BLOCKS, *inner)
    for block, *at in product(*map(range, view.shape)):
        where = address(raw, block, page, before, inner, tuple(at), view.element_size())
        assert view[(block, *at)].data_ptr() == where


@pytest.mark.parametrize(("backend", "inner"), [(HeadMajor, (2, 4, 6)), (TokenMajor, (4, 2, 6))])
def test_pure_gqa_has_k_and_v_each_block_after_block(views_on: type[Any], backend: type, inner: tuple[int, ...]) -> None:
    """No recurrent layer is needed; heads or tokens come first inside of a block as the backend's operators want it."""
    runner = gqa(backend=backend)
    caches = built(views_on, runner)
    assert list(caches) == ["layers.0.attn", "layers.1.attn"]
    for name, (k, v) in caches.items():
        for view, raw in zip((k, v), runner.raw[name], strict=True):
            assert_lies(view, raw, 2 * 4 * 6 * 2, 0, inner)
            assert view.dtype == torch.float16


@pytest.mark.parametrize(("backend", "inner"), [(HeadMajor, (2, 4, 3)), (TokenMajor, (4, 2, 3))])
@pytest.mark.parametrize("page", [96, 128, 224])
def test_hybrid_layers_read_one_tensor_a_page_apart(
    views_on: type[Any], page: int, backend: type, inner: tuple[int, ...]
) -> None:
    """[K | V | padding] and [conv | ssm | padding], over the same pages."""
    runner = hybrid(page, backend=backend)
    caches = built(views_on, runner)
    for row in runner.config.kv_cache_tensors:
        linear, attn = row.shared_by
        raw = runner.raw[attn]
        assert raw is runner.raw[linear]
        k, v = caches[attn]
        assert_lies(k, raw, page, 0, inner)
        assert_lies(v, raw, page, 48, inner)
        assert isinstance(caches[linear], list), "as the runner gives states to its layers"
        conv, ssm = caches[linear]
        assert_lies(conv, raw, page, 0, (3, 4))
        assert_lies(ssm, raw, page, 24, (2, 2, 3))
    assert runner.raw["layers.1.attn"] is not runner.raw["layers.3.attn"]


def test_the_worked_example() -> None:
    """48 float16 in a page of 128 bytes: blocks 64 elements apart, of which 16 are in no view."""
    runner = StandInRunner({"a.attn": attention(heads=1, tokens=4, head=6, page=128)})
    memory = torch.zeros(BLOCKS * 128, dtype=torch.int8)
    k, v = cache_views(runner.config, {"a.attn": memory})["a.attn"]
    assert [(x.stride(), x.storage_offset()) for x in (k, v)] == [((64, 24, 6, 1), 0), ((64, 24, 6, 1), 24)]
    for view in (k, v):
        view.fill_(1)
    halves = memory.view(torch.float16).view(BLOCKS, 64)
    assert halves[:, :48].eq(1).all()
    assert halves[:, 48:].eq(0).all()


def test_a_layer_that_shares_no_tensor_keeps_the_form_of_its_model(views_on: type[Any]) -> None:
    """Such as the full attention of an MTP layer beside a hybrid model: one tensor, K and V in its pages."""
    runner = StandInRunner(
        {"layers.1.attn": attention(head=3, page=128), "mtp.attn": attention(head=3, page=128)},
        {"layers.0.linear_attn": states(128)},
        rows=[["layers.0.linear_attn", "layers.1.attn"], ["mtp.attn"]],
    )
    caches = built(views_on, runner)
    for view, before in zip(caches["mtp.attn"], (0, 48), strict=True):
        assert_lies(view, runner.raw["mtp.attn"], 128, before, (2, 4, 3))


def test_mla_in_two_tensors_is_the_latent_and_the_part_with_positions(views_on: type[Any]) -> None:
    spec = attention(heads=1, head=10, head_v=0)
    runner = StandInRunner({"a.attn": spec}, backend=TokenMajor)
    raw = (torch.zeros(BLOCKS * 4 * 8 * 2, dtype=torch.int8), torch.zeros(BLOCKS * 4 * 2 * 2, dtype=torch.int8))
    runner.__class__ = views_on
    latent, rope = runner._reshape_kv_cache_tensors(runner.config, {"a.attn": raw})["a.attn"]
    assert_lies(latent, raw[0], 4 * 8 * 2, 0, (4, 1, 8))
    assert_lies(rope, raw[1], 4 * 2 * 2, 0, (4, 1, 2))


def test_in_one_buffer_the_layout_says_the_order_and_not_the_caller() -> None:
    config = SimpleNamespace(
        kv_cache_tensors=[SimpleNamespace(layers=["a"], size=64, offset=0, layer_stride=1, block_stride=1)]
    )
    with pytest.raises(LayoutError, match="the order of tokens and heads is said for raw tensors by layer only"):
        cache_views(config, torch.zeros(64, dtype=torch.int8), token_major={"a"})


def test_kernel_blocks_follow_the_runners_block_tables(views_on: type[Any]) -> None:
    """Blocks of 4 tokens as two kernel blocks of 2; a group without a cache of its own is not in the runner's list."""
    runner = StandInRunner(
        {"encoder.attn": attention(tokens=16)}, {"a.attn": attention()}, kernel=[[2]], runner_only={"encoder.attn"}
    )
    for view in built(views_on, runner)["a.attn"]:
        assert view.shape == (2 * BLOCKS, 2, 2, 6)
        assert view.stride() == (24, 12, 6, 1)


def test_padded_pages_are_not_split_into_kernel_blocks(views_on: type[Any]) -> None:
    with pytest.raises(LayoutError, match=r"layers\.1\.attn: .* use blocks of 2 tokens"):
        built(views_on, hybrid(kernel=[[2], [0]]))


def test_a_layer_that_the_runner_gave_no_memory_is_refused_by_name(views_on: type[Any]) -> None:
    runner = StandInRunner({"a.attn": attention(), "b.attn": attention(), "c.attn": attention()}, rows=[["b.attn"]])
    with pytest.raises(ConfigError, match=rf"allocated no memory for a\.attn, c\.attn; unset {VIEWS}"):
        built(views_on, runner)


def test_the_runners_own_layers_have_no_cache(views_on: type[Any]) -> None:
    runner = StandInRunner({"a.attn": attention(), "encoder.attn": attention()}, runner_only={"encoder.attn"})
    assert list(built(views_on, runner)) == ["a.attn"]


@pytest.mark.parametrize("make", [gqa, hybrid])
def test_the_runner_is_read_and_not_changed(views_on: type[Any], make: Callable[[], StandInRunner]) -> None:
    """Block tables, kernel block sizes, configuration: what prefill, decode and MTP metadata come from."""
    runner = make()
    before = deepcopy(vars(runner))
    built(views_on, runner)
    after = vars(runner) | {"raw": None}
    assert repr(after) == repr(before | {"raw": None})


@pytest.mark.parametrize(("make", "mode"), [(gqa, "gqa"), (hybrid, "hybrid")])
def test_each_layer_is_told_at_debug_as_its_operators_see_it(
    views_on: type[Any], make: Callable[..., StandInRunner], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "kvactors.memory"):
        caches = built(views_on, make(backend=TokenMajor))
    lines = [record.getMessage() for record in caplog.records if record.name == "kvactors.memory"]
    assert len(lines) == len(caches)
    for line, (name, views) in zip(lines, caches.items(), strict=True):
        assert line.startswith("[non-contiguous-kv-cache]")
        assert f"layer={name} " in line
        assert f"shape={[tuple(view.shape) for view in views]}" in line
        assert (f"mode={mode} " in line) == ("linear" not in name)


# -- when it does anything -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_it_does_nothing_unless_it_is_asked(
    runner_module: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VIEWS, raising=False)
    if value is not None:
        monkeypatch.setenv(VIEWS, value)
    method, finders = getattr(vars(runner_module)[RUNNER], METHOD), list(sys.meta_path)
    ascend_views.register()
    assert getattr(vars(runner_module)[RUNNER], METHOD) is method
    assert sys.meta_path == finders
    assert not caplog.records


def test_twice_is_once(views_on: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    method = getattr(views_on, METHOD)
    caplog.clear()
    ascend_views.register()
    assert getattr(views_on, METHOD) is method
    assert not caplog.records


def test_a_runner_that_is_not_loaded_yet_is_left_to_load_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The plugin imports nothing of vLLM-Ascend, whose own patches come first."""
    package = tmp_path / "vllm_ascend"
    (package / "worker").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "worker" / "__init__.py").touch()
    (package / "worker" / "model_runner_v1.py").write_text(
        f"class {RUNNER}:\n    def {METHOD}(self, kv_cache_config, kv_cache_raw_tensors): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VIEWS, "1")
    finders = list(sys.meta_path)
    try:
        ascend_views.register()
        ascend_views.register()
        assert not any(name.startswith("vllm_ascend") for name in sys.modules)
        assert len(sys.meta_path) == len(finders) + 1
        assert find_spec(MODULE) is not None, "a look at it is no import"
        module = importlib.import_module(MODULE)
        assert getattr(getattr(vars(module)[RUNNER], METHOD), ascend_views.OURS)
        assert sys.meta_path == finders
    finally:
        sys.meta_path[:] = finders
        for name in [name for name in sys.modules if name.startswith("vllm_ascend")]:
            del sys.modules[name]


@pytest.mark.skipif(find_spec("vllm_ascend") is not None, reason="vLLM-Ascend is installed here")
def test_without_vllm_ascend_it_warns_and_lets_vllm_live(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VIEWS, "1")
    finders = list(sys.meta_path)
    ascend_views.register()
    assert "vLLM-Ascend is not installed here" in caplog.text
    assert sys.meta_path == finders


class OtherSignature:
    def _reshape_kv_cache_tensors(self, kv_cache_config: Any, raw: Any, layout: Any) -> None: ...


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({}, f"has no {RUNNER}.{METHOD}"),
        ({RUNNER: type(RUNNER, (), {})}, f"has no {RUNNER}.{METHOD}"),
        ({RUNNER: OtherSignature}, f"{RUNNER}.{METHOD} of this vLLM-Ascend takes (self, kv_cache_config"),
    ],
)
def test_an_unknown_runner_is_left_alone_with_a_warning(
    runner_module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    names: dict[str, Any],
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    del vars(runner_module)[RUNNER]
    vars(runner_module).update(names)
    monkeypatch.setenv(VIEWS, "1")
    before = dict(vars(OtherSignature))
    ascend_views.register()
    assert says in caplog.text
    assert "its own layout stays" in caplog.text
    assert dict(vars(OtherSignature)) == before


def test_vllm_finds_the_plugin() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["kvactors_ascend_views"].partition(":")
    assert getattr(importlib.import_module(module), function) is ascend_views.register


# -- what it refuses -------------------------------------------------------------------------------------------------------


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
