"""What a decode worker knows of prefill instances and their workers, and the tasks that find them and open links to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvactors.actors.mailbox import Mailbox
from kvactors.disagg.links import ROOM, Connect, Link
from kvactors.disagg.messages import Heard, LinkDown, LinkUp, Located
from kvactors.disagg.outbox import Outbox
from kvactors.disagg.states import Worker
from kvactors.disagg.wire import Abort, Hello, Message, Problem, Welcome
from kvactors.errors import DisaggError, PeerGoneError

if TYPE_CHECKING:
    from kvactors.disagg.receiver import Handoff

ANSWER_S = 10.0
"""A prefill worker answers a Hello within this time."""

LOCATE_PAUSES_S = (0.2, 1.0, 3.0)
"""Pauses between questions to a bootstrap server: a prefill instance that starts registers its workers one after another."""

UNSAID = 4096


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill instance, as its bootstrap server knows it. `addresses`: where each worker's links lead; all are there."""

    engine_id: str
    tp_size: int
    pp_size: int
    addresses: Mapping[Worker, str]


Query = Callable[[str], Awaitable[Mapping[str, Prefill]]]
"""Asks a bootstrap server for its complete instances, by engine id.

Raises:
    DisaggError: it cannot be reached, or answers nonsense.
"""


@dataclass(slots=True, eq=False)
class Instance:
    """A prefill instance. `entry`: None until it was located; `waiting`: requests that wait for that."""

    bootstrap: str
    engine_id: str
    entry: Prefill | None = None
    waiting: list[Handoff] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Remote:
    """A prefill worker.

    Attributes:
        process: who answered there last; another one means that the earlier is gone.
        handoffs: requests that it has to do with, by transfer id.
        opening: a link is being opened.
        retrying: a timer will try it again.
        pause_s: the last pause before it was tried again.
        heard_at: when it was heard last; None: never.
        silent_s, silent_until: its longest silence of late, over several links, and when that ended.
        refused: why it takes no links from this worker, until `refused_until`.
        unsaid: aborts to say when there is a link again.
    """

    instance: Instance
    worker: Worker
    address: str
    process: str = ""
    outbox: Outbox | None = None
    handoffs: dict[str, Handoff] = field(default_factory=dict)
    opening: bool = False
    retrying: bool = False
    pause_s: float = 0.0
    opened_at: float = 0.0
    heard_at: float | None = None
    silent_s: float = 0.0
    silent_until: float = 0.0
    refused: str = ""
    refused_until: float = 0.0
    unsaid: dict[str, Abort] = field(default_factory=dict)

    @property
    def link(self) -> Link | None:
        return None if self.outbox is None else self.outbox.link

    @property
    def needed(self) -> bool:
        """Whether somebody waits for a link."""
        return bool(self.handoffs or self.unsaid)

    def opened(self, link: Link, now: float) -> None:
        self.opening, self.outbox, self.refused = False, Outbox(link), ""
        self.opened_at = now
        unsaid, self.unsaid = self.unsaid, {}
        for abort in unsaid.values():
            self.say(abort)

    def heard(self, now: float, recalled_s: float) -> None:
        """It gave a sign of life. A silence is forgotten `recalled_s` after its end, or when a longer one has ended."""
        silent_s = 0.0 if self.heard_at is None else now - self.heard_at
        if silent_s >= self.silent_s or now - self.silent_until > recalled_s:
            self.silent_s, self.silent_until = silent_s, now
        self.heard_at = now

    def closed(self) -> None:
        self.opening = False
        if self.outbox is not None:
            self.outbox.close()
            self.outbox = None

    def say(self, message: Message) -> None:
        """Sends a message; an abort is kept until there is a link."""
        if self.outbox is not None:
            self.outbox.send(message)
        elif isinstance(message, Abort) and len(self.unsaid) < UNSAID:
            self.unsaid[message.transfer_id] = message


async def locate(instance: Instance, query: Query, mailbox: Mailbox[Any]) -> None:
    """Asks the bootstrap server, some times; posts `Located`."""
    reason = ""
    for pause_s in (*LOCATE_PAUSES_S, None):
        try:
            found = await query(instance.bootstrap)
            entry = found.get(instance.engine_id)
            if entry is not None:
                await mailbox.send(Located(instance, entry))
                return
            known = f"it knows {sorted(found)}" if found else "it knows none"
            reason = f"instance {instance.engine_id} is not (wholly) registered at {instance.bootstrap}; {known}"
        except PeerGoneError as error:
            reason = str(error)
            break  # nobody listens: it is not starting, or the address is wrong
        except DisaggError as error:
            reason = str(error)
        if pause_s is not None:
            await asyncio.sleep(pause_s)
    await mailbox.send(Located(instance, None, f"bootstrap server: {reason}"))


async def greet(remote: Remote, hello: Hello, connect: Connect, mailbox: Mailbox[Any]) -> None:
    """Opens a link, says who this is, and reads until the link ends; posts `LinkUp`, `Heard`… and `LinkDown`."""
    link: Link | None = None
    up = False
    down = LinkDown(remote, None, "this side ended it")
    try:
        link = await connect(remote.address)
        async with asyncio.timeout(ANSWER_S):
            await link.send(hello)
            answer = await link.receive()
        if not isinstance(answer, Welcome):
            reason = answer.reason if isinstance(answer, Problem) else f"it answered {type(answer).__name__} to Hello"
            down = LinkDown(remote, None, reason, refused=True)
        elif answer.engine_id != remote.instance.engine_id or answer.worker != remote.worker:
            down = LinkDown(remote, None, "another worker has its address now", gone=True)
        else:
            await mailbox.send(LinkUp(remote, link, answer))
            up, room = True, asyncio.Semaphore(ROOM)
            while True:
                message = await link.receive()
                await room.acquire()
                await mailbox.send(Heard(remote, link, message, room))
    except PeerGoneError as error:
        down = LinkDown(remote, None, str(error), gone=True)
    except (DisaggError, TimeoutError) as error:
        down = LinkDown(remote, link if up else None, str(error) or f"no answer within {ANSWER_S:g} s")
    finally:
        if link is not None:
            await link.close()
        mailbox.post(down)
