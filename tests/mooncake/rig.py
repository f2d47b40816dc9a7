"""An engine over a real Mooncake client: the rig of the engine's tests, which here also times every wait and compares every
layer as it is delivered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.steps import StepRequest
from kvactors.engine import Step
from kvactors.stores import MooncakeStore
from kvactors.stores.fault_plan import Fault
from tests.engine.rig import Rig, hashes

USABLE_AGAIN_S = 25.0
"""A client finds a new master, and gives it its memory again, within some seconds; then an engine asks again."""

_never_freed: list[Any] = []
"""memory that a call of a client may still touch"""


def hybrid_layout(entry: int = 4096) -> KVLayout:
    """Full, compressed and state groups over four layers; every entry but the state has padding behind it in local memory."""
    k, v = CacheEntry("k", entry, entry + 64), CacheEntry("v", entry, entry + 512)
    c = CacheEntry("c", entry // 2 + 24, entry)
    return KVLayout(
        "hybrid",
        [
            Group(0, GroupKind.FULL, 16, {0: [k, v], 2: [k, v]}),
            Group(1, GroupKind.COMPRESSED, 32, {1: [c], 2: [c], 3: [c]}),
            Group(2, GroupKind.STATE, 16, {0: [CacheEntry("s", 2 * entry)], 3: [CacheEntry("s", 2 * entry)]}),
        ],
    )


class MooncakeRig(Rig):
    """A rig over a client that outlives it.

    Args:
        host: whether local memory is registered as host memory.

    Attributes:
        wrong: what was delivered as loaded with other bytes than its block has.
        longest_wait_s: of all waits for the engine in `play`.
    """

    def __init__(
        self,
        store: MooncakeStore,
        layout: KVLayout | None = None,
        faults: Iterable[Fault] = (),
        *,
        host: bool = True,
        **options: Any,
    ) -> None:
        inner: Any = store
        super().__init__(layout, faults, inner=inner, **options)
        self.mooncake = store
        self.wrong: list[str] = []
        self.longest_wait_s = 0.0
        if not host:
            for array in self.local.values():
                store.unregister(array.ctypes.data)
                store.register(array.ctypes.data, array.nbytes, host=False)

    async def __aenter__(self) -> MooncakeRig:
        await super().__aenter__()
        return self

    async def __aexit__(self, failed: object, *_: object) -> None:
        for gate in self.store.gates.values():
            gate.release()
        await self.engine.close()
        for array in self.local.values():
            try:
                await asyncio.to_thread(self.mooncake.unregister, array.ctypes.data)
            except BaseException:
                _never_freed.append(array)
                raise
        if failed is None:
            assert self.engine.violations() == []
            assert self.wrong == []

    def committed(self, group: int, fine: Sequence[bytes]) -> list[int]:
        count = len(fine) * self.engine.hash_tokens // self.layout.group(group).block_tokens
        found = self.mooncake.readable([self.key(group, i, fine) for i in range(count)])
        return [i for i, there in enumerate(found) if there]

    def keys(self, fine: Sequence[bytes]) -> list[str]:
        """The keys of all blocks that a whole prompt publishes."""
        return [self.key(g, i, fine) for g, indices in self.all_blocks(fine).items() for i in indices]

    async def play(
        self, *requests: StepRequest, before_ready: Callable[[int], None] = lambda _: None
    ) -> tuple[Step, dict[int, frozenset[str]]]:
        """As `run`; every layer is compared when it is delivered, and `before_ready(layer)` may break something in between."""
        step = self.engine.begin_step(requests)
        failed = {}
        for layer in range(self.layout.stage_layers):
            failed[layer] = await self._timed(step.wait_layer(layer))
            self._compare(layer, failed[layer], requests)
            self.compute(layer, *requests)
            before_ready(layer)
            step.layer_ready(layer)
            await self._timed(step.checkpoint(layer))
        await self._timed(step.end())
        await step.settled()
        return step, failed

    async def _timed(self, answer: Awaitable[Any]) -> Any:
        began = time.monotonic()
        try:
            return await answer
        finally:
            self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began)

    def _compare(self, layer: int, failed: frozenset[str], requests: Iterable[StepRequest]) -> None:
        for request in requests:
            if request.request_id in failed:
                continue
            for g, blocks in request.groups.items():
                for i in blocks.load:
                    if not self.holds(g, self.block_hash(g, i, request.hashes), blocks.block_ids[i], layer):
                        self.wrong.append(f"{request.request_id}: layer {layer}, group {g}, block {i}")

    async def works(self, name: str) -> bool:
        """Whether a prompt that was never saved before can be saved whole, found and loaded."""
        fine = hashes(4, name)
        await self.play(self.request(f"{name} saved", fine, save=self.all_blocks(fine), first_id=40))
        hit = await self.engine.lookup(fine + hashes(1, f"{name} end"), 80)
        if hit.tokens != 64:
            return False
        loading = self.request(f"{name} loaded", fine, load=self.all_blocks(fine), first_id=50)
        step, _ = await self.play(loading)
        return not step.failures and self.loaded_right(loading)

    async def usable_again(self, name: str) -> None:
        """Tries until it works: when a client has found its way back is its own affair and cannot be awaited."""
        deadline, tries = time.monotonic() + USABLE_AGAIN_S, 0
        while not await self.works(f"{name} again {tries}"):
            tries += 1
            assert time.monotonic() < deadline, f"{tries} tries: {self.engine.stats()}"
            await asyncio.sleep(0.1)
