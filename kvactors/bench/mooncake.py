"""The engine over Mooncake, beside the raw client: puts and gets of 64 blocks, layer by layer, by size of a range.

Four ways to move the same bytes between scattered local blocks (K and V of each layer in tensors of their own) and a pool:
the raw client with one ranged call a layer and K and V as separate ranges, as vLLM-Ascend's store does it; the raw client with
whole objects from and to memory that is in order already; the engine; and memcpy. All go through one client, which gave the
pool its memory: a range goes over a socket even so, a whole object is copied.
"""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvactors.bench.figures import Answer, Figure, Skipped, Target
from kvactors.bench.measure import Measured, in_turn, timed
from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.core.steps import GroupBlocks, StepRequest
from kvactors.engine import BlockingEngine
from kvactors.errors import StoreError
from kvactors.stores import LocalMaster, MooncakeStore
from kvactors.stores.copying import address_of, copy_table
from kvactors.stores.mooncake.client import Client
from kvactors.stores.mooncake.config import MooncakeConfig

NAME = "mooncake"
KIBS = (4, 16, 64, 256)
LIMITS = {4: 0.7, 16: 0.7, 256: 1.05}
"""KiB of a range -> most time of the engine, as a part of the raw client's with ranges."""
BLOCKS, LAYERS, QUICK_LAYERS = 64, 32, 8
RAW, WHOLE, ENGINE, MEMCPY = "raw ranges", "raw whole objects", "engine", "memcpy"

_LOCAL_BLOCKS = 2 * BLOCKS
_POOL_BYTES = 4 << 30
_ALL_WAYS = 3  # of them put objects


@dataclass(frozen=True, slots=True)
class Row:
    """One range size: how long puts and gets took, each way."""

    kib: int
    put: Measured
    get: Measured

    def as_dict(self) -> dict[str, Any]:
        return {"kib": self.kib, "put": self.put.as_dict(RAW), "get": self.get.as_dict(RAW)}


class Bench:
    """One range size on one pool. `kib`: of K, and of V, of one block of one layer."""

    def __init__(self, raw: Client, store: MooncakeStore, kib: int, layers: int, rng: random.Random) -> None:
        self._raw, self._store, self._layers = raw, store, layers
        self._nbytes = nbytes = kib << 10
        self.object_bytes = 2 * layers * nbytes
        self._memory = np.ones((2 * layers, _LOCAL_BLOCKS, nbytes), np.uint8)
        self._whole = np.ones((BLOCKS, self.object_bytes), np.uint8)
        self._ids = rng.sample(range(_LOCAL_BLOCKS), BLOCKS)
        self._names = (f"{kib}-{n}" for n in itertools.count())
        self._written: dict[str, list[str]] = {}
        self._bases = [address_of(tensor) for tensor in self._memory]
        for array in (self._memory, self._whole):
            store.register(address_of(array), array.nbytes)
        entries = [CacheEntry("k", nbytes), CacheEntry("v", nbytes)]
        self._layout = KVLayout("bench", [Group(0, GroupKind.FULL, 16, dict.fromkeys(range(layers), entries))])
        bases = {(0, layer, name): self._bases[2 * layer + j] for layer in range(layers) for j, name in enumerate("kv")}
        self._engine = BlockingEngine(self._layout, store, bases)
        self._hashes: list[bytes] = []

    def close(self) -> None:
        self._engine.close()
        for array in (self._memory, self._whole):
            self._store.unregister(address_of(array))

    def puts(self, repeat: int) -> Measured:
        return in_turn({RAW: self._put_raw, WHOLE: self._put_whole, ENGINE: self._put_engine, MEMCPY: self._copy_out}, repeat)

    def gets(self, repeat: int) -> Measured:
        return in_turn({RAW: self._get_raw, WHOLE: self._get_whole, ENGINE: self._get_engine, MEMCPY: self._copy_in}, repeat)

    # The raw client

    def _fresh(self, way: str) -> list[str]:
        """New keys for a way; what it put before goes, so that the pool never fills."""
        self._forget(self._written.get(way, ()))
        name = next(self._names)
        self._written[way] = keys = [f"{way}/{name}/{i}" for i in range(BLOCKS)]
        return keys

    def _forget(self, keys: Any) -> None:
        for key in keys:
            self._raw.tell("remove", key, True)

    def _ranges(self, call: str, keys: list[str], layer: int) -> None:
        of, n = self._bases[2 * layer : 2 * layer + 2], self._nbytes
        addresses = [[base + i * n for base in of] for i in self._ids]
        offset = 2 * layer * n
        moved = self._raw.ask(call, keys, addresses, [[n, n]] * BLOCKS, [[offset, offset + n]] * BLOCKS)
        if moved != [2 * n] * BLOCKS:
            raise StoreError(f"{call} answered {moved[:4]}…")

    def _put_raw(self) -> float:
        keys = self._fresh(RAW)

        def act() -> None:
            _all_good(self._raw.ask("batch_put_session_start", keys, [self.object_bytes] * BLOCKS))
            for layer in range(self._layers):
                self._ranges("batch_put_from_multi_buffer_ranges", keys, layer)
            _all_good(self._raw.ask("batch_put_session_end", keys))

        return timed(act)

    def _get_raw(self) -> float:
        keys = self._written[RAW]

        def act() -> None:
            _all_good(self._raw.ask("batch_get_session_start", keys))
            for layer in range(self._layers):
                self._ranges("batch_get_into_multi_buffer_ranges", keys, layer)
            _good(self._raw.tell("batch_get_session_end", keys))

        return timed(act)

    def _put_whole(self) -> float:
        keys, addresses = self._fresh(WHOLE), [address_of(row) for row in self._whole]
        return timed(lambda: _all_good(self._raw.ask("batch_put_from", keys, addresses, [self.object_bytes] * BLOCKS)))

    def _get_whole(self) -> float:
        keys, addresses = self._written[WHOLE], [address_of(row) for row in self._whole]
        sizes = [self.object_bytes] * BLOCKS

        def act() -> None:
            if self._raw.ask("batch_get_into", keys, addresses, sizes) != sizes:
                raise StoreError("batch_get_into did not read every object")

        return timed(act)

    # The engine

    def _step(self, name: str, *, load: bool, save: bool) -> float:
        every = range(BLOCKS)
        blocks = GroupBlocks(self._ids, every if load else (), every if save else ())
        request = StepRequest(name, self._hashes, {0: blocks})

        def act() -> None:
            step = self._engine.begin_step([request])
            for layer in range(self._layers):
                if step.wait_layer(layer):
                    raise StoreError(f"the engine could not load layer {layer}: {step.failures}")
                step.layer_ready(layer)
                step.checkpoint(layer)
            step.end()
            step.settled()

        return timed(act)

    def _put_engine(self) -> float:
        self._forget(self._layout.key(0, h) for h in self._hashes)
        name = next(self._names)
        self._hashes = [f"{name}/{i}".encode() for i in range(BLOCKS)]
        before = self._engine.stats().groups[0].saved
        taken = self._step(name, load=False, save=True)
        self._engine.forget(name)
        saved = self._engine.stats().groups[0].saved - before
        if saved != BLOCKS:
            raise StoreError(f"the engine saved {saved} blocks of {BLOCKS}")
        return taken

    def _get_engine(self) -> float:
        name = next(self._names)
        taken = self._step(name, load=True, save=False)
        self._engine.forget(name)
        return taken

    # memcpy

    def _copy(self, *, into: bool) -> float:
        addresses = np.array([[base + i * self._nbytes for base in self._bases] for i in self._ids], np.int64)
        rows = address_of(self._whole) + np.arange(BLOCKS, dtype=np.int64) * self.object_bytes
        sizes: npt.NDArray[np.int64] = np.full(2 * self._layers, self._nbytes, np.int64)
        return timed(lambda: copy_table(rows, np.cumsum(sizes) - sizes, addresses, sizes, into_objects=into))

    def _copy_out(self) -> float:
        return self._copy(into=True)

    def _copy_in(self) -> float:
        return self._copy(into=False)


