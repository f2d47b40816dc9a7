"""Servers as child processes: each logs to a file of its own, one that dies is shown with its last lines, all end together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

START_S = 150.0
"""vLLM takes 20 s to start, and longer on a busy machine."""
STOP_S = 20.0
POLL_S = 0.2
LAST_LINES = 15


class ServerError(Exception):
    """A server ended by itself, or does not answer; has its last lines."""


class Servers:
    """Use it as a context: at its end all servers are stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[tuple[str, asyncio.subprocess.Process]] = []

    async def __aenter__(self) -> Servers:
        return self

    async def __aexit__(self, *_: object) -> None:
        waits = [asyncio.ensure_future(process.wait()) for _, process in self._running]
        try:
            for _, process in reversed(self._running):
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            if waits:
                await asyncio.wait(waits, timeout=STOP_S)
        finally:  # also at a second Ctrl-C
            for _, process in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # a group of its own: what it left running, if anything
        await asyncio.gather(*waits)

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    async def start(
        self, name: str, words: Sequence[str | Path], environment: Mapping[str, str], ready: Callable[[], Awaitable[bool]]
    ) -> None:
        """Starts a server and waits until it is ready.

        Raises:
            ServerError: it, or another, ends before; or it takes longer than `START_S`.
        """
        with self.log(name).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *words,
                env=environment,
                cwd=self._folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running.append((name, process))
        try:
            async with asyncio.timeout(START_S):
                while not await ready():
                    self.check()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ServerError(f"{name} does not answer after {START_S:.0f} s; {self._last(name)}") from None

    def check(self) -> None:
        """
        Raises:
            ServerError: a server has ended.
        """
        for name, process in self._running:
            if process.returncode is not None:
                raise ServerError(f"{name} ended with exit code {process.returncode}; {self._last(name)}")

    async def watch(self) -> None:
        """Waits until a server ends by itself.

        Raises:
            ServerError: one did.
        """
        waits = [asyncio.ensure_future(process.wait()) for _, process in self._running]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self.check()

    def _last(self, name: str) -> str:
        lines = self.log(name).read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([f"the end of {self.log(name)}:", *(f"  {line}" for line in lines)])


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    with contextlib.ExitStack() as sockets:
        taken = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]
