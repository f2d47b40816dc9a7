"""The order in which a worker's side hears of a layer, with the window between, for each kind of attention."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvactors.vllm import ascend_windows
from kvactors.vllm.ascend_hooks import compute_window
from tests.vllm_ascend import stand_in
from tests.vllm_ascend.stand_in import METADATA, Ascend, World

ascend = stand_in.ascend  # a fixture

ATTENTION = ["model.layers.0.attn", "model.layers.1.attn"]


def test_full_attention_has_its_window_around_the_operator(ascend: Ascend) -> None:
    layers = ascend.step(ATTENTION, set(ATTENTION))
    for name in ATTENTION:
        ascend.classes["AscendAttentionBackendImpl"]().forward(name)
    assert layers.end_step() == ""
    assert ascend.world.told == [
        line.format(name=name)
        for name in ATTENTION
        for line in (
            "wait({name})",
            "write {name}",
            "entry({name}) after write {name}",
            "attend {name}",
            "checkpoint({name})",
            "exit({name}) after attend {name}",
        )
    ]


def test_without_a_word_that_the_cache_is_written_the_operator_is_the_entry(ascend: Ascend) -> None:
    """Older versions of vLLM-Ascend do not say it; full attention launches nothing between the write and the operator."""
    layers = ascend.step(ATTENTION, set(ATTENTION))
    ascend.calls.written = lambda _="": None  # type: ignore[method-assign]
    ascend.classes["AscendAttentionBackendImpl"]().forward("model.layers.0.attn")
    assert layers.end_step() == ""
    assert ascend.world.told[2:5] == [
        "entry(model.layers.0.attn) after write model.layers.0.attn",
        "attend model.layers.0.attn",
        "checkpoint(model.layers.0.attn)",
    ]


def test_sparse_attention_over_latents_selects_inside_of_its_window(ascend: Ascend) -> None:
    layers = ascend.step(["a"], {"a"})
    ascend.classes["AscendSFAImpl"]().forward("a")
    assert layers.end_step() == ""
    assert ascend.world.told == [
        "wait(a)",
        "write a",
        "entry(a) after write a",
        "select a",
        "attend a",
        "checkpoint(a)",
        "project a",
        "exit(a) after project a",
    ]


def test_dsa_enters_after_its_compressor_and_indexer(ascend: Ascend) -> None:
    layers = ascend.step(["a"], {"a"})
    ascend.classes["AscendDSAImpl"]().forward("a")
    assert layers.end_step() == ""
    assert ascend.world.told == [
        "wait(a)",
        "compress a",
        "index a",
        "entry(a) after index a",
        "attend a",
        "checkpoint(a)",
        "project a",
        "exit(a) after project a",
    ]


def test_dsa_that_does_not_say_when_it_wrote_has_no_window(ascend: Ascend) -> None:
    layers = ascend.step(["a"], {"a"})
    impl = ascend.classes["AscendDSAImpl"]()
    impl.says_written = False
    impl.forward("a")
    assert layers.end_step() == ""
    assert [line for line in ascend.world.told if "(" in line] == ["wait(a)", "exit(a) after project a"]


def test_mla_checks_after_its_prefill(ascend: Ascend) -> None:
    layers = ascend.step(["a"], {"a"})
    ascend.classes["AscendMLAImpl"]().forward("a", None, None, METADATA)
    assert layers.end_step() == ""
    assert ascend.world.told == [
        "wait(a)",
        "write a",
        "entry(a) after write a",
        "decode a",
        "attend a",
        "checkpoint(a)",
        "project a",
        "exit(a) after project a",
    ]


@pytest.mark.parametrize("by_name", [False, True])
def test_mla_without_prefill_waits_for_its_loads_too(ascend: Ascend, by_name: bool) -> None:
    """A request of which all but one token was loaded counts as a decode, and vLLM-Ascend's decode does not wait."""
    ascend.step(["a"], {"a"})
    impl, decode = ascend.classes["AscendMLAImpl"](), SimpleNamespace(num_prefills=0)
    if by_name:
        impl.forward("a", None, kv_cache=None, attn_metadata=decode)
    else:
        impl.forward("a", None, None, decode)
    assert ascend.world.told[:2] == ["wait(a)", "write a"]
    ascend.world.told.clear()
    impl.forward("a", None, None, None)
    assert ascend.world.told == [], "a profiling run waits for nothing"


HYBRID = ["s0", "s1", "a2", "s3", "a4"]


@pytest.mark.parametrize("install", [True, False])
def test_a_hybrid_model_reports_each_layer_by_its_name(ascend: Ascend, install: bool) -> None:
    """With the names that the classes know, and by the order of the calls alone; twice, as each step begins anew."""
    if not install:
        assert not hasattr(ascend.classes["QwenGatedDeltaNetAttention"]._forward_core, ascend_windows.OURS)
    for _ in range(2):
        ascend.world.told.clear()
        layers = ascend.step(HYBRID, {"a2", "a4"}, install=install)
        for name in HYBRID:
            if name[0] == "s":
                ascend.classes["QwenGatedDeltaNetAttention"](name).forward()
            else:
                ascend.classes["AscendAttentionBackendImpl"]().forward(name)
        assert layers.end_step() == ""
        exits = [line for line in ascend.world.told if line.startswith("exit")]
        assert exits == [
            "exit(s0) after update s0",
            "exit(s1) after update s1",
            "exit(a2) after attend a2",
            "exit(s3) after update s3",
            "exit(a4) after attend a4",
        ]
        assert not any(line.startswith("entry(s") for line in ascend.world.told), "a state is not written at its entry"


