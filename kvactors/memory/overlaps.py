"""Where views meet: the runs of bytes that a view's blocks are, and whether two of them share a byte; exact, not by extent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from kvactors.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Run:
    """`blocks` pieces of `nbytes`, `stride` bytes apart; they do not overlap each other."""

    address: int
    nbytes: int
    stride: int
    blocks: int


def block_runs(view: Tensor, name: str) -> list[Run]:
    """The runs of a view whose first dimension counts blocks, by address: one where a block is one dense run, else several.

    Raises:
        LayoutError: a block overlaps itself or another one.
    """
    item, blocks = view.element_size(), view.shape[0]
    runs = [(offset * item, nbytes * item) for offset, nbytes in _dense_runs(view, name)]
    stride = view.stride(0) * item
    if _blocks_overlap(runs, stride, blocks):
        raise LayoutError(
            f"{name}: blocks of {sum(n for _, n in runs)} bytes, {stride} bytes apart, overlap; give each bytes of its own"
        )
    return [Run(view.data_ptr() + offset, nbytes, max(stride, nbytes), blocks) for offset, nbytes in runs]


def first_meeting(runs: Sequence[Run], owners: Sequence[object]) -> tuple[int, int] | None:
    """The numbers of two runs of different owners that share a byte."""
    columns = np.array([(r.address, r.nbytes, r.stride, r.blocks) for r in runs], np.int64).reshape(-1, 4)
    address, nbytes, stride, blocks = columns.T
    end = address + (blocks - 1) * stride + nbytes
    by_owner: dict[object, int] = {}
    owner = np.array([by_owner.setdefault(o, len(by_owner)) for o in owners], np.int64)
    for i in range(len(runs)):
        near = np.flatnonzero((owner[i + 1 :] != owner[i]) & (address[i + 1 :] < end[i]) & (address[i] < end[i + 1 :])) + i + 1
        even = near[stride[near] == stride[i]]
        # blocks x of i and y of j meet where gap - nbytes[i] < (x - y) * stride < gap + nbytes[j]
        gap = address[even] - address[i]
        least = np.maximum((gap - nbytes[i]) // stride[i] + 1, 1 - blocks[even])
        most = np.minimum(-(-(gap + nbytes[even]) // stride[i]) - 1, blocks[i] - 1)
        meeting = even[least <= most]
        for j in (*meeting[:1], *(n for n in near[stride[near] != stride[i]] if _meet(runs[i], runs[n]))):
            return i, int(j)
    return None


def _meet(a: Run, b: Run) -> bool:
    """Of any strides: for each piece of `a` the first of `b` that ends behind its beginning."""
    begins = a.address + np.arange(a.blocks, dtype=np.int64) * a.stride
    others = b.address + np.arange(b.blocks, dtype=np.int64) * b.stride
    at = np.searchsorted(others + b.nbytes, begins, side="right")
    inside = at < b.blocks
    return bool((others[at[inside]] < begins[inside] + a.nbytes).any())


def _blocks_overlap(runs: list[tuple[int, int]], stride: int, blocks: int) -> bool:
    if blocks == 1:
        return False
    length = runs[0][1]
    if len(runs) == 1 or runs[-1][0] + length <= stride:
        return length > stride
    starts = np.add.outer(np.arange(blocks, dtype=np.int64) * stride, np.array([at for at, _ in runs], np.int64))
    return bool((np.diff(np.sort(starts, axis=None)) < length).any())


def _dense_runs(view: Tensor, name: str) -> list[tuple[int, int]]:
    """(offset, length) in elements of the dense runs of block 0, by address."""
    inner = sorted(
        ((stride, size) for stride, size in zip(view.stride()[1:], view.shape[1:], strict=True) if size > 1), key=lambda d: d[0]
    )
    error = LayoutError(
        f"{name}: a view of stride {view.stride()} and shape {tuple(view.shape)} overlaps itself; give one without repeats"
    )
    run = 1
    outer: list[tuple[int, int]] = []
    for stride, size in inner:
        if stride < run:
            raise error
        if stride == run and not outer:
            run *= size
        else:
            outer.append((stride, size))
    offsets = [0]
    for stride, size in outer:
        offsets = [at + i * stride for at in offsets for i in range(size)]
    offsets.sort()
    if any(b - a < run for a, b in pairwise(offsets)):
        raise error
    return [(at, run) for at in offsets]
