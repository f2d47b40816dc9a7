"""From pairs of blocks to descriptors: (source address, destination address, bytes), as a transport takes them.

Every range costs its time whatever its size (23 to 30 µs over TCP, measured), so runs of consecutive blocks become one
descriptor wherever nothing lies between their payloads. Cost is linear in blocks.
Source: docs/design/disagg.md; vllm#55434 (a hundred thousand descriptors for one transfer).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvactors.core.ranges import MAX_RANGES
from kvactors.core.store import Addresses
from kvactors.disagg.heads import ByteRange
from kvactors.disagg.regions import TransferRegion
from kvactors.errors import TransferPlanError


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """Blocks of one group that are sent: `src[i]` on prefill becomes `dst[i]` on decode; int64 arrays of one length."""

    src: Addresses
    dst: Addresses

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """What is sent of every block of a region: a part of each piece, made once for a pair of workers."""

    src: TransferRegion
    dst: TransferRegion
    part: ByteRange

    @property
    def dense(self) -> bool:
        """Whether consecutive blocks are one run of bytes on both sides."""
        whole = self.part.src_offset == self.part.dst_offset == 0
        return whole and self.part.nbytes == self.src.block_bytes == self.dst.block_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Copies to make: int64 arrays of one length, addresses and bytes."""

    src: Addresses
    dst: Addresses
    nbytes: Addresses

    def __len__(self) -> int:
        return len(self.src)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())


def region_descriptors(copy: RegionCopy, blocks: BlockPairs) -> Descriptors:
    """The descriptors of one region.

    One for each run of blocks that are consecutive on both sides, where the copy is dense; else one for each block, two where K
    and V of a block are apart (K of a block, then its V).
    """
    if copy.dense and len(blocks):
        breaks = np.flatnonzero((np.diff(blocks.src) != 1) | (np.diff(blocks.dst) != 1)) + 1
        starts = np.concatenate(([0], breaks))
        counts = np.diff(starts, append=len(blocks))
        src = copy.src.base_address + blocks.src[starts] * copy.src.block_bytes
        dst = copy.dst.base_address + blocks.dst[starts] * copy.dst.block_bytes
        return Descriptors(src, dst, counts * copy.part.nbytes)
    piece = np.arange(copy.src.pieces, dtype=np.int64)
    src = _addresses(copy.src, blocks.src, copy.part.src_offset + piece * copy.src.payload_bytes)
    dst = _addresses(copy.dst, blocks.dst, copy.part.dst_offset + piece * copy.dst.payload_bytes)
    return Descriptors(src, dst, np.full(len(src), copy.part.nbytes, dtype=np.int64))


def _addresses(region: TransferRegion, ids: Addresses, offsets: Addresses) -> Addresses:
    """Of each block and offset within a block, blocks outermost."""
    return ((region.base_address + ids * region.block_bytes)[:, None] + offsets).reshape(-1)


def request_descriptors(copies: Sequence[RegionCopy], blocks: Sequence[BlockPairs]) -> Descriptors:
    """The descriptors of a request between two workers: of every region in turn, with the blocks of its group.

    Args:
        copies: the regions that the two workers share.
        blocks: for each group, in order; those without blocks send nothing.
    """
    found = [region_descriptors(copy, blocks[copy.src.group_index]) for copy in copies]
    none = np.empty(0, dtype=np.int64)
    return Descriptors(
        np.concatenate([none, *(d.src for d in found)]),
        np.concatenate([none, *(d.dst for d in found)]),
        np.concatenate([none, *(d.nbytes for d in found)]),
    )


def batches(descriptors: Descriptors, limit: int = MAX_RANGES) -> Iterator[Descriptors]:
    """The descriptors in order, in batches of at most `limit`; more than some 2000 in one call fail over TCP (measured).

    Raises:
        TransferPlanError: the limit is below 1.
    """
    if limit < 1:
        raise TransferPlanError(f"limit = {limit}: a batch holds at least 1 descriptor")
    for at in range(0, len(descriptors), limit):
        part = slice(at, at + limit)
        yield Descriptors(descriptors.src[part], descriptors.dst[part], descriptors.nbytes[part])
