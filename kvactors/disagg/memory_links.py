"""Links in memory, for simulations: no sockets, no threads, no clock but the loop's own; faults on demand.

They behave as links over TCP do: what a frozen process sent before is still delivered, a process that was killed is noticed at
once and refuses connections, a full connection holds up `send`. Messages pass through `encode` and `decode`.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable

from kvactors.disagg.links import Connect, Serve
from kvactors.disagg.wire import Message, Problem, decode, encode
from kvactors.errors import ConfigError, LinkClosedError, PeerGoneError, PeerUnreachableError, WireError


class _Process:
    """What lives at an address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.running = asyncio.Event()
        """Not set: frozen."""
        self.running.set()
        self.serve: Serve | None = None
        """Given each link; None: connections are refused."""
        self.links: dict[MemoryLink, None] = {}
        self.tasks: dict[asyncio.Task[None], None] = {}
        """Both in order: a seed gives the same run again."""


class MemoryLink:
    """One end of a `Link` in memory, made by `MemoryNetwork`; it stands still while its process is frozen."""

    def __init__(self, peer: str, owner: _Process, room: int, delay_s: Callable[[], float]) -> None:
        self.peer = peer
        self.other: MemoryLink = self
        self._owner, self._room, self._delay_s = owner, room, delay_s
        self._order = asyncio.Lock()
        self._under_way: deque[bytes | str] = deque()
        """What the other end sent and has not arrived: frames, or why it ended the link."""
        self._arrived: deque[bytes] = deque()
        self._ended = ""
        self._over = False
        """Nothing arrives any more; what has arrived can still be received."""
        self._why = "the connection was lost"
        """Why it is over."""
        self._changed = asyncio.Event()
        owner.links[self] = None

    async def send(self, message: Message) -> None:
        """Sends a message; messages arrive in the order of the calls. Waits while the connection is full or the process frozen.

        Raises:
            LinkClosedError: the link has ended.
            WireError: the message is too large; the link goes on.
        """
        self._check()
        await self.send_frame(encode(message))

    async def send_frame(self, frame: bytes) -> None:
        """Sends bytes as they are: for tests of what no encoder writes.

        Raises:
            LinkClosedError: the link has ended.
        """
        async with self._order:
            while True:
                await self._owner.running.wait()
                self._check()
                if self._over:
                    raise LinkClosedError(f"the link to {self.peer} has ended: {self._why}")
                if self.other._waiting < self._room:
                    break
                await self._wait()
            self.other._put(frame)

    async def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. What is malformed, too large or of another version is answered with a `Problem`, and the end.

        Giving up (cancelling) loses no message.

        Args:
            timeout_s: how long to wait; None = without end.

        Raises:
            LinkClosedError: the link has ended; says why.
            TimeoutError: the time is up; the link goes on.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                await self._owner.running.wait()
                self._check()
                if self._arrived:
                    break
                if self._over:
                    self._end(self._why)
                    raise self._error()
                await self._wait()
        frame = self._arrived.popleft()
        self.other._changed.set()
        try:
            return decode(frame)
        except WireError as error:
            self._goodbye(f"the peer sent something that is no message: {error}", str(error))
            raise self._error() from None

    async def close(self, reason: str = "") -> None:
        """Ends the link; with a reason, the other end is told first. Idempotent."""
        if not self._ended:
            await self._owner.running.wait()
        self._goodbye(f"closed on this side{': ' + reason if reason else ''}", reason)

    @property
    def _waiting(self) -> int:
        """Frames that were sent to this end and not received."""
        return len(self._under_way) + len(self._arrived)

    def _goodbye(self, why: str, problem: str = "") -> None:
        if self._ended:
            return
        self._end(why)
        if not self.other._ended:
            if problem:
                self.other._put(encode(Problem(problem[:1000])))
            self.other._put(f"closed by the peer{': ' + problem if problem else ''}")

    def _put(self, frame: bytes | str) -> None:
        """Puts a frame under way to this end, behind what is under way already."""
        if self._over:
            return
        self._under_way.append(frame)
        asyncio.get_running_loop().call_later(self._delay_s(), self._arrive)

    def _arrive(self) -> None:
        """Lets the first of what is under way arrive, whichever it is whose time has come: the order is kept."""
        if self._over or not self._under_way:
            return
        frame = self._under_way.popleft()
        if isinstance(frame, bytes):
            self._arrived.append(frame)
        else:
            self._lose(frame)
        self._changed.set()

    def _lose(self, why: str) -> None:
        """Nothing arrives at this end any more; why, it says after what has arrived."""
        if not self._over:
            self._over, self._why = True, why
        self._under_way.clear()
        self._changed.set()

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = why
            self._over = True
            self._under_way.clear()
            self._arrived.clear()
            self._owner.links.pop(self, None)
            self._changed.set()
            self.other._changed.set()

    async def _wait(self) -> None:
        """Until something has changed; whoever waits looks again."""
        self._changed.clear()
        await self._changed.wait()

    def _check(self) -> None:
        if self._ended:
            raise self._error()

    def _error(self) -> LinkClosedError:
        return LinkClosedError(f"the link to {self.peer} has ended: {self._ended}")


