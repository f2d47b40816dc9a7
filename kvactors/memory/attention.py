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
from kvactors.memory.overlaps import block_runs, first_meeting
from kvactors.memory.strided import known, pages, payload_bytes, raw_bytes, strided, whole_blocks


class KVOrder(StrEnum):
    """How K and V share one allocation."""

    BLOCKS_FIRST = "blocks_first"
    """Each page holds K, then V, then padding."""
    LANES_FIRST = "lanes_first"
    """The K of all blocks, then the V of all blocks; each half of the allocation is a lane."""


def attention_views(
    raw: Tensor | Sequence[Tensor],
    *,
    blocks: int | None = None,
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
        raw: one allocation for both, or one each for K and V; dense, any shape and type.
        blocks: how many; None = as many as the memory has pages.
        block_tokens: tokens of a block.
        kv_heads, head_dim, head_dim_v: inner sizes; V's head is as large as K's unless said.
        page_bytes: physical bytes of a block (of a lane, where lanes are apart); None = the payload.
        order: how they share one allocation.
        kernel_tokens: tokens of a kernel block; a block is then split into equal ones, ids b -> b·k … b·k + k - 1.

    Returns:
        K of shape (blocks, kv_heads, block_tokens, head_dim) and V with head_dim_v; with `kernel_tokens`
        (blocks·k, kv_heads, kernel_tokens, …).

    Raises:
        LayoutError: the memory is too small, misaligned or shared by K and V, or a block to be split is no dense page.
    """
    order = _order(order)
    shapes = [(kv_heads, block_tokens, head_dim), (kv_heads, block_tokens, head_dim if head_dim_v is None else head_dim_v)]
    payloads = [payload_bytes(shape, dtype) for shape in shapes]
    if not isinstance(raw, Tensor):
        if len(raw) != 2:
            raise LayoutError(f"attention: {len(raw)} allocations; give one for both, or one each for K and V")
        lanes = [(raw[i], 0, known(page_bytes, payloads[i])) for i in range(2)]
    elif order is KVOrder.LANES_FIRST:
        if payloads[0] != payloads[1]:
            raise LayoutError(
                f"attention: lanes of {payloads} bytes a block cannot be the two halves of one allocation; give one each"
            )
        half = _half(raw, "attention")
        lanes = [(raw, i * half, known(page_bytes, payloads[i])) for i in range(2)]
    else:
        lanes = [(raw, i * payloads[0], known(page_bytes, sum(payloads))) for i in range(2)]
        if (both := sum(payloads)) > lanes[0][2]:
            raise LayoutError(f"attention: {both} bytes of K and V in a page of {lanes[0][2]}; give pages of at least {both}")
    if blocks is None:
        counts = [_whole(memory, page, lanes[1][1] if order is KVOrder.LANES_FIRST else 0) for memory, _, page in lanes]
        if counts[0] != counts[1]:
            raise LayoutError(f"attention: memory for {counts[0]} blocks of K and {counts[1]} of V; give the number of blocks")
        blocks = counts[0]
    views: list[Tensor] = []
    for name, shape, (memory, offset, page) in zip("KV", shapes, lanes, strict=True):
        views.append(lane_view(memory, dtype, blocks, shape, page, offset, name, kernel_tokens))
    require_apart(views, "KV", "attention")
    return views[0], views[1]


def require_apart(views: Sequence[Tensor], names: Sequence[str], what: str) -> None:
    """Raises LayoutError if two of a layer's views share a byte; pages that lie between each other are no overlap."""
    runs = [(name, run) for name, view in zip(names, views, strict=True) for run in block_runs(view, name)]
    if (pair := first_meeting([run for _, run in runs], [name for name, _ in runs])) is not None:
        (one, a), (other, b) = (runs[i] for i in pair)
        raise LayoutError(
            f"{what}: {one} ({a.nbytes} of every {a.stride} bytes from {a.address:#x}) and {other} ({b.nbytes} of every "
            f"{b.stride} from {b.address:#x}) share bytes; give each memory of its own"
        )


def lane_view(
    raw: Tensor,
    dtype: torch.dtype,
    blocks: int,
    shape: tuple[int, int, int],
    page_bytes: int,
    offset_bytes: int,
    what: str,
    kernel_tokens: int | None = None,
) -> Tensor:
    """The view of one lane: blocks of shape (kv_heads, block_tokens, head_dim), or the kernel blocks that they are split into.

    Raises:
        LayoutError: as `attention_views`.
    """
    if kernel_tokens is None:
        return pages(raw, dtype, blocks, shape, page_bytes, offset_bytes, what)
    heads, tokens, dim = shape
    k = kernel_blocks_per_block(tokens, kernel_tokens)
    payload = payload_bytes(shape, dtype)
    if k > 1 and page_bytes != payload:
        raise LayoutError(
            f"{what}: a block of {payload} bytes in pages of {page_bytes} is not one dense page, so it cannot be split into "
            f"{k} kernel blocks of {kernel_tokens} tokens; use blocks of {kernel_tokens} tokens"
        )
    return pages(raw, dtype, blocks * k, (heads, kernel_tokens, dim), page_bytes // k, offset_bytes, what)


def combined_attention_view(
    raw: Tensor,
    *,
    blocks: int | None = None,
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
    order = _order(order)
    if order is KVOrder.BLOCKS_FIRST:
        page, lane, least = known(page_bytes, 2 * payload), payload, 2 * payload
    else:
        page, lane, least = known(page_bytes, payload), _half(raw, "combined K/V"), payload
    if blocks is None:
        blocks = _whole(raw, page, lane if order is KVOrder.LANES_FIRST else 0)
    if page < least:
        raise LayoutError(f"combined K/V: {least} bytes of payload in a page of {page}; give pages of at least {least}")
    if order is KVOrder.LANES_FIRST and (blocks - 1) * page + payload > lane:
        raise LayoutError(
            f"combined K/V: {blocks} blocks, {page} bytes apart, in a lane of {lane} bytes; give fewer blocks or more memory"
        )
    return strided(raw, dtype, (2, blocks, *inner), (lane, page, *steps), 0, "combined K/V")


def contiguous_attention_views(
    raw: Tensor,
    *,
    blocks: int | None = None,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    head_dim_v: int | None = None,
    page_bytes: int | None = None,
    lead_bytes: int = 0,
) -> tuple[Tensor, Tensor]:
    """The compatible layout with padding in regions of its own: `[lead of all blocks][K of all blocks][V of all blocks]`.

    `page_bytes`: bytes of memory a block has, padding included, and so how many blocks there are unless `blocks` says it.
    `lead_bytes`: bytes a block that the state layers which share the memory use in front (their convolution state).

    Raises:
        LayoutError: as `attention_views`.
    """
    k_shape = (kv_heads, block_tokens, head_dim)
    v_shape = (kv_heads, block_tokens, head_dim if head_dim_v is None else head_dim_v)
    k_bytes, v_bytes = payload_bytes(k_shape, dtype), payload_bytes(v_shape, dtype)
    payload = lead_bytes + k_bytes + v_bytes
    page = known(page_bytes, payload)
    if payload > page:
        raise LayoutError(f"attention: {payload} bytes of payload in a page of {page}; give pages of at least {payload}")
    if blocks is None:
        blocks = whole_blocks(raw, page, "attention")
    k = pages(raw, dtype, blocks, k_shape, k_bytes, blocks * lead_bytes, "K")
    v = pages(raw, dtype, blocks, v_shape, v_bytes, blocks * (lead_bytes + k_bytes), "V")
    return k, v


def kernel_blocks_per_block(block_tokens: int, kernel_tokens: int) -> int:
    """Raises LayoutError unless blocks are made of whole kernel blocks."""
    if kernel_tokens < 1 or block_tokens % kernel_tokens:
        raise LayoutError(
            f"kernel blocks of {kernel_tokens} tokens do not make up blocks of {block_tokens}; give a size that divides them"
        )
    return block_tokens // kernel_tokens


def kernel_block_ids(block_ids: npt.ArrayLike, per_block: int) -> npt.NDArray[np.int64]:
    """Ids of the kernel blocks of attention blocks, in order: b -> b·k … b·k + k - 1. Ids of states are never expanded.

    Raises:
        LayoutError: `per_block` is below 1, or the ids are no integers.
    """
    if per_block < 1:
        raise LayoutError(f"{per_block} kernel blocks for each block: must be at least 1")
    given = np.asarray(block_ids)
    if given.size and given.dtype.kind not in "iu":
        raise LayoutError(f"block ids of type {given.dtype}: must be integers")
    ids = np.atleast_1d(given.astype(np.int64))
    return (ids[..., None] * per_block + np.arange(per_block)).reshape(*ids.shape[:-1], ids.shape[-1] * per_block)


def _order(order: KVOrder | str) -> KVOrder:
    try:
        return KVOrder(order)
    except ValueError:
        raise LayoutError(f"order {order!r}: one of {', '.join(o.value for o in KVOrder)}") from None


def _half(raw: Tensor, what: str) -> int:
    nbytes = raw_bytes(raw)
    if nbytes % 2:
        raise LayoutError(f"{what}: {nbytes} bytes of memory have no two halves; give an even number")
    return nbytes // 2


def _whole(raw: Tensor, page_bytes: int, half: int) -> int:
    """Blocks of an allocation, or of its half where lanes are halves."""
    nbytes = half or raw_bytes(raw)
    if page_bytes < 1 or nbytes % page_bytes or not nbytes:
        what = "a lane" if half else "memory"
        raise LayoutError(
            f"attention: {nbytes} bytes of {what} are no whole number of pages of {page_bytes} bytes; give the number of blocks"
        )
    return nbytes // page_bytes
