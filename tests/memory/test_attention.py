"""Attention views: shape, strides and offsets come from the allocation, and nothing of the padding is in a view.

The blocks of the tables have 2 heads, 4 tokens and a head of 3: 24 elements, 48 bytes in float16. There are 5 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvactors.memory import KVOrder, attention_views, combined_attention_view, contiguous_attention_views, kernel_block_ids
from tests.memory.model import LEAD, bytes_of, geometry, raw

BLOCK: dict[str, Any] = {"blocks": 5, "block_tokens": 4, "kv_heads": 2, "head_dim": 3, "dtype": torch.float16}
BLOCKS_FIRST, LANES_FIRST = KVOrder.BLOCKS_FIRST, KVOrder.LANES_FIRST
AT = LEAD // 2
"""Where raw memory begins in its storage, in float16 elements."""


def test_the_worked_example() -> None:
    """48 float16 are 96 bytes; in pages of 128 the next block lies 64 elements on, and 16 elements between are nobody's."""
    memory = [raw(4 * 128), raw(4 * 128)]
    for view in attention_views(memory, blocks=4, block_tokens=4, kv_heads=2, head_dim=6, dtype=torch.float16, page_bytes=128):
        assert view.shape == (4, 2, 4, 6)
        assert view.stride() == (64, 24, 6, 1)
        assert view.is_contiguous() is False
        used = bytes_of(view)
        assert used == [LEAD + b * 128 + i for b in range(4) for i in range(96)]


@pytest.mark.parametrize(
    ("sizes", "options", "strides", "offsets"),
    [
        # Two tensors: each lane has the pages of its own.
        ((240, 240), {}, (24, 24), (0, 0)),
        ((320, 320), {"page_bytes": 64}, (32, 32), (0, 0)),
        ((304, 304), {"page_bytes": 64}, (32, 32), (0, 0)),  # the last page need not be padded
        # One tensor, blocks first: a page holds K, V and the padding.
        ((480,), {}, (48, 48), (0, 24)),
        ((640,), {"page_bytes": 128}, (64, 64), (0, 24)),
        ((640,), {"page_bytes": 128, "order": BLOCKS_FIRST}, (64, 64), (0, 24)),
        # One tensor, lanes first: V begins in the middle of the allocation, wherever that is.
        ((480,), {"order": LANES_FIRST}, (24, 24), (0, 120)),
        ((640,), {"order": LANES_FIRST, "page_bytes": 64}, (32, 32), (0, 160)),
        ((800,), {"order": LANES_FIRST}, (24, 24), (0, 200)),
    ],
)
def test_k_and_v_are_two_views(
    sizes: Sequence[int], options: dict[str, Any], strides: tuple[int, int], offsets: tuple[int, int]
) -> None:
    tensors = [raw(n) for n in sizes]
    views = attention_views(tensors[0] if len(tensors) == 1 else tensors, **BLOCK, **options)
    assert geometry(views) == [
        ((5, 2, 4, 3), (stride, 12, 3, 1), AT + offset) for stride, offset in zip(strides, offsets, strict=True)
    ]
    for view, memory in zip(views, tensors if len(tensors) == 2 else tensors * 2, strict=True):
        assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr(), "never a copy"


@pytest.mark.parametrize(
    ("nbytes", "options", "lane", "block"),
    [
        (480, {}, 120, 24),
        (480, {"order": LANES_FIRST}, 120, 24),
        (640, {"page_bytes": 64}, 160, 32),
        (800, {"page_bytes": 64}, 200, 32),  # room at the end of each lane
        (480, {"order": BLOCKS_FIRST}, 24, 48),
        (640, {"order": BLOCKS_FIRST, "page_bytes": 128}, 24, 64),
    ],
)
def test_combined_kv_takes_both_strides_from_the_allocation(
    nbytes: int, options: dict[str, Any], lane: int, block: int
) -> None:
    view = combined_attention_view(raw(nbytes), **BLOCK, **options)
    assert geometry([view]) == [((2, 5, 4, 2, 3), (lane, block, 6, 3, 1), AT)]


