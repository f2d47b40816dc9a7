"""What staging saves: range calls of a Mooncake store with it and without it, by size and number of the pieces of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvactors.bench.measure import Measured, in_turn, timed
from kvactors.core.store import RangeBatch
from kvactors.errors import StoreError
from kvactors.stores import LocalMaster, MooncakeStore
from kvactors.stores.copying import address_of
from kvactors.stores.mooncake import coalesce

SHAPES = ((4, 2), (16, 2), (32, 2), (64, 2), (128, 2), (256, 2), (16, 8), (32, 8), (64, 8))
"""(KiB of a piece, pieces of a row)"""
ROWS = 64
STAGED, PLAIN = "staged", "not staged"

_POOL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One shape: how long puts and gets of 64 keys took."""

    kib: int
    pieces: int
    put: Measured
    get: Measured

    def as_dict(self) -> dict[str, Any]:
        return {"kib": self.kib, "pieces": self.pieces, "put": self.put.as_dict(PLAIN), "get": self.get.as_dict(PLAIN)}

    @property
    def range_us(self) -> float:
        """Microseconds of one range that is not staged."""
        return self.put.median(PLAIN) / ROWS / self.pieces * 1e6


def run(*, quick: bool, shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[Row]:
    """Measures every shape, also those that are larger than what is staged otherwise.

    Raises:
        ConfigError, StoreUnreachableError: no Mooncake is installed, or its master does not start.
        StoreError: a range did not arrive.
    """
    limit, coalesce.STAGE_MOST_BYTES = coalesce.STAGE_MOST_BYTES, 1 << 30
    try:
        with LocalMaster() as master:
            owner = MooncakeStore(master.config(global_segment_size=_POOL_BYTES))
            stores = {STAGED: MooncakeStore(master.config()), PLAIN: MooncakeStore(master.config(staging_bytes=0))}
            try:
                return [_measure(stores, kib << 10, pieces, 3 if quick else 9) for kib, pieces in shapes]
            finally:
                for store in (*stores.values(), owner):
                    store.close()
    finally:
        coalesce.STAGE_MOST_BYTES = limit


def _measure(stores: dict[str, MooncakeStore], nbytes: int, pieces: int, repeat: int) -> Row:
    memory = np.ones((pieces, 2 * ROWS, nbytes), np.uint8)
    ids = np.random.default_rng(0).permutation(2 * ROWS)[:ROWS]
    addresses = np.array([[address_of(memory[j, i]) for j in range(pieces)] for i in ids.tolist()], np.int64)
    sizes = np.full(pieces, nbytes, np.int64)
    batches: dict[str, RangeBatch] = {}
    for way, store in stores.items():
        store.register(address_of(memory), memory.nbytes)
        keys = [f"{way}/{nbytes}/{pieces}/{i}" for i in range(ROWS)]
        batches[way] = RangeBatch(keys, addresses, sizes, np.cumsum(sizes) - sizes)
        _all_ok(store.put_open(keys, [nbytes * pieces] * ROWS))
    put = in_turn({way: _calls(store.put_ranges, batches[way]) for way, store in stores.items()}, repeat)
    for way, store in stores.items():
        _all_ok(store.put_commit(batches[way].keys))
        _all_ok(store.get_open(batches[way].keys, [nbytes * pieces] * ROWS))
    get = in_turn({way: _calls(store.get_ranges, batches[way]) for way, store in stores.items()}, repeat)
    for way, store in stores.items():
        store.get_close(batches[way].keys)
        store.unregister(address_of(memory))
        for key in batches[way].keys:
            store.remove(key, force=True)
    return Row(nbytes >> 10, pieces, put, get)


def _calls(call: Callable[[RangeBatch], list[Any]], batch: RangeBatch) -> Callable[[], float]:
    return lambda: timed(lambda: _all_ok(call(batch)))


def _all_ok(outcomes: list[Any]) -> None:
    if not all(outcome.ok for outcome in outcomes):
        raise StoreError(f"a call answered {next(o for o in outcomes if not o.ok).value}")
