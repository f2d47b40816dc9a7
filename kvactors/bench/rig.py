"""What the benchmarks of the engine share: local memory, an embedded store and an engine over them, and a plain step.

All memory is touched before anything is measured: the first touch of a page costs some twenty times a copy of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvactors.actors import loops
from kvactors.bench.machine import pin_threads
from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.steps import GroupBlocks, StepRequest
from kvactors.engine import BlockingEngine, BlockingStep, EngineConfig
from kvactors.errors import StoreError
from kvactors.stores import MemoryStore
from kvactors.stores.copying import address_of

LEASE_S = 600.0
"""Longer than a benchmark: no lease is renewed while something is measured."""

BLOCK_TOKENS = 16


def layout_of(groups: int, layers: int, nbytes: int) -> KVLayout:
    """Groups of full attention that all have K and V of `nbytes` bytes on every layer."""
    entries = [CacheEntry("k", nbytes), CacheEntry("v", nbytes)]
    every = dict.fromkeys(range(layers), entries)
    return KVLayout("bench", [Group(g, GroupKind.FULL, BLOCK_TOKENS, every) for g in range(groups)])


class Rig:
    """An engine over an embedded store of its own.

    Args:
        layout: its groups.
        local_blocks: blocks of each group in local memory.
        store_bytes: memory of the store that is touched before the first object.
        asyncio_loop: the standard library's loop instead of uvloop.
        pinned: see `pin_threads`.
        store: instead of one that never evicts and whose leases outlive the benchmark; closed with the rig.
    """

    def __init__(
        self,
        layout: KVLayout,
        local_blocks: int,
        store_bytes: int,
        config: EngineConfig | None = None,
        *,
        asyncio_loop: bool = False,
        pinned: bool = False,
        store: MemoryStore | None = None,
        **engine: Any,
    ) -> None:
        self.layout = layout
        self.store = MemoryStore(lease_s=LEASE_S, reserve_bytes=store_bytes) if store is None else store
        self.local: dict[tuple[int, int, str], npt.NDArray[np.uint8]] = {}
        for group in layout.groups:
            for r in layout.ranges(group.id):
                array = np.ones((local_blocks, r.entry.stride), np.uint8)
                self.local[group.id, int(r.layer), r.entry.name] = array
                self.store.register(address_of(array), array.nbytes)
        self.bases = {where: address_of(array) for where, array in self.local.items()}
        with _loop(asyncio_loop):
            self.engine = BlockingEngine(layout, self.store, self.bases, config, **engine)
        if pinned:
            pin_threads()
        self._names = itertools.count()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.store.close()

    @property
    def layers(self) -> range:
        return range(self.layout.stage_layers)

    def fresh(self, blocks: int) -> list[bytes]:
        """Hashes that no prompt had before."""
        name = next(self._names)
        return [b"%08x-%08x" % (name, i) for i in range(blocks)]

    def request(
        self, hashes: Sequence[bytes], ids: Mapping[int, Sequence[int]], *, load: Any = (), save: Any = ()
    ) -> StepRequest:
        """A request of a new name; `ids` has the local blocks of each group that takes part, `load` and `save` say which of
        them move: block indices, or those of each group."""
        groups = {g: GroupBlocks(i, _of(load, g), _of(save, g)) for g, i in ids.items()}
        return StepRequest(f"r{next(self._names)}", hashes, groups)

    def step(self, requests: Sequence[StepRequest], between: Callable[[int], object] | None = None) -> None:
        """One whole step, up to the end of its last session; `between` is what a forward pass does on a layer."""
        step = self.engine.begin_step(requests)
        for layer in self.layers:
            arrived(step, layer)
            if between is not None:
                between(layer)
            step.layer_ready(layer)
            step.checkpoint(layer)
        step.end()
        step.settled()

    def forget(self, requests: Sequence[StepRequest]) -> None:
        """The requests are over: the engine keeps nothing of them."""
        for request in requests:
            self.engine.forget(request.request_id)

    def remove(self, hashes: Sequence[bytes]) -> None:
        """Removes the blocks with these hashes from the store.

        Raises:
            StoreError: one of them was not there, so it had not been saved.
        """
        for group in self.layout.groups:
            for block_hash in hashes:
                outcome = self.store.remove(self.layout.key(group.id, block_hash), force=True)
                if not outcome.ok:
                    raise StoreError(f"group {group.id}: a block that was to be saved is not in the store: {outcome.value}")


def arrived(step: BlockingStep, layer: int) -> None:
    """Waits for a layer's loads.

    Raises:
        StoreError: one of them failed; a figure without it would say nothing.
    """
    failed = step.wait_layer(layer)
    if failed:
        raise StoreError(f"layer {layer}: loads of {sorted(failed)} failed: {step.failures}")


def _of(blocks: Any, group_id: int) -> Sequence[int]:
    found: Sequence[int] = blocks.get(group_id, ()) if isinstance(blocks, Mapping) else blocks
    return found


@contextlib.contextmanager
def _loop(standard: bool) -> Iterator[None]:
    """Which loop an engine made meanwhile gets."""
    before = loops.new_loop
    if standard:
        loops.new_loop = asyncio.new_event_loop
    try:
        yield
    finally:
        loops.new_loop = before
