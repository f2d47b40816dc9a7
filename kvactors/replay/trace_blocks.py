"""Which blocks of a trace came before: every id once, merged in batches, so that only different blocks take memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]

BATCH_BLOCKS = 1 << 19


class BlockTable:
    """Every block of a trace: in which request it came first and last, and how often.

    Args:
        batch_blocks: blocks that are gathered before they are merged.

    Attributes:
        first, last: per block, the number of the first and of the last request with it; all arrays have the same order.
        uses: how often it came.
    """

    def __init__(self, batch_blocks: int = BATCH_BLOCKS) -> None:
        self.ids: Words = np.empty(0, np.uint64)
        self.first, self.last, self.uses = (np.empty(0, np.uint32) for _ in range(3))
        self._batch_blocks = batch_blocks
        self._pending: list[Words] = []
        self._waiting = 0
        self._requests = 0
        self._shared: list[Ints] = []

    def add(self, ids: Sequence[int]) -> None:
        """The complete blocks of the next request, from its first token on."""
        self._pending.append(np.array(ids, np.uint64))
        self._waiting += len(ids)
        if self._waiting >= self._batch_blocks:
            self._merge()

    def shared(self) -> Ints:
        """Per request, how many of its blocks, from the first one on, had come in requests before it."""
        self._merge()
        self._shared = [np.concatenate([*self._shared, np.empty(0, np.int64)])]
        return self._shared[0]

    def _merge(self) -> None:
        lengths = np.array([len(ids) for ids in self._pending], np.int64)
        owners = np.repeat(np.arange(self._requests, self._requests + len(lengths), dtype=np.uint32), lengths)
        self._requests += len(lengths)
        ids = np.concatenate([*self._pending, np.empty(0, np.uint64)])
        self._pending, self._waiting = [], 0
        unique, at, back, uses = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
        places = np.searchsorted(self.ids, unique)
        known = np.zeros(len(unique), bool)
        inside = places < len(self.ids)
        known[inside] = self.ids[places[inside]] == unique[inside]
        first = owners[at]
        first[known] = self.first[places[known]]
        self._shared.append(_leading(first[back] < owners, lengths))
        last = np.zeros(len(unique), np.uint32)
        last[back] = owners  # ascending: the last one stays
        self.last[places[known]] = last[known]
        self.uses[places[known]] += uses[known].astype(np.uint32)
        new = ~known
        order = np.argsort(merged := np.concatenate([self.ids, unique[new]]), kind="stable")
        self.ids = merged[order]
        self.first = np.concatenate([self.first, first[new]])[order]
        self.last = np.concatenate([self.last, last[new]])[order]
        self.uses = np.concatenate([self.uses, uses[new].astype(np.uint32)])[order]


def _leading(seen: npt.NDArray[np.bool_], lengths: Ints) -> Ints:
    """For each run of `lengths`, how many flags at its start are set."""
    counts = np.zeros(len(lengths), np.int64)
    some = np.flatnonzero(lengths)
    if len(some):
        starts = (np.cumsum(lengths) - lengths)[some]
        ends = starts + lengths[some]
        unset = np.where(seen, len(seen), np.arange(len(seen)))
        counts[some] = np.minimum(np.minimum.reduceat(unset, starts), ends) - starts
    return counts
