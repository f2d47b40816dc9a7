"""Views of attention caches: K and V are always two logical views [block, kv_head, token, head_dim].

How they lie in memory comes from the allocation, never from the logical sizes: in two tensors, in one whose pages hold
[K | V | padding] (blocks first), or in one that holds all K and then all V (lanes first).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvactors.errors import LayoutError
from kvactors.memory.strided import pages, payload_bytes, raw_bytes, strided


class KVOrder(StrEnum):
    """How K and V share one allocation."""

    BLOCKS_FIRST = "blocks_first"
    """Each page holds K, then V, then padding."""
    LANES_FIRST = "lanes_first"
    """The K of all blocks, then the V of all blocks; each half of the allocation is a lane."""


def attention_views(
    raw: Tensor | Sequence[Tensor],
    *,
    blocks: int,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    head_dim_v: int | None = None,
    page_bytes: int | None = None,
    order: KVOrder = KVOrder.BLOCKS_FIRST,
    kernel_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """K and V of one layer over its raw memory, without a copy.

    Args:
        raw: one allocation for both, or one each for K and V; one dense dimension, any type.
        blocks: how many.
        block_tokens: tokens of a block.
        kv_heads, head_dim, head_dim_v: inner sizes; V's head is as large as K's unless said.
        page_bytes: physical bytes of a block (of a lane, where lanes are apart); None = the payload.
        order: how they share one allocation.
        kernel_tokens: tokens of a kernel block; a block is then split into equal ones, ids b -> b·k … b·k + k - 1.

    Returns:
        K of shape (blocks, kv_heads, block_tokens, head_dim) and V with head_dim_v; with `kernel_tokens`
        (blocks·k, kv_heads, kernel_tokens, …).

    Raises:
        LayoutError: the memory is too small, misaligned, or a block that should be split is not one dense page.
    """
    order = KVOrder(order)
    shapes = [(kv_heads, block_tokens, head_dim), (kv_heads, block_tokens, head_dim if head_dim_v is None else head_dim_v)]
    payloads = [payload_bytes(shape, dtype) for shape in shapes]
    if not isinstance(raw, Tensor):
        if len(raw) != 2:
            raise LayoutError(f"attention: {len(raw)} allocations; give one for both, or one each for K and V")
        lanes = [(raw[i], 0, page_bytes or payloads[i]) for i in range(2)]
    elif order is KVOrder.LANES_FIRST:
        if payloads[0] != payloads[1] or raw_bytes(raw) % 2:
            raise LayoutError(f"attention: lanes of {payloads} bytes a block cannot be the two halves of one allocation")
        lanes = [(raw, i * (raw_bytes(raw) // 2), page_bytes or payloads[i]) for i in range(2)]
    else:
        lanes = [(raw, i * payloads[0], page_bytes or sum(payloads)) for i in range(2)]
        if sum(payloads) > lanes[0][2]:
            raise LayoutError(f"attention: {sum(payloads)} bytes of K and V in a page of {lanes[0][2]}")
    views: list[Tensor] = []
    for name, shape, payload, (memory, offset, page) in zip("KV", shapes, payloads, lanes, strict=True):
        if kernel_tokens is None:
            views.append(pages(memory, dtype, blocks, shape, page, offset, name))
            continue
        k = kernel_blocks_per_block(block_tokens, kernel_tokens)
        if k > 1 and page != payload:
            raise LayoutError(
                f"{name}: a block of {payload} bytes in pages of {page} is not one dense page, so it cannot be split into {k} "
                f"kernel blocks of {kernel_tokens} tokens; use blocks of {kernel_tokens} tokens"
            )
        inner = (shape[0], kernel_tokens, shape[2])
        views.append(pages(memory, dtype, blocks * k, inner, page // k, offset, name))
    return views[0], views[1]


def combined_attention_view(
    raw: Tensor,
    *,
    blocks: int,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_bytes: int | None = None,
    order: KVOrder = KVOrder.LANES_FIRST,
) -> Tensor:
    """K and V as one view (2, blocks, block_tokens, kv_heads, head_dim); the first dimension is the lane.

    Lane and block stride come from the allocation. Blocks first: a page holds [K | V | padding], and the lane stride is K's
    payload. Lanes first: the lane stride is half the allocation, and `page_bytes` is the page of a block in its lane.

    Raises:
        LayoutError: as `attention_views`.
    """
    inner = (block_tokens, kv_heads, head_dim)
    payload = payload_bytes(inner, dtype)
    steps = (kv_heads * head_dim * dtype.itemsize, head_dim * dtype.itemsize, dtype.itemsize)
    if KVOrder(order) is KVOrder.BLOCKS_FIRST:
        page, lane, least = page_bytes or 2 * payload, payload, 2 * payload
    else:
        if raw_bytes(raw) % 2:
            raise LayoutError(f"combined K/V: {raw_bytes(raw)} bytes of memory have no two halves")
        page, lane, least = page_bytes or payload, raw_bytes(raw) // 2, payload
    if page < least:
        raise LayoutError(f"combined K/V: {least} bytes of payload in a page of {page}")
    if KVOrder(order) is KVOrder.LANES_FIRST and (blocks - 1) * page + payload > lane:
        raise LayoutError(f"combined K/V: {blocks} blocks a {page} bytes in a lane of {lane} bytes")
    return strided(raw, dtype, (2, blocks, *inner), (lane, page, *steps), 0, "combined K/V")


def contiguous_attention_views(
    raw: Tensor,
    *,
    blocks: int,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    head_dim_v: int | None = None,
    lead_bytes: int = 0,
) -> tuple[Tensor, Tensor]:
    """The compatible layout with padding in regions of its own: [lead of all blocks][K of all blocks][V of all blocks].

    `lead_bytes`: bytes a block that the state layers which share the memory use in front (their convolution state).

    Raises:
        LayoutError: as `attention_views`.
    """
    k_shape = (kv_heads, block_tokens, head_dim)
    v_shape = (kv_heads, block_tokens, head_dim if head_dim_v is None else head_dim_v)
    k_bytes, v_bytes = payload_bytes(k_shape, dtype), payload_bytes(v_shape, dtype)
    k = pages(raw, dtype, blocks, k_shape, k_bytes, blocks * lead_bytes, "K")
    v = pages(raw, dtype, blocks, v_shape, v_bytes, blocks * (lead_bytes + k_bytes), "V")
    return k, v


def kernel_blocks_per_block(block_tokens: int, kernel_tokens: int) -> int:
    """Raises LayoutError unless blocks are made of whole kernel blocks."""
    if kernel_tokens < 1 or block_tokens % kernel_tokens:
        raise LayoutError(f"kernel blocks of {kernel_tokens} tokens do not divide blocks of {block_tokens}")
    return block_tokens // kernel_tokens


def kernel_block_ids(block_ids: npt.ArrayLike, per_block: int) -> npt.NDArray[np.int64]:
    """Ids of the kernel blocks of attention blocks, in order: b -> b·k … b·k + k - 1. Ids of states are never expanded."""
    ids = np.asarray(block_ids, np.int64)
    return (ids[..., None] * per_block + np.arange(per_block)).reshape(*ids.shape[:-1], -1)
