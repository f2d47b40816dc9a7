"""A decode worker's end in a process of its own, whose memory the test sees at any time: it is shared, so that nobody has to
ask a process that is frozen."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[3]
END_S = 10.0


class PeerProcess:
    """A context manager.

    Attributes:
        memory: as `write` takes it.
        bytes: the shared memory, as this process sees it.
        address: where the peer has it.
    """

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._file.truncate(nbytes)
        self.bytes = shared(self._file.fileno(), nbytes)
        descriptor = self._file.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.disagg.transports.peer_process", str(descriptor), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[descriptor],
            text=True,
        )
        self.memory, self.address = self._answer()

    def lose_connections(self) -> int:
        """Breaks every connection that it has accepted; answers how many."""
        return int(self._ask("lose"))

    def close_transport(self) -> None:
        """Closes its end; the process goes on."""
        self._ask("close")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)  # all its threads

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self._file.close()

    def _ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait()}"
        return json.loads(line)


def shared(descriptor: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)


def lose_connections() -> int:
    """Of this process: connections that are not listeners, whoever made them."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                internet = found.family in (socket.AF_INET, socket.AF_INET6)
                if internet and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:  # not connected any more
            continue
    return count


def main() -> None:
    from kvactors.disagg.transports.mooncake import MooncakeTransport

    memory = shared(int(sys.argv[1]), int(sys.argv[2]))
    transport = MooncakeTransport("127.0.0.1")
    transport.register(memory.ctypes.data, memory.nbytes)
    print(json.dumps([transport.memory, memory.ctypes.data]), flush=True)
    for line in sys.stdin:
        if line.strip() == "lose":
            print(lose_connections(), flush=True)
        else:
            transport.close()
            print("0", flush=True)


if __name__ == "__main__":
    main()
