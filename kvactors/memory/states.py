"""Views of recurrent states: a page holds [conv | ssm | padding], or other states in their order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvactors.errors import LayoutError
from kvactors.memory.strided import pages, payload_bytes, whole_blocks


def state_views(
    raw: Tensor,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    page_bytes: int | None = None,
    *,
    blocks: int | None = None,
) -> list[Tensor]:
    """One view (blocks, *shape) for each state of a page, without a copy.

    Args:
        raw: dense, any shape and type.
        shapes, dtypes: of each state, in the order of the page.
        page_bytes: physical bytes of a page; None = the payload.
        blocks: how many; None = as many as the memory has pages.

    Raises:
        LayoutError: the states do not fit their page, one begins within an element (its offset is the sum of the payloads
            before it in ONE page), or the memory is too small.
    """
    count = _blocks(raw, shapes, dtypes, page_bytes, blocks)
    page = _payload(shapes, dtypes) if page_bytes is None else page_bytes
    views: list[Tensor] = []
    offset = 0
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        views.append(pages(raw, dtype, count, shape, page, offset, f"state {i}"))
        offset += payload_bytes(shape, dtype)
    return views


def contiguous_state_views(
    raw: Tensor,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    page_bytes: int | None = None,
    *,
    blocks: int | None = None,
) -> list[Tensor]:
    """The compatible layout with dense states: `[state 0 of all blocks][state 1 of all blocks]…`, padding at the end.

    `page_bytes` says how much memory a block has, and so how many blocks there are; no view has it as its stride.

    Raises:
        LayoutError: as `state_views`.
    """
    count = _blocks(raw, shapes, dtypes, page_bytes, blocks)
    views: list[Tensor] = []
    offset = 0
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        nbytes = payload_bytes(shape, dtype)
        views.append(pages(raw, dtype, count, shape, nbytes, offset, f"state {i}"))
        offset += count * nbytes
    return views


def _blocks(
    raw: Tensor,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    page_bytes: int | None,
    blocks: int | None,
) -> int:
    payload = _payload(shapes, dtypes)
    page = payload if page_bytes is None else page_bytes
    if payload > page:
        raise LayoutError(f"states: {payload} bytes of payload in a page of {page}; give pages of at least {payload}")
    return whole_blocks(raw, page, "states") if blocks is None else blocks


def _payload(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> int:
    if not shapes or len(shapes) != len(dtypes):
        raise LayoutError(f"states: {len(shapes)} shapes and {len(dtypes)} types; give one type for each shape")
    return sum(payload_bytes(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