@pytest.mark.parametrize("order", KVOrder)
@pytest.mark.parametrize("page", [128, 160])
def test_combined_and_separate_views_of_one_allocation_have_the_same_blocks(order: KVOrder, page: int) -> None:
    memory = raw(5 * page * 2)
    both = combined_attention_view(memory, **BLOCK, page_bytes=page, order=order)
    for lane, view in zip(both, attention_views(memory, **BLOCK, page_bytes=page, order=order), strict=True):
        for b in range(5):
            assert sorted(bytes_of(lane[b])) == bytes_of(view[b])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]
)
@pytest.mark.parametrize("raw_type", [torch.int8, torch.uint8, torch.float16, torch.float32])
def test_any_element_type_over_raw_memory_of_any_type(dtype: torch.dtype, raw_type: torch.dtype) -> None:
    item = dtype.itemsize
    memory = raw(5 * 64 * item, raw_type)
    k, v = attention_views(memory, **{**BLOCK, "dtype": dtype}, page_bytes=64 * item)
    assert k.dtype == v.dtype == dtype
    assert geometry([k, v]) == [((5, 2, 4, 3), (64, 12, 3, 1), LEAD // item + offset) for offset in (0, 24)]
    assert [view.data_ptr() - memory.data_ptr() for view in (k, v)] == [0, 24 * item]


def test_v_may_have_a_head_of_its_own_size() -> None:
    k, v = attention_views(raw(5 * 96), **BLOCK, head_dim_v=2, page_bytes=96)
    assert geometry([k, v]) == [((5, 2, 4, 3), (48, 12, 3, 1), AT), ((5, 2, 4, 2), (48, 8, 2, 1), AT + 24)]
    k, v = attention_views([raw(240), raw(160)], **BLOCK, head_dim_v=2)
    assert [view.stride(0) for view in (k, v)] == [24, 16]


def test_layers_may_share_pages_at_any_distance() -> None:
    """Two layers in pages of 256 bytes: the second begins 112 bytes in, in a slice of the same memory."""
    memory = raw(5 * 256)
    first = attention_views(memory, **BLOCK, page_bytes=256)
    second = attention_views(memory[112:], **BLOCK, page_bytes=256)
    assert [v.storage_offset() - AT for v in (*first, *second)] == [0, 24, 56, 80]
    assert {v.stride(0) for v in (*first, *second)} == {128}
    used = [byte for v in (*first, *second) for byte in bytes_of(v)]
    assert len(used) == len(set(used)) == 5 * 4 * 48


@pytest.mark.parametrize("page", [None, 128])
@pytest.mark.parametrize("order", KVOrder)
def test_there_are_as_many_blocks_as_the_memory_has_pages_and_it_may_have_any_dense_shape(
    order: KVOrder, page: int | None
) -> None:
    unsaid = {name: value for name, value in BLOCK.items() if name != "blocks"}
    memory = raw(5 * (page or (96 if order is BLOCKS_FIRST else 48)) * (1 if order is BLOCKS_FIRST else 2))
    for given in (memory, memory.view(5, -1)):
        found = attention_views(given, **unsaid, page_bytes=page, order=order)
        assert geometry(found) == geometry(attention_views(memory, **BLOCK, page_bytes=page, order=order))
        both = combined_attention_view(given, **unsaid, page_bytes=page, order=order)
        assert geometry([both]) == geometry([combined_attention_view(memory, **BLOCK, page_bytes=page, order=order)])
        assert both.data_ptr() == found[0].data_ptr() == memory.data_ptr()
    apart = attention_views([raw(5 * (page or 48)), raw(5 * (page or 48))], **unsaid, page_bytes=page)
    assert [v.shape[0] for v in apart] == [5, 5]
    k, v = contiguous_attention_views(raw(5 * (page or 96)), **unsaid, page_bytes=page)
    assert geometry([k, v]) == [((5, 2, 4, 3), (24, 12, 3, 1), AT), ((5, 2, 4, 3), (24, 12, 3, 1), AT + 120)]


def test_k_and_v_in_slices_of_one_allocation_may_lie_between_each_other() -> None:
    memory = raw(640)
    k, v = attention_views([memory, memory[48:]], **BLOCK, page_bytes=128)
    assert geometry([k, v]) == geometry(attention_views(memory, **BLOCK, page_bytes=128))


# -- the layout with padding of its own ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("lead", "k_at", "v_at"), [(0, 0, 120), (16, 40, 160)])
def test_contiguous_views_are_dense_one_after_the_other(lead: int, k_at: int, v_at: int) -> None:
    views = contiguous_attention_views(raw(5 * (lead + 96)), **BLOCK, lead_bytes=lead)
    assert geometry(views) == [((5, 2, 4, 3), (24, 12, 3, 1), AT + k_at), ((5, 2, 4, 3), (24, 12, 3, 1), AT + v_at)]
    assert all(v.is_contiguous() for v in views)


# -- kernel blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "options"), [((240, 240), {}), ((480,), {"order": LANES_FIRST}), ((240, 240), {"page_bytes": 48})]
)
@pytest.mark.parametrize("kernel", [4, 2, 1])
def test_a_dense_block_is_made_of_kernel_blocks(sizes: Sequence[int], options: dict[str, Any], kernel: int) -> None:
    tensors: list[Tensor] = [raw(n) for n in sizes]
    memory = tensors[0] if len(tensors) == 1 else tensors
    whole = attention_views(memory, **BLOCK, **options)
    split = attention_views(memory, **BLOCK, **options, kernel_tokens=kernel)
    k = 4 // kernel
    for of_block, of_kernel in zip(whole, split, strict=True):
        assert of_kernel.shape == (5 * k, 2, kernel, 3)
        assert of_kernel.stride() == (24 // k, kernel * 3, 3, 1)
        for b in range(5):
            bytes_of_kernel = [byte for n in kernel_block_ids([b], k) for byte in bytes_of(of_kernel[int(n)])]
            assert bytes_of_kernel == bytes_of(of_block[b]), "block b is kernel blocks b·k … b·k + k - 1"


def test_ids_expand_in_order() -> None:
    assert kernel_block_ids([3, 0, 7], 2).tolist() == [6, 7, 0, 1, 14, 15]
    assert kernel_block_ids([3, 0], 1).tolist() == [3, 0]
    assert kernel_block_ids(2, 4).tolist() == [8, 9, 10, 11]
    assert kernel_block_ids([[0, 1], [5, 4]], 2).tolist() == [[0, 1, 2, 3], [10, 11, 8, 9]]
    assert kernel_block_ids(np.array([1 << 40]), 4).tolist() == [(1 << 42) + i for i in range(4)]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_a_table_without_blocks_expands_to_one_without_blocks(shape: tuple[int, ...]) -> None:
    assert kernel_block_ids(np.zeros(shape, np.int32), 4).shape == (*shape[:-1], shape[-1] * 4)
