"""An engine over a real memory store, small layouts, and local memory whose bytes say where they belong."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.steps import NULL_BLOCK, GroupBlocks, StepRequest
from kvactors.engine import Engine, EngineConfig, Step
from kvactors.stores.fault_plan import Fault
from kvactors.stores.faulty import FaultyStore
from kvactors.stores.memory import MemoryStore
from tests.engine.in_turn import InTurn

FULL, COMPRESSED, STATE = 0, 1, 2
PATIENCE_S = 30.0


def seed_layout() -> KVLayout:
    """The worked example: 16/32/16 tokens, layers 0,2 / 1,2,3 / 0,3, objects of 16, 32 and 36 bytes."""
    e = CacheEntry
    return KVLayout(
        "m",
        [
            Group(FULL, GroupKind.FULL, 16, {0: [e("kv", 8)], 2: [e("kv", 8)]}),
            Group(COMPRESSED, GroupKind.COMPRESSED, 32, {1: [e("c", 10)], 2: [e("c", 11)], 3: [e("c", 11)]}),
            Group(STATE, GroupKind.STATE, 16, {0: [e("s", 18)], 3: [e("s", 18)]}),
        ],
    )


def full_layout(layers: int = 2, entry: int = 16, **group: Any) -> KVLayout:
    """One full-attention group of 16-token blocks, K and V per layer; V lies in memory with padding."""
    entries = [CacheEntry("k", entry), CacheEntry("v", entry, entry + 8)]
    return KVLayout("m", [Group(0, GroupKind.FULL, 16, dict.fromkeys(range(layers), entries), **group)])


def hashes(count: int, prefix: str = "p") -> list[bytes]:
    """Chained fine hashes of a prompt; prompts with the same prefix share them."""
    return [hashlib.sha256(f"{prefix}/{i}".encode()).digest() for i in range(count)]


class Rig:
    """Owns local memory, the store behind a `FaultyStore`, and an engine with auditing on."""

    def __init__(
        self,
        layout: KVLayout | None = None,
        faults: Iterable[Fault] = (),
        *,
        config: Mapping[str, Any] | None = None,
        blocks: int = 64,
        store: Mapping[str, Any] | None = None,
        inner: MemoryStore | None = None,
        **engine: Any,
    ) -> None:
        self.layout = seed_layout() if layout is None else layout
        self.memory = MemoryStore(**(store or {})) if inner is None else inner
        self.store = FaultyStore(self.memory, list(faults))
        self.local: dict[tuple[int, int, str], np.ndarray[Any, Any]] = {}
        for group in self.layout.groups:
            for r in self.layout.ranges(group.id):
                array = np.zeros((blocks, r.entry.stride), np.uint8)
                self.local[group.id, int(r.layer), r.entry.name] = array
                self.memory.register(array.ctypes.data, array.nbytes)
        bases = {where: array.ctypes.data for where, array in self.local.items()}
        self.config = EngineConfig(**{"audit": True, "call_deadline_s": PATIENCE_S, **(config or {})})
        self.engine = Engine(self.layout, self.store, bases, self.config, **{"executor": InTurn(self.store), **engine})
        self.engine.keep_stories()

    async def __aenter__(self) -> Rig:
        await self.engine.start()
        return self

    async def __aexit__(self, failed: object, *_: object) -> None:
        for gate in self.store.gates.values():
            gate.release()
        await self.engine.close()
        self.memory.close()  # waits for range calls under way: they must not touch memory that is gone
        if failed is None:
            assert self.engine.violations() == []

    async def calls_returned(self) -> None:
        """Waits until calls past their deadline have returned and were dealt with: a lookup takes longer than a message."""
        while any(self.engine.crew.pool.lost_of(g.id) for g in self.layout.groups):
            await self.engine.lookup(hashes(4, "nothing"), 64)
        await quiet(self)

    async def saves_counted(self) -> None:
        """Waits until no save task counts as unfinished: its worker may take it off after the step has ended."""
        while self.engine.pending_saves:
            await self.engine.lookup(hashes(4, "nothing"), 64)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def right(self, where: tuple[int, int, str], block_hash: bytes) -> np.ndarray[Any, Any]:
        """What an entry of the block with this hash must hold."""
        size = next(r.entry.nbytes for r in self.layout.ranges(where[0]) if (int(r.layer), r.entry.name) == where[1:])
        text = f"{where}".encode() + block_hash
        return np.frombuffer(hashlib.shake_256(text).digest(size), np.uint8)

    def _entries(self, group: int, layer: int | None) -> list[tuple[int, int, str]]:
        return [w for w in self.local if w[0] == group and layer in (None, w[1])]

    def fill(self, group: int, block_hash: bytes, block_id: int, layer: int | None = None) -> None:
        for where in self._entries(group, layer):
            value = self.right(where, block_hash)
            self.local[where][block_id, : len(value)] = value

    def holds(self, group: int, block_hash: bytes, block_id: int, layer: int | None = None) -> bool:
        return all(
            (self.local[where][block_id, : len(value)] == value).all()
            for where in self._entries(group, layer)
            for value in [self.right(where, block_hash)]
        )

    def wipe(self) -> None:
        for array in self.local.values():
            array[:] = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def block_hash(self, group: int, index: int, fine: Sequence[bytes]) -> bytes:
        k = self.layout.group(group).block_tokens // self.engine.hash_tokens
        return fine[(index + 1) * k - 1]

    def request(
        self,
        request_id: str,
        fine: Sequence[bytes],
        *,
        load: Mapping[int, Sequence[int]] | None = None,
        save: Mapping[int, Sequence[int]] | None = None,
        first_id: int = 1,
        restarted_at: int | None = None,
    ) -> StepRequest:
        """A request whose block `i` lies at local block `first_id + i` in every group."""
        load, save = load or {}, save or {}
        groups = {}
        for g in self.layout.groups:
            count = len(fine) * self.engine.hash_tokens // g.block_tokens
            used = {*load.get(g.id, ()), *save.get(g.id, ())}
            ids = [first_id + i if i in used else NULL_BLOCK for i in range(count)]
            groups[g.id] = GroupBlocks(ids, tuple(load.get(g.id, ())), tuple(save.get(g.id, ())))
        return StepRequest(request_id, fine, groups, restarted_at)

    def all_blocks(self, fine: Sequence[bytes]) -> dict[int, list[int]]:
        """Every block of a prompt that can be hit: all of them, and of a state group the last."""
        out = {}
        for g in self.layout.groups:
            count = len(fine) * self.engine.hash_tokens // g.block_tokens
            out[g.id] = [count - 1] if g.kind is GroupKind.STATE else list(range(count))
        return out

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def run(self, *requests: StepRequest, settle: bool = True) -> tuple[Step, dict[int, frozenset[str]]]:
        """One whole step: computes what is saved, waits for what is loaded. Answers the failed set of each layer."""
        step = self.engine.begin_step(requests)
        failed = {}
        for layer in range(self.layout.stage_layers):
            failed[layer] = await step.wait_layer(layer)
            self.compute(layer, *requests)
            step.layer_ready(layer)
            await step.checkpoint(layer)
        await step.end()
        if settle:
            await step.settled()
        return step, failed

    def compute(self, layer: int, *requests: StepRequest) -> None:
        """Writes the bytes of one layer of every block that is saved."""
        for request in requests:
            for g, blocks in request.groups.items():
                for index in blocks.save:
                    self.fill(g, self.block_hash(g, index, request.hashes), blocks.block_ids[index], layer)

    async def save(self, request_id: str, fine: Sequence[bytes], first_id: int = 1) -> None:
        """Publishes a whole prompt."""
        await self.run(self.request(request_id, fine, save=self.all_blocks(fine), first_id=first_id))

    def loaded_right(self, request: StepRequest) -> bool:
        """Whether every block that the request loads holds its bytes."""
        return all(
            self.holds(g, self.block_hash(g, i, request.hashes), b.block_ids[i])
            for g, b in request.groups.items()
            for i in b.load
        )

    # -- the store -----------------------------------------------------------------------------------------------------

    def key(self, group: int, index: int, fine: Sequence[bytes]) -> str:
        return self.layout.key(group, self.block_hash(group, index, fine))

    def committed(self, group: int, fine: Sequence[bytes]) -> list[int]:
        """Indices of the group's blocks that are committed in the store."""
        count = len(fine) * self.engine.hash_tokens // self.layout.group(group).block_tokens
        return [i for i in range(count) if self.memory.contains(self.key(group, i, fine))]

    def objects(self, fine: Sequence[bytes]) -> int:
        return sum(len(self.committed(g.id, fine)) for g in self.layout.groups)


async def arrived(gate: Any) -> None:
    """Waits until a call is held at the gate."""
    assert await asyncio.to_thread(gate.arrived.wait, PATIENCE_S)


async def quiet(rig: Rig) -> None:
    """Waits until no job is queued or running: each probe passes through every queue that a commit passes."""
    for _ in range(6):
        await rig.engine.lookup(hashes(4, "nothing"), 64)
        while any(rig.engine.crew.pool.jobs_of(g.id) for g in rig.layout.groups):
            await rig.engine.lookup(hashes(4, "nothing"), 64)
