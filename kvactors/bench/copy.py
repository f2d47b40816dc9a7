"""Puts and gets through the engine, beside numpy copies of the same scattered ranges.

Layers of K and V, 64 blocks, each range of one size; with five groups every layer holds entries of all five, and the blocks are
shared out among them, so that bytes and number of ranges stay the same. A put runs from `begin_step` until every key is
committed, a get until every session is closed. The copies go between the same local blocks and one dense array, from a list of
views that was made before: one thread, or two with half of the ranges each. All memory was touched before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from kvactors.bench.figures import Answer, Figure, Target
from kvactors.bench.measure import Measured, in_turn, timed
from kvactors.bench.rig import Rig, layout_of
from kvactors.core.steps import StepRequest
from kvactors.engine import EngineConfig
from kvactors.errors import StoreError

NAME = "copy"
ENGINE, ONE, TWO = "engine", "one thread", "two threads"
TARGETS = {1: {16: 0.6, 64: 1.0, 256: 1.4}, 5: {16: 0.45, 64: 0.85, 256: 1.3}}
"""Groups -> KiB of a range -> part of the one-thread copy's rate."""
OF_TWO_THREADS = (256, 0.8)
"""With one group: KiB of a range, and part of the two-thread copy's rate."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """`most_bytes`: of all ranges together; larger ranges have fewer layers if need be."""

    layers: int
    blocks: int
    kibs: tuple[int, ...]
    groups: tuple[int, ...]
    repeat: int
    most_bytes: int

    def layers_of(self, kib: int) -> int:
        """How many layers ranges of that size have."""
        return max(1, min(self.layers, self.most_bytes // (2 * self.blocks * (kib << 10))))


FULL = Sizes(32, 64, (16, 64, 256), (1, 5), 9, 1 << 30)
QUICK = Sizes(32, 64, (16, 64, 256), (1, 5), 3, 256 << 20)

Views = list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]
"""(of the object, of local memory)"""


def measure(sizes: Sizes, say: Callable[[str], object], *, pinned: bool = False) -> Answer:
    """Every size with every number of groups.

    Raises:
        StoreError: a block was not saved or not loaded.
    """
    figures: list[Figure] = []
    for kib in sizes.kibs:
        for groups in sizes.groups:
            say(f"ranges of {kib} KiB, {groups} group{'s' if groups > 1 else ''}")
            figures += _figures(kib, groups, sizes, pinned)
    return Answer(figures)


def _figures(kib: int, groups: int, sizes: Sizes, pinned: bool) -> list[Figure]:
    layers = sizes.layers_of(kib)
    moved = 2 * layers * sizes.blocks * (kib << 10)
    figures: list[Figure] = []
    with Bench(kib << 10, groups, layers, sizes.blocks, pinned=pinned) as bench:
        for call, measured in (("put", bench.puts(sizes.repeat)), ("get", bench.gets(sizes.repeat))):
            rate = {way: moved / measured.median(way) / 1e9 for way in measured.seconds}
            case = f"{call}, {kib} KiB, {layers} layers, {'one group' if groups == 1 else f'{groups} groups'}"
            limit = TARGETS.get(groups, {}).get(kib)
            target = None if limit is None else Target(">=", limit)
            figures.append(Figure(NAME, f"{case} / one-thread copy", rate[ENGINE], rate[ONE], "GB/s", target))
            strict = groups == 1 and kib == OF_TWO_THREADS[0]
            target = Target(">=", OF_TWO_THREADS[1]) if strict else None
            figures.append(Figure(NAME, f"{case} / two-thread copy", rate[ENGINE], rate[TWO], "GB/s", target))
    return figures


class Bench:
    """One range size with one number of groups."""

    def __init__(self, nbytes: int, groups: int, layers: int, blocks: int, *, pinned: bool = False) -> None:
        self._second = _Second()  # before the engine, which pins the threads that are there
        rng = np.random.default_rng(0)
        local_blocks = -(-3 * blocks // (2 * groups))
        shares = [len(range(g, blocks, groups)) for g in range(groups)]
        store_bytes = (2 * layers * nbytes + 4096) * blocks
        config = EngineConfig(workers=2)
        self.rig = Rig(layout_of(groups, layers, nbytes), local_blocks, store_bytes, config, pinned=pinned)
        self._ids = {g: rng.permutation(local_blocks)[:n].tolist() for g, n in enumerate(shares)}
        self._hashes: list[bytes] = []
        dense = np.ones((blocks, 2 * layers, nbytes), np.uint8)
        self._views: Views = []
        for layer in range(layers):
            first = 0
            for g, ids in self._ids.items():
                for j, entry in enumerate("kv"):
                    local = self.rig.local[g, layer, entry]
                    self._views += [(dense[first + i, 2 * layer + j], local[b]) for i, b in enumerate(ids)]
                first += len(ids)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._second.close()
        self.rig.__exit__()

    def puts(self, repeat: int) -> Measured:
        ways = {ENGINE: self._put, ONE: lambda: self._one(into=True), TWO: lambda: self._two(into=True)}
        return in_turn(ways, repeat)

    def gets(self, repeat: int) -> Measured:
        ways = {ENGINE: self._get, ONE: lambda: self._one(into=False), TWO: lambda: self._two(into=False)}
        return in_turn(ways, repeat)

    def _put(self) -> float:
        rig = self.rig
        for h in self._hashes:
            for group in rig.layout.groups:
                rig.store.remove(rig.layout.key(group.id, h), force=True)
        self._hashes = rig.fresh(max(len(ids) for ids in self._ids.values()))
        every = {g: range(len(ids)) for g, ids in self._ids.items()}
        before = self._saved()
        taken = self._step(rig.request(self._hashes, self._ids, save=every))
        saved, wanted = self._saved() - before, sum(map(len, every.values()))
        if saved != wanted:
            raise StoreError(f"the engine saved {saved} blocks of {wanted}")
        return taken

    def _saved(self) -> int:
        return sum(group.saved for group in self.rig.engine.stats().groups.values())

    def _get(self) -> float:
        every = {g: range(len(ids)) for g, ids in self._ids.items()}
        return self._step(self.rig.request(self._hashes, self._ids, load=every))

    def _step(self, request: StepRequest) -> float:
        taken = timed(lambda: self.rig.step([request]))
        self.rig.forget([request])
        return taken

    def _one(self, *, into: bool) -> float:
        return timed(lambda: _copy(self._views, into))

    def _two(self, *, into: bool) -> float:
        half = len(self._views) // 2

        def act() -> None:
            self._second.start(self._views[half:], into)
            _copy(self._views[:half], into)
            self._second.wait()

        return timed(act)


def _copy(views: Sequence[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]], into: bool) -> None:
    if into:
        for stored, local in views:
            stored[...] = local
    else:
        for stored, local in views:
            local[...] = stored


class _Second:
    """The other thread of a two-thread copy; it is there before anything is measured."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Views, bool] | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._serve, name="kvactors second copy", daemon=True).start()

    def start(self, views: Views, into: bool) -> None:
        self._work.put((views, into))

    def wait(self) -> None:
        self._done.get()

    def close(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            _copy(*work)
            self._done.put(None)
