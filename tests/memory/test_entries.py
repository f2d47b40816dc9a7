"""Entries, bases and regions: the address is the view's own plus strides, the length is the payload."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kvactors.core.layout import CacheEntry
from kvactors.layouts.show import ELEMENT_BYTES
from kvactors.memory import (
    HUGE_PAGE_BYTES,
    KVOrder,
    attention_views,
    combined_attention_view,
    group_memory,
    placed_entries,
    registered_regions,
    state_views,
)
from kvactors.memory.entries import ELEMENT_KINDS
from tests.memory.model import LEAD, raw

BLOCK: dict[str, Any] = {"blocks": 5, "block_tokens": 4, "kv_heads": 2, "head_dim": 3, "dtype": torch.float16}


def test_a_group_says_stride_payload_and_address_of_each_view() -> None:
    memory, other = raw(5 * 128), raw(5 * 96)
    k, v = attention_views(memory, **BLOCK, page_bytes=128)
    conv, ssm = state_views(other, ((3, 4), (2, 2, 3)), (torch.bfloat16, torch.float32), 96)
    group = group_memory(7, {3: {"k": k, "v": v}, 9: {"conv": conv, "ssm": ssm}}, 5)
    assert group.layers == {
        3: (CacheEntry("k", 48, 128, "fp16"), CacheEntry("v", 48, 128, "fp16")),
        9: (CacheEntry("conv", 24, 96, "bf16"), CacheEntry("ssm", 48, 96, "fp32")),
    }
    assert group.bases == {
        (7, 3, "k"): memory.data_ptr(),
        (7, 3, "v"): memory.data_ptr() + 48,
        (7, 9, "conv"): other.data_ptr(),
        (7, 9, "ssm"): other.data_ptr() + 24,
    }


def runs(view: Tensor, blocks: int) -> list[tuple[int, int]]:
    """(offset, bytes) of what is read if neighbouring blocks are taken together wherever they touch."""
    (placed,) = placed_entries("k", view, blocks)
    joined: list[tuple[int, int]] = []
    for b in range(blocks):
        at = placed.address - view.data_ptr() + b * placed.entry.stride
        if joined and sum(joined[-1]) == at:
            joined[-1] = (joined[-1][0], joined[-1][1] + placed.entry.nbytes)
        else:
            joined.append((at, placed.entry.nbytes))
    return joined


def test_neighbours_touch_only_where_the_stride_is_the_payload() -> None:
    """vllm#52818: 16 dense neighbours are 1 range, padded by 32 bytes they are 16; vllm#55434: 4096 of 4 KiB are one."""
    dense, _ = attention_views([raw(16 * 48), raw(16 * 48)], **{**BLOCK, "blocks": 16})
    padded, _ = attention_views([raw(16 * 80), raw(16 * 80)], **{**BLOCK, "blocks": 16}, page_bytes=80)
    assert runs(dense, 16) == [(0, 16 * 48)]
    assert runs(padded, 16) == [(b * 80, 48) for b in range(16)]
    big = torch.zeros(4096 * 4096, dtype=torch.int8).view(4096, 4096)
    assert runs(big, 4096) == [(0, 16_777_216)]


def test_registered_is_the_views_own_storage_never_a_dense_copy() -> None:
    memory = raw(16 * 80)
    (view,) = state_views(memory, ((24,),), (torch.float16,), 80)
    ((address, nbytes),) = registered_regions([view])
    assert (address, nbytes) == (memory.data_ptr(), 15 * 80 + 48)
    (placed,) = placed_entries("s", view, 16)
    assert address <= placed.address
    assert placed.address + 15 * placed.entry.stride + placed.entry.nbytes <= address + nbytes


# -- blocks of several runs ------------------------------------------------------------------------------------------------


def test_a_block_of_several_runs_is_an_entry_for_each() -> None:
    """A latent of 8 and a rope part of 2 in one row of 10: each token of either is a run of its own."""
    latent, _ = attention_views([raw(5 * 80), raw(5 * 80)], **{**BLOCK, "kv_heads": 1, "head_dim": 10})
    nope, rope = latent[..., :8], latent[..., 8:]
    assert [(p.entry, p.address - latent.data_ptr()) for p in placed_entries("nope", nope, 5)] == [
        (CacheEntry(f"nope.{t}", 16, 80, "fp16"), t * 20) for t in range(4)
    ]
    assert [(p.entry.name, p.entry.nbytes, p.address - latent.data_ptr()) for p in placed_entries("rope", rope, 5)] == [
        (f"rope.{t}", 4, t * 20 + 16) for t in range(4)
    ]


def test_heads_apart_are_runs_whatever_the_order_of_the_dimensions() -> None:
    """Heads outermost: 2 heads, each with the tokens of all 5 blocks."""
    memory = raw(2 * 5 * 24)
    heads = memory.view(torch.float16).view(2, 5, 4, 3)
    for view in (heads.permute(1, 0, 2, 3), heads.permute(1, 2, 3, 0)):
        placed = placed_entries("k", view, 5)
        assert [(p.entry.nbytes, p.entry.stride, p.address - memory.data_ptr()) for p in placed] == [(24, 24, 0), (24, 24, 120)]


def test_dense_in_another_order_is_one_run() -> None:
    view = raw(240).view(torch.float16).view(5, 4, 2, 3).permute(0, 2, 1, 3)
    assert [p.entry for p in placed_entries("k", view, 5)] == [CacheEntry("k", 48, 48, "fp16")]


