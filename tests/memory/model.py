"""A plain-Python model of where bytes must lie, and ways to look at what a view really is; neither asks the other.

Raw memory is always a slice of a larger storage, so that a view that forgets the slice's own offset is found out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEAD = 64
"""Bytes of the storage in front of the raw memory: a multiple of every element size, and not 0."""


def raw(nbytes: int, dtype: torch.dtype = torch.int8, lead: int = LEAD) -> Tensor:
    """Raw memory in the middle of a storage."""
    storage = torch.zeros(lead + nbytes + LEAD, dtype=torch.int8)
    return storage[lead : lead + nbytes].view(dtype)


def storage_bytes(of: Tensor) -> bytes:
    """Everything that lies in the storage behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(of.untyped_storage()).numpy().tobytes()


@dataclass(frozen=True)
class Rows:
    """Where a view's blocks lie in raw memory: block b has the `spans` (offset, bytes) from `base + b * page` on."""

    base: int
    page: int
    spans: tuple[tuple[int, int], ...]

    def of(self, block: int) -> list[int]:
        """Every byte of a block in the order of its elements, as offsets in raw memory."""
        start = self.base + block * self.page
        return [at for offset, nbytes in self.spans for at in range(start + offset, start + offset + nbytes)]


def dense(base: int, page: int, payload: int) -> Rows:
    return Rows(base, page, ((0, payload),))


def bytes_of(view: Tensor) -> list[int]:
    """Every byte of a view in the order of its elements, as offsets in its storage, from its strides alone."""
    item = view.element_size()
    return [
        byte
        for index in itertools.product(*(range(n) for n in view.shape))
        for at in [(view.storage_offset() + sum(i * s for i, s in zip(index, view.stride(), strict=True))) * item]
        for byte in range(at, at + item)
    ]


def write(block: Tensor, pattern: bytes) -> None:
    """Gives one block of a view these bytes, in the order of its elements, bit by bit."""
    block.copy_(torch.frombuffer(bytearray(pattern), dtype=block.dtype).reshape(block.shape))


def patterns(seed: int = 0) -> Iterator[bytes]:
    """Byte patterns of a kilobyte each, no two alike, and no byte of them 0."""
    for n in itertools.count(seed):
        yield bytes((n * 37 + i * 11 + i // 251) % 255 + 1 for i in range(1024))


def geometry(views: Sequence[Tensor]) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(shape, stride, storage offset) of each view; elements."""
    return [(tuple(v.shape), tuple(v.stride()), v.storage_offset()) for v in views]