def test_a_state_layer_of_a_draft_reports_nothing(ascend: Ascend) -> None:
    layers = ascend.step(HYBRID, {"a2", "a4"})
    for name in ("s0", "s1", "draft.s"):
        ascend.classes["QwenGatedDeltaNetAttention"](name).forward()
    assert [line for line in ascend.world.told if line.startswith("exit")] == [
        "exit(s0) after update s0",
        "exit(s1) after update s1",
    ]
    assert "only 2 of 3 state layers reported; s3 did not" in layers.end_step()


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        ("AscendAttentionBackendImpl", "forward_impl"),
        ("AscendSFAImpl", "_execute_sparse_flash_attention_process"),
        ("AscendDSAImpl", "_forward_attention"),
    ],
)
def test_an_operator_that_raises_has_no_checkpoint_and_the_next_step_has(
    ascend: Ascend, monkeypatch: pytest.MonkeyPatch, owner: str, method: str
) -> None:
    cls, real = ascend.classes[owner], getattr(ascend.classes[owner], method)

    def fails(self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        real(self, layer_name, *args, **kwargs)
        raise ValueError("the operator failed")

    setattr(cls, method, fails)
    ascend.step(["a"], {"a"})
    with pytest.raises(ValueError, match="the operator failed"):
        cls().forward("a")
    assert "checkpoint(a)" not in ascend.world.told
    assert "exit(a) after attend a" not in ascend.world.told
    monkeypatch.setattr(cls, method, real)
    ascend.step(["a"], {"a"})
    cls().forward("a")
    assert ascend.world.told.count("checkpoint(a)") == 1


def test_outside_of_a_step_nothing_is_told_and_all_is_computed(ascend: Ascend) -> None:
    layers = ascend.step(ATTENTION, set(ATTENTION))
    layers.end_step()
    assert ascend.classes["AscendAttentionBackendImpl"]().forward("model.layers.0.attn") == "output of model.layers.0.attn"
    ascend.classes["QwenGatedDeltaNetAttention"]("s0").forward()
    ascend.classes["AscendDSAImpl"]().forward("a")
    assert not [line for line in ascend.world.told if "(" in line]


def test_without_a_connector_the_operators_run_as_before(ascend: Ascend) -> None:
    ascend_windows.install(lambda: None)
    for owner in ("AscendAttentionBackendImpl", "AscendSFAImpl", "AscendDSAImpl"):
        ascend.classes[owner]().forward("a")
    ascend.classes["AscendMLAImpl"]().forward("a", None, None, METADATA)
    ascend.classes["QwenGatedDeltaNetAttention"]("s").forward()
    assert ascend.world.told.count("attend a") == 4
    assert "update s" in ascend.world.told


def test_installing_twice_wraps_once_and_asks_the_last_one(ascend: Ascend) -> None:
    kinds = ascend_windows.install(lambda: None)
    methods = {name: dict(vars(cls)) for name, cls in ascend.classes.items()}
    layers = ascend.step(["a"], {"a"})
    assert {name: dict(vars(cls)) for name, cls in ascend.classes.items()} == methods
    ascend.classes["AscendAttentionBackendImpl"]().forward("a")
    assert layers.end_step() == ""
    assert ascend.world.told.count("checkpoint(a)") == 1
    assert {"compute window for FA", "compute window for MLA", "compute window for SFA", "compute window for DSA"} < kinds


def test_a_method_that_a_version_lacks_is_named_and_the_others_are_wrapped(
    ascend: Ascend, caplog: pytest.LogCaptureFixture
) -> None:
    del ascend.classes["AscendSFAImpl"]._execute_sparse_flash_attention_process
    del vars(sys.modules["vllm_ascend.attention.mla_v1"])["AscendMLAImpl"]

    def unlike(self: Any, hidden_states: Any) -> None: ...

    ascend.classes["AscendDSAImpl"]._forward_attention = unlike
    kinds = ascend_windows.install(lambda: None)
    for kind in ("SFA", "MLA", "DSA"):
        assert f"no compute window for {kind}: saves of these layers happen after the layer" in caplog.text
        assert f"compute window for {kind}" not in kinds
    assert "no wait in MLA's decode: loads that a step without prefill needs count as failed" in caplog.text
    assert ascend.classes["AscendDSAImpl"]._forward_attention is unlike
    assert "compute window for FA" in kinds


def test_modules_that_are_not_loaded_are_neither_imported_nor_mentioned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in stand_in.MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    assert ascend_windows.install(lambda: None) == frozenset()
    assert set(sys.modules) == before
    assert not caplog.records


def test_a_window_of_one_layer() -> None:
    world = World()
    world.launch("write a")
    with compute_window(world, "a", world):
        world.launch("attend a")
    assert world.told == ["write a", "entry(a) after write a", "attend a", "checkpoint(a)"]
    with pytest.raises(KeyError), compute_window(world, "b", world):
        raise KeyError("b")
    assert world.told[4:] == ["entry(b) after attend a"]


def test_a_cache_that_is_said_to_be_written_twice_is_one_entry() -> None:
    world = World()
    layers = world.layers(["a"], {"a"})
    layers.begin_step()
    layers.wait_for_layer_load("a")
    layers.on_kv_cache_written("a")
    layers.on_kv_cache_written()
    with layers.window():
        pass
    assert world.told == ["wait(a)", "entry(a) after nothing", "checkpoint(a)"]


def test_a_draft_runs_its_layer_several_times_in_a_step(ascend: Ascend) -> None:
    layers = ascend.step(["a"], {"a"})
    for name in ("a", "draft", "draft"):
        ascend.classes["AscendAttentionBackendImpl"]().forward(name)
    with layers.window():
        ascend.world.launch("attend without a cache")
    assert layers.end_step() == ""
    assert ascend.world.told.count("entry(draft) after write draft") == 2
    assert ascend.world.told[-1] == "attend without a cache", "no layer is open: no window"