class MemoryNetwork:
    """Addresses, the processes behind them, and what can happen to them. Use it within a running loop.

    Args:
        rng: draws the delay of every frame and connection; None = no delays.
        most_delay_s: the longest delay.
        connect_timeout_s: how long `connect` waits for an answer.
        room: frames that a link takes in one direction before `send` waits.

    Attributes:
        failures: what `serve` raised, other than that its link has ended.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        most_delay_s: float = 0.01,
        connect_timeout_s: float = 5.0,
        room: int = 256,
    ) -> None:
        self.failures: list[Exception] = []
        self._rng, self._most_delay_s = rng, most_delay_s
        self._connect_timeout_s, self._room = connect_timeout_s, room
        self._processes: dict[str, _Process] = {}
        self._clients = 0

    def listen(self, address: str, serve: Serve) -> None:
        """A process listens at an address; each link that is opened to it is given to `serve`, in a task of its own.

        After `kill`, this is a new process at the same address.

        Raises:
            ConfigError: the address is taken.
        """
        process = self._process(address)
        if process.serve is not None:
            raise ConfigError(f"something listens at {address} already; kill it first")
        process.serve = serve

    def connector(self, origin: str) -> Connect:
        """What the process at address `origin` opens its links with."""

        async def connect(address: str) -> MemoryLink:
            return await self.connect(address, origin)

        return connect

    async def connect(self, address: str, origin: str = "") -> MemoryLink:
        """Opens a link to an address.

        Args:
            origin: the address of the process that opens it; empty = a new one, "client-1" and so on.

        Raises:
            PeerGoneError: nothing listens there.
            PeerUnreachableError: no answer in time: it is frozen.
        """
        if not origin:
            self._clients += 1
            origin = f"client-{self._clients}"
        own = self._process(origin)
        await own.running.wait()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.sleep(self._delay_s())
                while True:
                    process = self._processes.get(address)
                    if process is None or process.serve is None:
                        raise PeerGoneError(f"no worker listens at {address} any more: connection refused")
                    if process.running.is_set():
                        break
                    await process.running.wait()
        except TimeoutError:
            raise PeerUnreachableError(
                f"the worker at {address} does not answer in {self._connect_timeout_s:g} s; its process may be frozen"
            ) from None
        if self._processes.get(origin) is not own:
            raise LinkClosedError(f"the process at {origin} was killed while it opened a link to {address}")
        near = MemoryLink(address, own, self._room, self._delay_s)
        far = MemoryLink(origin, process, self._room, self._delay_s)
        near.other, far.other = far, near
        task = asyncio.get_running_loop().create_task(self._serve(process.serve, far))
        process.tasks[task] = None
        task.add_done_callback(process.tasks.pop)
        return near

    def cut(self, link: MemoryLink) -> None:
        """A link breaks: both ends notice at once; what is under way is lost."""
        for end in (link, link.other):
            end._lose("the connection was lost")

    def kill(self, address: str) -> None:
        """The process at an address ends at once, frozen or not: its links, and the tasks that serve them.

        Connections are refused from now on. What it sent and has not arrived is lost; what has arrived can be received.
        """
        process = self._processes.pop(address, None)
        if process is None:
            return
        for link in list(process.links):
            link.other._lose("the connection was lost: reset by peer")
            link._end("this process was killed")
        for task in list(process.tasks):
            task.cancel()
        process.serve = None
        process.running.set()  # who waits looks again, and finds it gone

    def freeze(self, address: str) -> None:
        """The process at an address stands still: it receives, sends and accepts nothing until `thaw`, and nobody is told."""
        self._process(address).running.clear()

    def thaw(self, address: str) -> None:
        """A frozen process goes on: with all that was sent to it in the meantime."""
        self._process(address).running.set()

    def links(self, address: str) -> list[MemoryLink]:
        """The links of the process at an address, both those it opened and those it accepted; its own ends of them."""
        process = self._processes.get(address)
        return list(process.links) if process else []

    async def stop(self) -> None:
        """Kills every process, and waits for the tasks that served its links."""
        tasks = [task for process in self._processes.values() for task in process.tasks]
        for address in list(self._processes):
            self.kill(address)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, serve: Serve, link: MemoryLink) -> None:
        try:
            await serve(link)
        except LinkClosedError:
            pass
        except Exception as error:
            self.failures.append(error)
        except asyncio.CancelledError:
            link._goodbye("the task that served it was cancelled")
            raise
        await link.close()

    def _process(self, address: str) -> _Process:
        return self._processes.setdefault(address, _Process(address))

    def _delay_s(self) -> float:
        return self._rng.uniform(0.0, self._most_delay_s) if self._rng is not None else 0.0
