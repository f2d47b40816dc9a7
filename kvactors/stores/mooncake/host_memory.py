"""Whether the CPU can read a piece of memory: device memory has addresses too, and copying from them kills the process."""

from __future__ import annotations

import ctypes
import os
from typing import Any


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def host_memory(address: int, nbytes: int) -> bool:
    """Reads the first and the last byte through the kernel, which answers with an error where a load would be fatal.

    False too where the kernel does not let a process read itself this way: then nothing is staged, which is only slower.
    """
    try:
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return False
    return all(_readable(read, at) for at in {address, address + nbytes - 1})


def _readable(read: Any, address: int) -> bool:
    into = ctypes.create_string_buffer(1)
    local, remote = _Vector(ctypes.addressof(into), 1), _Vector(address, 1)
    got = read(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return bool(got == 1)
