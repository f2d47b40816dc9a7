"""Ways to move checked rows, one for each kind of device: numpy and wide integers on a CPU, Triton, torch's index operations.

All take matrices (rows, elements of a row) whose second dimension is dense. Nothing here is checked: see `state_rows`.
"""

from __future__ import annotations

import importlib
from functools import cache
from math import gcd
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LARGE_ROW_BYTES = 64 << 10
"""From here on a CPU gathers row by row of bytes, in one call that shares nothing among threads."""

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Moves(Protocol):
    """What a device can do with rows."""

    def gather(self, dense: Tensor, pages: Tensor, indices: Tensor, flags: Tensor | None) -> None:
        """dense[i] = pages[indices[i]], or zeros where flags[i] is False; the index of such a row is a valid one."""

    def scatter_(self, pages: Tensor, indices: Tensor, rows: Tensor) -> None:
        """pages[indices[i]] = rows[i]; the types are the same, the memory is not."""

    def clear_(self, pages: Tensor, indices: Tensor, flags: Tensor) -> None:
        """pages[indices[i]] = 0 where flags[i] is False; elsewhere indices[i] may be anything."""


class IndexMoves:
    """torch's index operations: any device."""

    def gather(self, dense: Tensor, pages: Tensor, indices: Tensor, flags: Tensor | None) -> None:
        torch.index_select(pages, 0, indices, out=dense)
        if flags is not None:
            dense.masked_fill_(~flags[:, None], 0)

    def scatter_(self, pages: Tensor, indices: Tensor, rows: Tensor) -> None:
        pages.index_copy_(0, indices.long(), rows)

    def clear_(self, pages: Tensor, indices: Tensor, flags: Tensor) -> None:
        pages.index_fill_(0, indices[~flags].long(), 0)


class CpuMoves:
    """Whole rows of bytes; see the table in `state_rows`."""

    def gather(self, dense: Tensor, pages: Tensor, indices: Tensor, flags: Tensor | None) -> None:
        absent = np.flatnonzero(~flags.numpy()) if flags is not None else ()
        if len(absent) == len(dense):
            dense.zero_()
            return
        if dense.shape[1] * dense.element_size() < LARGE_ROW_BYTES:
            target, source = as_integers(dense, pages)
            torch.index_select(source, 0, indices, out=target)
        else:
            rows = map(_bytes(pages).__getitem__, indices.tolist())
            np.concatenate(list(rows), out=_bytes(dense).reshape(-1))
        if len(absent):
            _bytes(dense)[absent] = 0

    def scatter_(self, pages: Tensor, indices: Tensor, rows: Tensor) -> None:
        _bytes(pages)[indices.numpy()] = _bytes(rows)

    def clear_(self, pages: Tensor, indices: Tensor, flags: Tensor) -> None:
        (target,) = as_integers(pages)
        target.numpy()[indices[~flags].numpy()] = 0


def _bytes(matrix: Tensor) -> npt.NDArray[np.uint8]:
    """The same memory as (rows, bytes of a row)."""
    found: npt.NDArray[np.uint8] = matrix.view(torch.uint8).numpy()
    return found


def as_integers(*matrices: Tensor) -> list[Tensor]:
    """The same memory as the widest integers that divide every row, stride, offset and address of all of them."""
    measures = [8]
    for matrix in matrices:
        item = matrix.element_size()
        measures += [matrix.shape[1] * item, int(matrix.storage_offset()) * item, matrix.data_ptr()]
        if len(matrix) > 1:
            measures.append(matrix.stride(0) * item)
    width = gcd(*measures)
    return [matrix.view(_INTEGERS[width]) for matrix in matrices]


@cache
def moves_for(device: torch.device) -> Moves:
    """The way for a device, decided once for each."""
    if device.type == "cpu":
        return CpuMoves()
    if device.type in ("cuda", "npu"):
        try:
            kernels = importlib.import_module("kvactors.memory.state_kernels")
        except ImportError:
            return IndexMoves()
        found: Moves = kernels.TritonMoves()
        return found
    return IndexMoves()
