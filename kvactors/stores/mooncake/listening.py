"""Which process listens on a TCP port of this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def listens(pid: int, port: int) -> bool:
    """Whether it is this process that listens on the port: another one may have taken it, and answers just as well."""
    sockets = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *more = line.split()
        if state == "0A" and int(local.rpartition(":")[2], 16) == port:
            sockets.add(f"socket:[{more[5]}]")
    files: list[str] = []
    with contextlib.suppress(OSError):  # it has ended
        files = os.listdir(f"/proc/{pid}/fd")
    for file in files:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{file}") in sockets:
                return True
    return False
