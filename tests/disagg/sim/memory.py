"""The memory of one worker of the simulated world: bytes in an address range of its own, and whose each block is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvactors.core.layout import GroupKind
from kvactors.disagg import EntryGeometry, GroupGeometry, TransferRegion, Worker, WorkerGeometry, rank_heads

HEADS = 4
PIECE = 8
"""bytes of one head's K, or V, in a block"""
STATE = 24
BLOCKS = 48
BLOCK_TOKENS = 16
ATTENTION, RECURRENT = 0, 1

Entries = dict[int, tuple[EntryGeometry, ...]]


def content(name: str, *where: int) -> bytes:
    """What prefill computes, wherever it is kept."""
    return blake2b(repr((name, where)).encode(), digest_size=PIECE).digest()


@dataclass(eq=False)
class Memory:
    """One worker's caches: `owner` says whose each (group, block) is."""

    rank: Worker
    tp: int
    layers: list[int]
    state_layer: int | None
    base: int
    has_state: bool
    """some stage of the instance has a recurrent state"""
    data: bytearray = field(default_factory=bytearray)
    owner: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.heads = rank_heads(HEADS, self.tp, self.rank.tp_rank)
        self.block = 2 * PIECE * len(self.heads)
        self.data = bytearray(BLOCKS * (self.block * len(self.layers) + STATE))

    def geometry(self, pp: int) -> WorkerGeometry:
        half = PIECE * len(self.heads)
        entries: Entries = {
            layer: (EntryGeometry("k", "bf16", half), EntryGeometry("v", "bf16", half)) for layer in self.layers
        }
        size: dict[str, Any] = {"block_tokens": BLOCK_TOKENS, "blocks": BLOCKS}
        groups = [GroupGeometry(kind=GroupKind.FULL, layers=entries, kv_heads=HEADS, heads_first=True, **size)]
        regions = [
            TransferRegion(f"l{layer}", layer, self.base + self.attention(i, 0), self.block, half, ATTENTION, split_kv=True)
            for i, layer in enumerate(self.layers)
        ]
        if self.has_state:
            here: Entries = {} if self.state_layer is None else {self.state_layer: (EntryGeometry("ssm", "fp32", STATE),)}
            groups.append(GroupGeometry(kind=GroupKind.STATE, layers=here, **size))
            if self.state_layer is not None:
                at = self.base + self.state(0)
                regions.append(TransferRegion(f"l{self.state_layer}", self.state_layer, at, STATE, STATE, RECURRENT))
        return WorkerGeometry(
            layout_digest="sim",
            tp_rank=self.rank.tp_rank,
            tp_size=self.tp,
            pp_rank=self.rank.pp_rank,
            pp_size=pp,
            groups=tuple(groups),
            regions=tuple(regions),
        )

    def attention(self, index: int, block: int) -> int:
        return (index * BLOCKS + block) * self.block

    def state(self, block: int) -> int:
        return len(self.layers) * BLOCKS * self.block + block * STATE

    def pieces(self, group: int, position: int, block: int) -> list[tuple[int, tuple[int, ...]]]:
        """(offset, what is there) of every 8 bytes of a block."""
        if group == RECURRENT:
            if self.state_layer is None:
                return []
            at = self.state(block)
            return [(at + PIECE * i, (self.state_layer, self.rank.tp_rank, i, -1)) for i in range(STATE // PIECE)]
        found: list[tuple[int, tuple[int, ...]]] = []
        for i, layer in enumerate(self.layers):
            for kv in range(2):
                for h, head in enumerate(self.heads):
                    at = self.attention(i, block) + (kv * len(self.heads) + h) * PIECE
                    found.append((at, (layer, kv, head, position)))
        return found

    def block_of(self, offset: int) -> tuple[int, int]:
        end = len(self.layers) * BLOCKS * self.block
        return (ATTENTION, offset // self.block % BLOCKS) if offset < end else (RECURRENT, (offset - end) // STATE)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def take(self, group: int, count: int, owner: str, rng: random.Random) -> tuple[int, ...] | None:
        """Free blocks, from now on the owner's; None if there are not enough."""
        free = [b for b in range(1, BLOCKS) if (group, b) not in self.owner]
        if len(free) < count:
            return None
        rng.shuffle(free)
        for block in free[:count]:
            self.owner[group, block] = owner
        return tuple(free[:count])

    def tables(self, owner: str, tokens: int, first: int, rng: random.Random) -> list[tuple[int, ...]] | None:
        """Blocks for a request in each group, in attention from its block `first` on; None if there are not enough."""
        blocks = -(-tokens // BLOCK_TOKENS)
        attention = self.take(ATTENTION, max(0, blocks - first), owner, rng)
        if attention is None:
            return None
        if not self.has_state:
            return [attention]
        slot = self.take(RECURRENT, 1, owner, rng)
        if slot is None:
            self.release([attention], rng)
            return None
        return [attention, (0,) * (blocks - 1) + slot]

    def free(self, group: int, ids: tuple[int, ...]) -> bool:
        return not any((group, block) in self.owner for block in ids if block)

    def take_these(self, tables: list[tuple[int, ...]], owner: str) -> None:
        """Blocks that are free."""
        for group, ids in enumerate(tables):
            for block in filter(None, ids):
                self.owner[group, block] = owner

    def release(self, tables: list[tuple[int, ...]], rng: random.Random) -> list[str]:
        """The engine takes the blocks back, and uses them for something else at once. Returns what is wrong with that."""
        problems = []
        for group, ids in enumerate(tables):
            for block in filter(None, ids):
                if self.owner.pop((group, block), None) is None:
                    problems.append(f"block {block} of group {group} was not in use")
                for at, _ in self.pieces(group, 0, block):
                    self.data[at : at + PIECE] = rng.randbytes(PIECE)
        return problems

    def compute(self, name: str, tables: list[tuple[int, ...]]) -> None:
        for group, ids in enumerate(tables):
            for position, block in enumerate(ids):
                for at, what in self.pieces(group, position, block) if block else ():
                    self.data[at : at + PIECE] = content(name, *what)

    def holds(self, name: str, tables: list[tuple[int, ...]], tokens: int) -> bool:
        """Whether the blocks have what prefill computed."""
        blocks = -(-tokens // BLOCK_TOKENS)
        return all(
            self.data[at : at + PIECE] == content(name, *what)
            for group, ids in enumerate(tables)
            for i, block in enumerate(ids)
            for at, what in (self.pieces(group, blocks - len(ids) + i, block) if block else ())
        )