def test_lanes_of_a_combined_view_are_views_like_others() -> None:
    memory = raw(5 * 128)
    k, v = combined_attention_view(memory, **BLOCK, page_bytes=128, order=KVOrder.BLOCKS_FIRST)
    group = group_memory(0, {0: {"k": k, "v": v}}, 5)
    assert [(e.nbytes, e.stride) for e in group.layers[0]] == [(48, 128), (48, 128)]
    assert group.bases[0, 0, "v"] - group.bases[0, 0, "k"] == 48


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_kernel_blocks_are_the_bytes_of_their_block(kernel: int) -> None:
    memory = [raw(240), raw(240)]
    whole = attention_views(memory, **BLOCK)
    split = attention_views(memory, **BLOCK, kernel_tokens=kernel)
    assert [placed_entries("k", v, 5) for v in split] == [placed_entries("k", v, 5) for v in whole]


def test_one_block_has_no_neighbour_to_be_apart_from() -> None:
    k, _ = attention_views([raw(48), raw(48)], **{**BLOCK, "blocks": 1})
    assert [p.entry for p in placed_entries("k", k, 1)] == [CacheEntry("k", 48, 48, "fp16")]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "fp8_e4m3"),
        (torch.float8_e5m2, "fp8_e5m2"), (torch.int8, "int8"), (torch.uint8, "uint8"), (torch.int32, "int32"),
    ],
)  # fmt: skip
def test_element_kinds_have_canonical_names(dtype: torch.dtype, name: str) -> None:
    (view,) = state_views(raw(64), ((4,),), (dtype,), 32)
    (placed,) = placed_entries("s", view, 2)
    assert (placed.entry.dtype, placed.entry.nbytes, placed.entry.stride) == (name, 4 * dtype.itemsize, 32)


def test_a_layout_is_shown_with_the_sizes_that_torch_has() -> None:
    """`kvactors layout show` has a table of its own, since it runs without torch."""
    assert {name: dtype.itemsize for dtype, name in ELEMENT_KINDS.items()} == ELEMENT_BYTES


# -- regions ---------------------------------------------------------------------------------------------------------------


def test_views_of_one_storage_are_registered_once() -> None:
    memory, apart = raw(5 * 256), raw(5 * 64)
    first = attention_views(memory, **BLOCK, page_bytes=256)
    second = attention_views(memory[96:], **BLOCK, page_bytes=256)
    (alone,) = state_views(apart, ((6,),), (torch.float32,), 64)
    regions = registered_regions([*first, alone, *second])
    expected = [(memory.data_ptr(), 4 * 256 + 192), (apart.data_ptr(), 4 * 64 + 24)]
    assert regions == sorted(expected)


def test_storages_over_the_same_memory_are_registered_once() -> None:
    """A store refuses regions that overlap, whoever made the tensors."""
    memory = bytearray(1024)
    a = torch.frombuffer(memory, dtype=torch.int8, count=600).view(6, 100)
    b = torch.frombuffer(memory, dtype=torch.int8, offset=500, count=500).view(5, 100)
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    ((address, nbytes),) = registered_regions([b, a])
    assert (address, nbytes) == (a.data_ptr(), 1000)


def test_alignment_goes_outwards_and_stays_in_the_storage() -> None:
    """4 KiB pages: the storage begins and ends within pages, and another lies beyond."""
    storage = torch.zeros(4 * 4096 + 100, dtype=torch.int8)
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes
    page = -(-begin // 4096) * 4096 - begin  # where the first whole page begins
    inside = storage[page + 4096 + 10 : page + 4096 + 50].view(2, 20)
    ((address, nbytes),) = registered_regions([inside], 4096)
    assert (address, nbytes) == (begin + page + 4096, 4096)
    ((address, nbytes),) = registered_regions([storage.view(1, -1)], 4096)
    assert (address, address + nbytes) == (begin, end)
    ((address, nbytes),) = registered_regions([inside], HUGE_PAGE_BYTES)
    assert begin <= address
    assert address + nbytes <= end
    for edge in (address, address + nbytes):
        assert edge % HUGE_PAGE_BYTES == 0 or edge in (begin, end)


def test_huge_pages_have_two_mebibytes() -> None:
    assert HUGE_PAGE_BYTES == 2_097_152
    storage = torch.zeros(3 * HUGE_PAGE_BYTES, dtype=torch.int8)
    first = -storage.data_ptr() % HUGE_PAGE_BYTES
    ((address, nbytes),) = registered_regions([storage[first + 5 : first + 6]], HUGE_PAGE_BYTES)
    assert address == storage.data_ptr() + first
    assert nbytes == HUGE_PAGE_BYTES


def test_regions_of_storages_side_by_side_never_overlap() -> None:
    storages = [torch.zeros(1000 + 7 * i, dtype=torch.int8) for i in range(20)]
    regions = registered_regions([s[10:20] for s in storages], HUGE_PAGE_BYTES)
    assert len(regions) == 20
    for (a, nbytes), (b, _) in pairwise(regions):
        assert a + nbytes <= b


def test_no_views_no_regions() -> None:
    assert registered_regions([]) == []


def test_storage_offset_zero_is_not_assumed() -> None:
    k, v = attention_views(raw(5 * 96), **BLOCK)
    assert placed_entries("k", k, 5)[0].address - k.untyped_storage().data_ptr() == LEAD
    assert placed_entries("v", v, 5)[0].address - v.untyped_storage().data_ptr() == LEAD + 48
