"""The worker's local KV memory in a replay: one arena per group, its blocks handed out and taken back.

Every entry of a group owns a region of the group's arena; block `i` of it lies at base + i * stride, as on a real worker.
A block id is valid in its own group only. The pool may be bounded by a number of blocks over all groups, as vLLM's is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvactors.core.layout import KVLayout
from kvactors.core.store import Store
from kvactors.errors import ConfigError
from kvactors.replay.content import EntryContent, entry_salt

_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayerContent:
    """One group's entries on one layer; `nbytes` is the payload of one block on that layer."""

    group_id: int
    entries: tuple[EntryContent, ...]
    nbytes: int


class LocalPool:
    """Local block memory for a layout.

    Args:
        layout: its groups and entries.
        blocks: group id -> local blocks of that group.
        limit: most blocks in use at a time over all groups; None = the sum of `blocks`.

    Raises:
        ConfigError: when the memory cannot be had.
    """

    def __init__(self, layout: KVLayout, blocks: Mapping[int, int], limit: int | None = None) -> None:
        self.layout = layout
        self.capacity = dict(blocks)
        self.limit = sum(blocks.values()) if limit is None else limit
        self.used = 0
        self.peak = 0
        self.bases: dict[tuple[int, int, str], int] = {}
        self._arenas: dict[int, npt.NDArray[np.uint8]] = {}
        self._layers: dict[int, list[LayerContent]] = {}
        for group in layout.groups:
            self._lay_out(group.id, blocks[group.id])
        self._free = {g: list(range(n - 1, -1, -1)) for g, n in blocks.items()}

    def _lay_out(self, group_id: int, blocks: int) -> None:
        ranges = self.layout.ranges(group_id)
        starts, size = [], 0
        for r in ranges:
            starts.append(size)
            size += -(-blocks * r.entry.stride // _ALIGN_BYTES) * _ALIGN_BYTES
        try:
            raw = np.zeros(size + _ALIGN_BYTES, np.uint8)
        except (MemoryError, ValueError):
            raise ConfigError(
                f"the local pool of group {group_id} needs {size / 2**30:.1f} GiB for {blocks} blocks, more than there is; "
                "give --scale, or bound it with --local-blocks"
            ) from None
        arena = raw[-raw.ctypes.data % _ALIGN_BYTES :][:size]
        self._arenas[group_id] = arena
        by_layer: dict[int, list[EntryContent]] = {}
        for r, start in zip(ranges, starts, strict=True):
            stride = r.entry.stride
            rows = arena[start : start + blocks * stride].reshape(blocks, stride)
            self.bases[(group_id, r.layer, r.entry.name)] = rows.ctypes.data
            by_layer.setdefault(r.layer, []).append(EntryContent(rows, r.entry.nbytes, entry_salt(r.layer, r.entry.name)))
        for layer, entries in by_layer.items():
            content = LayerContent(group_id, tuple(entries), sum(e.nbytes for e in entries))
            self._layers.setdefault(layer, []).append(content)

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        return sum(a.nbytes for a in self._arenas.values())

    def layer(self, layer: int) -> Sequence[LayerContent]:
        """What a physical layer holds, per group; empty where it has no entries."""
        return self._layers.get(layer, ())

    def register(self, store: Store) -> None:
        """Makes the memory known to a store, which moves bytes only from and to registered memory."""
        for arena in self._arenas.values():
            if arena.nbytes:
                store.register(arena.ctypes.data, arena.nbytes)

    def unregister(self, store: Store) -> None:
        for arena in self._arenas.values():
            if arena.nbytes:
                store.unregister(arena.ctypes.data)

    # -- blocks ------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Blocks that may still be taken, over all groups."""
        return self.limit - self.used

    def take(self, counts: Mapping[int, int]) -> dict[int, list[int]] | None:
        """Local block ids, `counts[g]` of each group g, or None (and nothing taken) when they are not all there."""
        if sum(counts.values()) > self.free or any(n > len(self._free[g]) for g, n in counts.items()):
            return None
        out = {}
        for g, n in counts.items():
            ids = self._free[g]
            out[g] = ids[len(ids) - n :][::-1]
            del ids[len(ids) - n :]
            self.used += n
        self.peak = max(self.peak, self.used)
        return out

    def give_back(self, group_id: int, ids: Iterable[int]) -> None:
        """Returns blocks; they may be handed out again at once."""
        back = sorted(ids, reverse=True)
        self._free[group_id] += back
        self.used -= len(back)
