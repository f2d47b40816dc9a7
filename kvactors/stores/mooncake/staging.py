"""The staging buffers of a client: a fixed piece of registered memory, in slots that calls take and give back."""

from __future__ import annotations

import threading

import numpy as np

from kvactors.errors import ConfigError
from kvactors.stores.copying import address_of

SLOTS = 4
"""One for each transfer worker of an engine as it comes, and one more."""

_PAGE_BYTES = 4096


class StagingBuffers:
    """Slots of equal size. A call that finds none free goes on without; none is ever waited for.

    The memory is touched once here: first touch runs at a twentieth of the rate of a copy.
    """

    def __init__(self, nbytes: int) -> None:
        self.slot_bytes = nbytes // SLOTS // _PAGE_BYTES * _PAGE_BYTES
        try:
            self._raw = np.empty(self.slot_bytes * SLOTS + _PAGE_BYTES, np.uint8)
        except (MemoryError, ValueError) as error:
            raise ConfigError(f"staging_bytes = {nbytes}: the machine has no memory for that") from error
        self._raw[:] = 0
        raw = address_of(self._raw)
        self.address = raw + -raw % _PAGE_BYTES
        self._lock = threading.Lock()
        self._free = [self.address + i * self.slot_bytes for i in range(SLOTS)] if self.slot_bytes else []

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * SLOTS

    def take(self) -> int | None:
        """The address of a free slot."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)
