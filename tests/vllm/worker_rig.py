"""A worker's side over a memory store: one or two attention groups (and a state group), memory that says what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvactors.core.clock import Clock
from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.steps import GroupBlocks
from kvactors.devices import CpuDevices, ManualClock
from kvactors.stores.fault_plan import Fault
from kvactors.stores.faulty import FaultyStore
from kvactors.stores.memory import MemoryStore
from kvactors.vllm.layouts import WorkerMemory
from kvactors.vllm.messages import Event, Life, LoadPlan, RequestPlan, StepPlan
from kvactors.vllm.names import CacheName
from kvactors.vllm.settings import ConnectorSettings
from kvactors.vllm.worker import WorkerSide
from tests.engine.rig import hashes

BLOCK = 16
ENTRY = 32
BLOCKS = 32


def full_layout(layers: int = 2) -> KVLayout:
    return KVLayout("m", [Group(0, GroupKind.FULL, BLOCK, {i: [CacheEntry("a", ENTRY)] for i in range(layers)})])


def window_layout() -> KVLayout:
    """Full attention on layers 0 and 2, a window of one block on 1."""
    return KVLayout(
        "m",
        [
            Group(0, GroupKind.FULL, BLOCK, {0: [CacheEntry("a", ENTRY)], 2: [CacheEntry("a", ENTRY)]}),
            Group(1, GroupKind.SLIDING_WINDOW, BLOCK, {1: [CacheEntry("a", ENTRY)]}, window=BLOCK),
        ],
    )


def state_layout() -> KVLayout:
    """A recurrent layer 0 below a full one."""
    return KVLayout(
        "m",
        [
            Group(0, GroupKind.FULL, BLOCK, {1: [CacheEntry("a", ENTRY)]}),
            Group(1, GroupKind.STATE, BLOCK, {0: [CacheEntry("s", ENTRY)]}),
        ],
    )


class WorkerRig:
    """One worker rank. Layers are named "l0", "l1", …; state layers do not report.

    Args:
        store: shared with another rig, or None for its own.
        faults: what its client of the store does wrong.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        store: MemoryStore | None = None,
        faults: Iterable[Fault] = (),
        gather: Callable[[Any], list[Any]] | None = None,
        events: bool = False,
        reporting: Sequence[str] | None = None,
        tp_rank: int = 0,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        self.layout = layout
        self.clock = ManualClock()
        """what the worker goes by, unless it was given another"""
        self.memory = {
            (g.id, layer, e.name): np.zeros((BLOCKS, e.nbytes), dtype=np.uint8)
            for g in layout.groups
            for layer, entries in g.layers.items()
            for e in entries
        }
        names = {f"l{layer}": CacheName(layer, e, False) for _, layer, e in self.memory}
        states = {f"l{layer}" for g in layout.groups if g.kind is GroupKind.STATE for layer in g.layers}
        bases = {where: rows.ctypes.data for where, rows in self.memory.items()}
        self.pool = MemoryStore() if store is None else store
        self.faulty = FaultyStore(self.pool.client(), faults)
        self.side = WorkerSide(
            ConnectorSettings(backend="memory", **settings),
            WorkerMemory(layout, bases, [(a.ctypes.data, a.nbytes) for a in self.memory.values()], names),
            self.faulty,
            hash_tokens=BLOCK,
            devices=CpuDevices(),
            clock=self.clock if clock is None else clock,
            reporting=set(names) - states if reporting is None else reporting,
            tp_rank=tp_rank,
            gather=gather,
            several_groups=len(layout.groups) > 1,
            events=events,
        )
        self.layers = sorted(set(names) - states)

    def __enter__(self) -> WorkerRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.side.close()

    def write(self, block_ids: Iterable[int], salt: int = 0) -> None:
        """Fills local blocks of every group with bytes that say which they are."""
        for number, rows in enumerate(self.memory.values()):
            for block in block_ids:
                rows[block] = (17 * number + 5 * block + salt + np.arange(ENTRY)) % 251 + 1

    def clear(self) -> None:
        for rows in self.memory.values():
            rows[:] = 0

    def contents(self, block_ids: Sequence[int]) -> list[bytes]:
        return [rows[list(block_ids)].tobytes() for rows in self.memory.values()]

    def step(
        self,
        plan: StepPlan,
        *,
        compute: Callable[[str], None] = lambda _name: None,
        layers: Sequence[str] | None = None,
    ) -> None:
        """A whole step, as vLLM's runner drives it."""
        self.side.begin(plan)
        if any(r.loads for r in plan.requests):
            self.side.start_loads(plan)
        try:
            for name in self.layers if layers is None else layers:
                self.side.wait_layer(name)
                compute(name)
                self.side.layer_exit(name)
        finally:
            if not any(r.loads for r in plan.requests):
                self.side.start_loads(plan)
            self.side.wait_for_save()


def request(
    name: str,
    ids: Mapping[int, Sequence[int]],
    *,
    load: Mapping[int, Sequence[int]] | None = None,
    save: Mapping[int, Sequence[int]] | None = None,
    prefix: str = "p",
    event: Event | None = None,
) -> RequestPlan:
    """A request's part of a step; `ids` is its block table by group."""
    loads, saves = load or {}, save or {}
    most = max(len(table) for table in ids.values())
    groups = {g: GroupBlocks(list(t), load=tuple(loads.get(g, ())), save=tuple(saves.get(g, ()))) for g, t in ids.items()}
    return RequestPlan(Life(name), hashes(most, prefix), groups, event)


def load(name: str, ids: Mapping[int, Sequence[int]], wanted: Mapping[int, Sequence[int]], prefix: str = "p") -> LoadPlan:
    most = max(len(table) for table in ids.values())
    groups = {g: GroupBlocks(list(ids[g]), load=tuple(indices)) for g, indices in wanted.items()}
    return LoadPlan(Life(name), hashes(most, prefix), groups)
