"""A worker of a hybrid model whose cache memory is laid out its own way, and an engine over it.

The model has full attention on layers 0 and 2, recurrent states on layers 1 and 3, and a sliding window on layer 2 as well. How
it lies in memory is drawn: pages with gaps that several layers share, tensors of their own, lanes, or one pool whose pages are
handed to one group or another. For each view there is a plain model of where its blocks must lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kvactors.core.layout import Group, GroupKind, KVLayout
from kvactors.core.steps import NULL_BLOCK, GroupBlocks, StepRequest
from kvactors.engine import Engine, EngineConfig
from kvactors.memory import KVOrder, attention_views, group_memory, registered_regions, state_views
from kvactors.stores.memory import MemoryStore
from tests.memory.model import Rows, dense, write

FULL, STATE, WINDOW = 0, 1, 2
TOKENS, HEADS, DIM, DTYPE = 4, 2, 6, torch.bfloat16
LANE = TOKENS * HEADS * DIM * DTYPE.itemsize  # 96 bytes
CONV, SSM = ((3, 8), torch.bfloat16), ((2, 4, 4), torch.float32)  # 48 and 128 bytes
STATE_BYTES = (48, 128)
BLOCKS = 24

Where = tuple[int, int, str]
"""group, layer, cache name"""
ATTENTION: list[tuple[int, int]] = [(FULL, 0), (FULL, 2), (WINDOW, 2)]
STATES: list[tuple[int, int]] = [(STATE, 1), (STATE, 3)]


@dataclass
class Placed:
    view: Tensor
    memory: Tensor
    """The whole storage as bytes; `rows` counts from its beginning."""
    rows: Rows


class Memory:
    """Views of all caches over memory that holds nothing but noise."""

    def __init__(self, form: str, seed: int) -> None:
        self.rng = Random(seed)
        self.placed: dict[Where, Placed] = {}
        self.storages: list[Tensor] = []
        {"pages": self._pages, "apart": self._apart, "lanes": self._lanes, "pool": self._pool}[form]()

    def _storage(self, nbytes: int) -> tuple[Tensor, int]:
        """Noise, and where in it raw memory of so many bytes begins: 8-byte aligned, with bytes of others around it."""
        lead = 8 * self.rng.randrange(5)
        storage = torch.frombuffer(bytearray(self.rng.randbytes(lead + nbytes + 24)), dtype=torch.uint8)
        self.storages.append(storage)
        return storage, lead

    def _gap(self) -> int:
        return 8 * self.rng.choice([0, 1, 5])

    def _attention(self, group: int, layer: int, storage: Tensor, begin: int, end: int, page: int, **order: KVOrder) -> None:
        k, v = attention_views(
            storage[begin:end],
            blocks=BLOCKS,
            block_tokens=TOKENS,
            kv_heads=HEADS,
            head_dim=DIM,
            dtype=DTYPE,
            page_bytes=page,
            **order,
        )
        v_at = (end - begin) // 2 if order else LANE
        self.placed[group, layer, "k"] = Placed(k, storage, dense(begin, page, LANE))
        self.placed[group, layer, "v"] = Placed(v, storage, dense(begin + v_at, page, LANE))

    def _states(self, group: int, layer: int, storage: Tensor, begin: int, end: int, page: int) -> None:
        conv, ssm = state_views(storage[begin:end], (CONV[0], SSM[0]), (CONV[1], SSM[1]), page, blocks=BLOCKS)
        self.placed[group, layer, "conv"] = Placed(conv, storage, dense(begin, page, STATE_BYTES[0]))
        self.placed[group, layer, "ssm"] = Placed(ssm, storage, dense(begin + STATE_BYTES[0], page, STATE_BYTES[1]))

    def _pages(self) -> None:
        """One page of a storage holds a block of every layer, in any order, with gaps between."""
        layers = ATTENTION + STATES
        self.rng.shuffle(layers)
        slots, page = [], 0
        for group, _ in layers:
            slots.append(page)
            page += (sum(STATE_BYTES) if group == STATE else 2 * LANE) + self._gap()
        storage, lead = self._storage(BLOCKS * page)
        for (group, layer), slot in zip(layers, slots, strict=True):
            lay = self._states if group == STATE else self._attention
            lay(group, layer, storage, lead + slot, lead + BLOCKS * page, page)

    def _apart(self) -> None:
        """K, V and the states of each layer in tensors of their own, each with a padding of its own."""
        for group, layer in ATTENTION:
            page = LANE + self._gap()
            parts = [self._storage(BLOCKS * page) for _ in range(2)]
            views = attention_views(
                [storage[lead : lead + BLOCKS * page] for storage, lead in parts],
                blocks=BLOCKS, block_tokens=TOKENS, kv_heads=HEADS, head_dim=DIM, dtype=DTYPE, page_bytes=page,
            )  # fmt: skip
            for name, view, (storage, lead) in zip("kv", views, parts, strict=True):
                self.placed[group, layer, name] = Placed(view, storage, dense(lead, page, LANE))
        self._states_apart()

    def _states_apart(self) -> None:
        for group, layer in STATES:
            page = sum(STATE_BYTES) + self._gap()
            storage, lead = self._storage(BLOCKS * page)
            self._states(group, layer, storage, lead, lead + BLOCKS * page, page)

    def _lanes(self) -> None:
        """All K, then all V, with room at the end of each lane."""
        for group, layer in ATTENTION:
            page = LANE + self._gap()
            size = 2 * (BLOCKS * page + self._gap())
            storage, lead = self._storage(size)
            self._attention(group, layer, storage, lead, lead + size, page, order=KVOrder.LANES_FIRST)
        self._states_apart()

    def _pool(self) -> None:
        """Tensors that a layer of each group shares: a page is a block of one group or of another, as its id was given out."""
        page = 2 * LANE + 8 * self.rng.randrange(6)
        for rows in ([(FULL, 0), (STATE, 1)], [(FULL, 2), (STATE, 3), (WINDOW, 2)]):
            storage, lead = self._storage(BLOCKS * page)
            for group, layer in rows:
                lay = self._states if group == STATE else self._attention
                lay(group, layer, storage, lead, lead + BLOCKS * page, page)

    # -- what a test asks ------------------------------------------------------------------------------------------------

    def views(self, group: int) -> dict[int, dict[str, Tensor]]:
        found: dict[int, dict[str, Tensor]] = {}
        for (of, layer, name), placed in self.placed.items():
            if of == group:
                found.setdefault(layer, {})[name] = placed.view
        return found

    def contents(self) -> list[bytes]:
        return [storage.numpy().tobytes() for storage in self.storages]

    def expected(self, before: list[bytes], blocks: Mapping[int, Mapping[int, bytes]]) -> list[bytes]:
        """The storages after the payloads of blocks (group -> id -> hash) were written over what was there before."""
        after = [bytearray(b) for b in before]
        for (group, layer, name), placed in self.placed.items():
            number = next(i for i, s in enumerate(self.storages) if s is placed.memory)
            for block, block_hash in blocks.get(group, {}).items():
                places = placed.rows.of(block)
                for at, byte in zip(places, payload((group, layer, name), block_hash, len(places)), strict=True):
                    after[number][at] = byte
        return [bytes(a) for a in after]


def payload(where: Where, block_hash: bytes, nbytes: int) -> bytes:
    """What a cache of the block with this hash must hold."""
    return hashlib.shake_256(f"{where}".encode() + block_hash).digest(nbytes)


class Worker:
    """Memory, a client of the common store, and an engine."""

    def __init__(self, store: MemoryStore, form: str, seed: int) -> None:
        self.memory = Memory(form, seed)
        self.store = store.client()
        for address, nbytes in registered_regions(p.view for p in self.memory.placed.values()):
            self.store.register(address, nbytes)
        self.layout, bases = self._layout()
        self.engine = Engine(self.layout, self.store, bases, EngineConfig(audit=True))

    def _layout(self) -> tuple[KVLayout, dict[Where, int]]:
        kinds = {FULL: GroupKind.FULL, STATE: GroupKind.STATE, WINDOW: GroupKind.SLIDING_WINDOW}
        groups, bases = [], {}
        for group, kind in kinds.items():
            memory = group_memory(group, self.memory.views(group), BLOCKS)
            tokens, window = (2 * TOKENS, None) if group == STATE else (TOKENS, 8 if group == WINDOW else None)
            groups.append(Group(group, kind, tokens, memory.layers, window=window))
            bases.update(memory.bases)
        return KVLayout("hybrid", groups), bases

    async def __aenter__(self) -> Worker:
        await self.engine.start()
        return self

    async def __aexit__(self, failed: object, *_: object) -> None:
        await self.engine.close()
        self.store.close()
        if failed is None:
            assert self.engine.violations() == []

    def ids(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Random block ids, none for two groups, as a scheduler with one pool gives them out."""
        free = self.memory.rng.sample(range(BLOCKS), sum(counts.values()))
        return {group: [free.pop() for _ in range(n)] for group, n in counts.items()}

    def block_hash(self, group: int, index: int, fine: list[bytes]) -> bytes:
        k = self.layout.group(group).block_tokens // self.engine.hash_tokens
        return fine[(index + 1) * k - 1]

    def request(self, name: str, fine: list[bytes], at: Mapping[int, Mapping[int, int]], *, load: bool) -> StepRequest:
        """`at`: group -> block index -> local block id."""
        groups = {}
        for group, found in at.items():
            ids = [found.get(i, NULL_BLOCK) for i in range(max(found) + 1)]
            groups[group] = GroupBlocks(ids, **{"load" if load else "save": sorted(found)})
        return StepRequest(name, fine, groups)

    async def step(self, request: StepRequest, fine: list[bytes]) -> Mapping[str, object]:
        """One forward pass that computes what is saved through the views, layer by layer."""
        step = self.engine.begin_step([request])
        for layer in range(self.layout.stage_layers):
            assert await step.wait_layer(layer) == frozenset()
            self.compute(layer, request, fine)
            step.layer_ready(layer)
            await step.checkpoint(layer)
        await step.end()
        await step.settled()
        return step.failures

    def compute(self, layer: int, request: StepRequest, fine: list[bytes]) -> None:
        for (group, of, name), placed in self.memory.placed.items():
            if of != layer or group not in request.groups:
                continue
            blocks = request.groups[group]
            for index in blocks.save:
                block = placed.view[blocks.block_ids[index]]
                value = payload((group, of, name), self.block_hash(group, index, fine), block.numel() * block.element_size())
                write(block, value)


def fine_hashes(count: int, prompt: str) -> list[bytes]:
    return [hashlib.sha256(f"{prompt}/{i}".encode()).digest() for i in range(count)]