def run(*, quick: bool, kibs: tuple[int, ...] = KIBS, say: Callable[[str], object] = lambda _: None) -> list[Row]:
    """Measures every range size on a master of its own on 127.0.0.1. `quick`: fewer layers and rounds.

    Raises:
        ConfigError, StoreUnreachableError: no Mooncake is installed, or its master does not start.
        StoreError: a way did not move all bytes.
    """
    layers, repeat = (QUICK_LAYERS, 3) if quick else (LAYERS, 7)
    rows: list[Row] = []
    with LocalMaster() as master:
        largest = max(kibs) * 1024 * 2 * layers * BLOCKS
        pool = max(256 << 20, min(_POOL_BYTES, (_ALL_WAYS + 1) * largest))
        config = MooncakeConfig(**master.options(), global_segment_size=pool)
        raw = Client(config)
        store = MooncakeStore(config, client=raw)
        try:
            for kib in kibs:
                say(f"{kib} KiB")
                bench = Bench(raw, store, kib, layers, random.Random(kib))
                try:
                    rows.append(Row(kib, bench.puts(repeat), bench.gets(repeat)))
                finally:
                    bench.close()
                    raw.tell("remove_all", True)
        finally:
            store.close()
    return rows


def answer(rows: Sequence[Row], layers: int) -> Answer:
    """The rows as figures: the engine beside each other way."""
    figures = []
    for row in rows:
        for call, measured in (("put", row.put), ("get", row.get)):
            for beside in (RAW, WHOLE, MEMCPY):
                limit = LIMITS.get(row.kib) if beside == RAW else None
                target = None if limit is None else Target("<=", limit)
                ours, theirs = measured.median(ENGINE) * 1e3, measured.median(beside) * 1e3
                case = f"{call}, {row.kib} KiB, {layers} layers / {beside}"
                figures.append(Figure(NAME, case, ours, theirs, "ms", target))
    return Answer(figures)


def check_mooncake() -> None:
    """Raises `Skipped` where no Mooncake client can be imported."""
    try:
        importlib.import_module("mooncake.store")
    except (ImportError, OSError) as error:
        raise Skipped(f"the Mooncake client cannot be imported here ({error}): pip install 'kvactors[mooncake]'") from error


def _good(code: int) -> None:
    if code != 0:
        raise StoreError(f"a raw call answered {code}")


def _all_good(codes: list[int]) -> None:
    if any(codes):
        raise StoreError(f"a raw call answered {next(c for c in codes if c)} for a key")


__all__ = ["ENGINE", "KIBS", "MEMCPY", "RAW", "WHOLE", "Row", "run"]
