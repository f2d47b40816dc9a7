"""The one place where a view is laid over raw memory: typed, strided, checked, never a copy.

A view's first dimension counts blocks. Its stride is the page of a block, whatever of it is payload; the inner dimensions are
dense. Rules: a page at least as large as the payload, offsets that are whole elements, and nothing outside the allocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from kvactors.errors import LayoutError


def raw_bytes(raw: Tensor) -> int:
    """Bytes of a raw allocation.

    Raises:
        LayoutError: it is not dense.
    """
    if not raw.is_contiguous():
        raise LayoutError(
            f"raw memory of shape {tuple(raw.shape)} and stride {raw.stride()}: must be dense (contiguous); give the allocation"
        )
    nbytes: int = raw.numel() * raw.element_size()
    return nbytes


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a dense tensor in the order of its dimensions."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def payload_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one block of this inner shape."""
    nbytes: int = prod(shape) * dtype.itemsize
    return nbytes


def typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory as elements of another type; bytes at the end that make no whole element are left out.

    Raises:
        LayoutError: the allocation does not begin at a whole element, in its storage or in memory.
    """
    nbytes = raw_bytes(raw)
    begin = raw.storage_offset() * raw.element_size()
    if begin % dtype.itemsize:
        raise LayoutError(
            f"raw memory begins at byte {begin} of its storage: not at a multiple of {dtype.itemsize} ({dtype}); move it"
        )
    if raw.data_ptr() % dtype.itemsize:
        raise LayoutError(
            f"raw memory begins at address {raw.data_ptr():#x}: not at a multiple of {dtype.itemsize} ({dtype}); move it"
        )
    whole = nbytes // dtype.itemsize * dtype.itemsize // raw.element_size()
    return raw.view(-1).narrow(0, 0, whole).view(dtype)


def strided(
    raw: Tensor, dtype: torch.dtype, shape: Sequence[int], strides_bytes: Sequence[int], offset_bytes: int, what: str
) -> Tensor:
    """A view of any strides over raw memory.

    Args:
        raw: dense, any shape and type.
        shape, strides_bytes: of each dimension, elements and bytes.
        offset_bytes: of the first element, from the beginning of `raw`.
        what: names the view in errors.

    Raises:
        LayoutError: a stride or the offset is not a whole number of elements, or the view leaves the allocation.
    """
    item = dtype.itemsize
    for name, value in (("offset", offset_bytes), *(("stride", s) for s in strides_bytes)):
        if value < 0 or value % item:
            raise LayoutError(
                f"{what}: {name} of {value} bytes is not a multiple of the {item} bytes of {dtype}; pad it to one"
            )
    if min(shape, default=1) < 1:
        raise LayoutError(
            f"{what}: shape {tuple(shape)} has a dimension below 1; give at least one block, and sizes of at least 1"
        )
    end = offset_bytes + sum((size - 1) * stride for size, stride in zip(shape, strides_bytes, strict=True)) + item
    if end > raw_bytes(raw):
        raise LayoutError(f"{what}: ends at byte {end} of an allocation of {raw_bytes(raw)}; give fewer blocks or more memory")
    memory = typed(raw, dtype)
    begin = memory.storage_offset() + offset_bytes // item
    return torch.as_strided(memory, tuple(shape), tuple(s // item for s in strides_bytes), begin)


def pages(
    raw: Tensor, dtype: torch.dtype, blocks: int, inner: Sequence[int], page_bytes: int, offset_bytes: int, what: str
) -> Tensor:
    """A view [blocks, *inner] whose blocks lie a page apart and are dense inside.

    Raises:
        LayoutError: the payload is larger than the page, or see `strided`.
    """
    payload = payload_bytes(inner, dtype)
    if payload > page_bytes:
        raise LayoutError(f"{what}: {payload} bytes of payload in a page of {page_bytes}; give pages of at least {payload}")
    steps = [step * dtype.itemsize for step in dense_strides(inner)]
    return strided(raw, dtype, (blocks, *inner), (page_bytes, *steps), offset_bytes, what)


def known(value: int | None, otherwise: int) -> int:
    """What was said, or what holds unless it is."""
    return otherwise if value is None else value


def whole_blocks(raw: Tensor, page_bytes: int, what: str) -> int:
    """How many pages an allocation holds.

    Raises:
        LayoutError: it is no whole number of pages, or none.
    """
    nbytes = raw_bytes(raw)
    if page_bytes < 1 or nbytes % page_bytes or nbytes < page_bytes:
        raise LayoutError(
            f"{what}: {nbytes} bytes of memory are not a whole number of pages of {page_bytes} bytes; give the number of blocks"
        )
    return nbytes // page_bytes
