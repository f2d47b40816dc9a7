"""Local KV memory of one simulated rank: what it holds is written, checked and scribbled over here."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvactors.core.layout import KVLayout
from kvactors.simulate.truth import content


class LocalBlocks:
    """Blocks of every group, free lists, and where each entry lies. Block 0 is never used."""

    def __init__(self, layout: KVLayout, tp_rank: int, memory: bytearray, base: int, blocks: int, rng: random.Random) -> None:
        self.layout = layout
        self.bases: dict[tuple[int, int, str], int] = {}
        self.fenced: set[tuple[int, int]] = set()
        self._memory, self._rng = memory, rng
        self._keys: dict[tuple[int, bytes], tuple[str, int]] = {}
        self._head = {g.id: layout.head_of(g.id, tp_rank) for g in layout.groups}
        self._pieces: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        self._free = {g.id: list(range(1, blocks)) for g in layout.groups}
        at = base
        for g in layout.groups:
            for layer, entry, offset in layout.ranges(g.id):
                self.bases[g.id, int(layer), entry.name] = at
                pieces = self._pieces.setdefault((g.id, layout.stage_layer(layer)), [])
                pieces.append((at, entry.stride, entry.nbytes, offset))
                at += entry.stride * blocks

    def take(self, group: int, count: int) -> list[int] | None:
        """Blocks that nobody uses and no late call may write; None if there are not enough."""
        free = self._free[group]
        usable = [b for b in free if (group, b) not in self.fenced] if self.fenced else free
        if len(usable) < count:
            return None
        taken = self._rng.sample(usable, count)
        gone = set(taken)
        self._free[group] = [b for b in free if b not in gone]
        return taken

    def give_back(self, group: int, blocks: Sequence[int]) -> None:
        self._free[group].extend(blocks)

    def scribble(self, group: int, blocks: Sequence[int]) -> None:
        """What the next owner of the blocks does to them."""
        for (g, _), pieces in self._pieces.items():
            if g == group:
                for at, stride, size, _ in pieces:
                    for block in blocks:
                        start = at + block * stride
                        self._memory[start : start + size] = b"\xee" * size

    def _key(self, group: int, block_hash: bytes) -> tuple[str, int]:
        known = self._keys.get((group, block_hash))
        if known is None:
            known = self.layout.key(group, block_hash, self._head[group]), self.layout.object_bytes(group)
            self._keys[group, block_hash] = known
        return known

    def write(self, group: int, layer: int, block: int, block_hash: bytes, right: bool) -> None:
        """Computes one layer of one block: the right bytes, or what a model computes from missing KV."""
        truth = content(*self._key(group, block_hash)) if right else b""
        for at, stride, size, offset in self._pieces.get((group, layer), ()):
            start = at + block * stride
            self._memory[start : start + size] = truth[offset : offset + size] if right else b"\xdd" * size

    def holds(self, group: int, layer: int, block: int, block_hash: bytes) -> bool:
        """Whether one layer of a block holds the bytes of its hash."""
        truth = content(*self._key(group, block_hash))
        return all(
            self._memory[at + block * stride : at + block * stride + size] == truth[offset : offset + size]
            for at, stride, size, offset in self._pieces.get((group, layer), ())
        )

    def key(self, group: int, block_hash: bytes) -> str:
        return self._key(group, block_hash)[0]


def local_bytes_of(layout: KVLayout, blocks: int) -> int:
    """Local memory that `blocks` blocks of every group take."""
    return blocks * sum(entry.stride for g in layout.groups for _, entry, _ in layout.ranges(g.id))
