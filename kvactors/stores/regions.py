"""Registered memory: the only addresses that a store may touch on behalf of its caller, as with RDMA."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from kvactors.core.store import Addresses
from kvactors.errors import StoreError, UnregisteredMemoryError
from kvactors.stores.copying import HIGHEST, LOWEST

_FEW = 8
"""Addresses up to which Python's own arithmetic is faster than numpy's."""


class Regions:
    """Which address ranges are registered.

    Regions may touch but not overlap (a real transfer engine refuses that too). A range may span regions only where they are
    contiguous and all registered. Replaced as a whole on every change, so that a reader without a lock sees one state.
    """

    def __init__(self, sizes: dict[int, int] | None = None) -> None:
        self._sizes = dict(sorted((sizes or {}).items()))
        starts: list[int] = []
        ends: list[int] = []
        for start, nbytes in self._sizes.items():
            if ends and ends[-1] == start:
                ends[-1] += nbytes
            else:
                starts.append(start)
                ends.append(start + nbytes)
        # A sentinel in front, so that an address below all regions finds an empty one.
        self._starts: Addresses = np.array([-1, *starts], np.int64)
        self._ends: Addresses = np.array([-1, *ends], np.int64)
        self._bounds = [-1, *starts], [-1, *ends]

    def __repr__(self) -> str:
        return f"<Regions {len(self._sizes)} region(s), {sum(self._sizes.values())} bytes>"

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, address: int) -> bool:
        """Whether a region starts there."""
        return address in self._sizes

    def with_region(self, address: int, nbytes: int) -> Regions:
        """Raises StoreError for an empty or overlapping region, or one outside the user address space."""
        address, nbytes = int(address), int(nbytes)
        if nbytes <= 0 or address < LOWEST or address + nbytes > HIGHEST:
            raise StoreError(f"cannot register {nbytes} bytes at {address:#x}: not a range of user memory")
        known = list(self._sizes)
        at = bisect_right(known, address)
        for start in known[max(0, at - 1) : at + 1]:
            if start < address + nbytes and address < start + self._sizes[start]:
                raise StoreError(
                    f"cannot register {nbytes} bytes at {address:#x}: overlaps the region of {self._sizes[start]} bytes at "
                    f"{start:#x}; register each tensor's memory once"
                )
        return Regions({**self._sizes, address: nbytes})

    def without_region(self, address: int) -> Regions:
        """Raises UnregisteredMemoryError when no region starts there."""
        if address not in self._sizes:
            raise UnregisteredMemoryError(f"cannot unregister {address:#x}: no registered region starts there")
        return Regions({start: nbytes for start, nbytes in self._sizes.items() if start != address})

    def cover(self, addresses: Addresses, sizes: Addresses) -> npt.NDArray[np.bool_]:
        """For addresses (n, r) and sizes (r,), bytes: for which of the n rows every range lies in registered memory."""
        ends = self._ends
        if addresses.size <= _FEW:
            return np.array([self._covers(row, sizes.tolist()) for row in addresses.tolist()], np.bool_)
        if len(ends) == 2:
            good = (addresses >= self._starts[1]) & (addresses <= ends[1] - sizes)
        elif self._cover_all(addresses, sizes):
            return np.ones(len(addresses), np.bool_)
        else:
            at = np.searchsorted(self._starts, addresses, side="right") - 1
            # An address below -1 has at == -1, the last region, which it cannot be in.
            good = (addresses >= self._starts[at]) & (addresses <= ends[at] - sizes)
        return np.asarray(good.all(axis=1))

    def _covers(self, addresses: list[int], sizes: list[int]) -> bool:
        starts, ends = self._bounds
        return all(a >= 0 and a + n <= ends[bisect_right(starts, a) - 1] for a, n in zip(addresses, sizes, strict=True))

    def _cover_all(self, addresses: Addresses, sizes: Addresses) -> bool:
        """Whether each column lies in one region: the usual case, answered without `searchsorted`, which gives the GIL away
        even for a few addresses, and may then wait for it as long as another thread computes."""
        if not len(addresses):
            return False
        starts, ends = self._bounds
        if addresses.shape[1] < len(addresses):  # numpy takes a long column faster by itself
            lows, highs = zip(*[(int(column.min()), int(column.max())) for column in addresses.T], strict=True)
        else:
            lows, highs = addresses.min(axis=0).tolist(), addresses.max(axis=0).tolist()
        columns = zip(lows, highs, sizes.tolist(), strict=True)
        return all(low >= 0 and high + size <= ends[bisect_right(starts, low) - 1] for low, high, size in columns)
