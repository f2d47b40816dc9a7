"""Memory that the CPU cannot read is found out without reading it, and is never copied."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from kvactors.core.store import Outcome
from kvactors.stores.copying import address_of
from kvactors.stores.mooncake.host_memory import host_memory
from kvactors.stores.mooncake.sender import PUT_RANGES
from tests.stores.contract import ranges
from tests.stores.mooncake.fake_native import Bench

PAGE_BYTES = mmap.PAGESIZE


class DeviceMemory:
    """Two pages that have an address and nothing behind it, as a device's memory has for the CPU."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        none, private_anonymous = 0, 0x22
        found = libc.mmap(None, ctypes.c_size_t(2 * PAGE_BYTES), none, private_anonymous, -1, ctypes.c_long(0))
        self.address, self._libc = int(found), libc

    def close(self) -> None:
        self._libc.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(2 * PAGE_BYTES))


def test_tells_memory_of_the_cpu_from_other_memory() -> None:
    array, device = np.zeros(3 * PAGE_BYTES, np.uint8), DeviceMemory()
    assert host_memory(address_of(array), array.nbytes)
    assert not host_memory(device.address, 2 * PAGE_BYTES)
    device.close()


def test_device_memory_is_not_staged_though_nobody_said_what_it_is() -> None:
    bench, device = Bench(staging_bytes=1 << 20), DeviceMemory()
    bench.store.register(device.address, 2 * PAGE_BYTES)
    assert bench.store.put_open(["k"], [64]) == [Outcome.OK]
    bench.native.answers[PUT_RANGES].append([64])  # the real client moves it; the fake one would read it
    addresses = [[device.address + i * 100 for i in range(4)]]
    assert bench.store.put_ranges(ranges(["k"], addresses, [16] * 4, [0, 16, 32, 48])) == [Outcome.OK]
    (sent,) = bench.native.made(PUT_RANGES)
    assert sent[1] == addresses
    bench.store.unregister(device.address)
    device.close()
