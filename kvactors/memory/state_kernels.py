"""Triton kernels that move state rows on CUDA and, through Triton-Ascend, on NPU. Not verified on hardware.

Loaded only where Triton is installed and a state lies on such a device. One program copies up to BLOCK elements of one row, so
that a long row is spread over the device. In Triton's interpreter on a CPU they agree with torch's index operations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of a row that one program moves."""


def _gather(
    pages: Any, indices: Any, flags: Any, dense: Any, page_stride: Any, row: Any, HAS_FLAGS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < row
    end = row
    if HAS_FLAGS:
        end = tl.where(tl.load(flags + at) != 0, row, 0)
    page = tl.load(indices + at).to(tl.int64)
    values = tl.load(pages + page * page_stride + columns, mask=columns < end, other=0)
    tl.store(dense + at * row + columns, values, mask=inside)


def _scatter(pages: Any, indices: Any, rows: Any, page_stride: Any, row_stride: Any, row: Any, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < row
    page = tl.load(indices + at).to(tl.int64)
    values = tl.load(rows + at * row_stride + columns, mask=inside)
    tl.store(pages + page * page_stride + columns, values, mask=inside)


def _clear(pages: Any, indices: Any, flags: Any, page_stride: Any, row: Any, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.where(tl.load(flags + at) == 0, row, 0)
    page = tl.load(indices + at).to(tl.int64)
    zeros = tl.zeros((BLOCK,), dtype=pages.dtype.element_ty)
    tl.store(pages + page * page_stride + columns, zeros, mask=columns < end)


_gather_kernel = triton.jit(_gather)
_scatter_kernel = triton.jit(_scatter)
_clear_kernel = triton.jit(_clear)


class TritonMoves:
    """`state_moves.Moves` by Triton."""

    def gather(self, dense: Tensor, pages: Tensor, indices: Tensor, flags: Tensor | None) -> None:
        given = indices if flags is None else _as_bytes(flags)
        _gather_kernel[_grid(dense)](
            pages, indices.contiguous(), given, dense, pages.stride(0), dense.shape[1], HAS_FLAGS=flags is not None, BLOCK=BLOCK
        )

    def scatter_(self, pages: Tensor, indices: Tensor, rows: Tensor) -> None:
        _scatter_kernel[_grid(rows)](
            pages, indices.contiguous(), rows, pages.stride(0), rows.stride(0), rows.shape[1], BLOCK=BLOCK
        )

    def clear_(self, pages: Tensor, indices: Tensor, flags: Tensor) -> None:
        grid = (len(indices), triton.cdiv(pages.shape[1], BLOCK))
        _clear_kernel[grid](pages, indices.contiguous(), _as_bytes(flags), pages.stride(0), pages.shape[1], BLOCK=BLOCK)


def _as_bytes(flags: Tensor) -> Tensor:
    return flags.contiguous().view(torch.uint8)


def _grid(rows: Tensor) -> tuple[int, int]:
    return (len(rows), triton.cdiv(rows.shape[1], BLOCK))
