"""The plugin for vLLM-Ascend's model runner V1, on a stand-in: the views it makes.

No NPU and no vLLM is needed; on hardware nothing of this is verified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvactors.errors import ConfigError, LayoutError
from kvactors.memory import cache_views
from kvactors.vllm.ascend_support import VIEWS
from tests.memory import npu_plugin
from tests.memory.npu_runner import (
    BLOCKS,
    HeadMajor,
    StandInRunner,
    TokenMajor,
    attention,
    built,
    gqa,
    hybrid,
    states,
)

runner_module, views_on = npu_plugin.runner_module, npu_plugin.views_on  # fixtures


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
