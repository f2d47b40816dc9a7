"""The sends of a prefill worker: planned, bounded in number, written by tasks of their own, and stopped between two batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvactors.disagg.blocks import RequestBlocks, plan_blocks
from kvactors.disagg.descriptors import RegionCopy, batches, request_descriptors
from kvactors.disagg.geometry import WorkerGeometry
from kvactors.disagg.messages import WriteEnded
from kvactors.disagg.outbox import Outbox
from kvactors.disagg.states import Worker
from kvactors.disagg.transports import Transport
from kvactors.errors import HandoffBlocksError, KVActorsError
from kvactors.log import get_logger

log = get_logger("kvactors.disagg.sends", burst=10)


@dataclass(frozen=True, slots=True)
class SendLimits:
    """
    Attributes:
        abort_timeout_s: blocks that nobody asked for, or that were not settled, are freed after this time; never under a send.
        orphan_s: how long a request is known that decode spoke of and that never came.
        orphans, orphans_of_one: how many of those at a time, in all and of one peer.
        sends, sends_to_one: requests that are written at a time, in all and to one peer, so that frozen ones hold up nobody.
        batch: descriptors between two looks at whether the peer still wants them.
    """

    abort_timeout_s: float = 480.0
    orphan_s: float = 480.0
    orphans: int = 4096
    orphans_of_one: int = 1024
    sends: int = 32
    sends_to_one: int = 2
    batch: int = 2000


@dataclass(slots=True, eq=False)
class SendCounts:
    """Since the start. Requests, but for `bytes`; `sends` counts the decode workers written to, empty pulls not."""

    sends: int = 0
    bytes: int = 0
    failed: int = 0
    refused: int = 0
    expired: int = 0
    freed: int = 0


@dataclass(slots=True, eq=False)
class Puller:
    """A decode worker, as long as its link lives.

    Attributes:
        route: what of each block goes to it.
        at_once: the sends to it at a time.
        outbox: its link; None when that has ended.
        orphans: requests that it spoke of first, and that have not come; the same of all its links.
    """

    engine_id: str
    worker: Worker
    memory: str
    geometry: WorkerGeometry
    route: tuple[RegionCopy, ...]
    at_once: asyncio.Semaphore
    outbox: Outbox | None = None
    orphans: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Send:
    """A send under way.

    Attributes:
        waiting: for its turn; it may be cancelled.
    """

    waiting: bool = False
    task: asyncio.Task[None] | None = None
    _stopped: bool = False

    def stopped(self) -> bool:
        """Whether the peer gave it up."""
        return self._stopped

    def stop(self) -> None:
        """Nothing more is written after the batch in hand."""
        self._stopped = True
        if self.waiting and self.task is not None:
            self.task.cancel()


class Sends:
    """Makes sends. `ended` is told of each, once, when nothing of it follows any more."""

    def __init__(
        self,
        geometry: WorkerGeometry,
        transport: Transport,
        limits: SendLimits,
        counts: SendCounts,
        ended: Callable[[WriteEnded], None],
    ) -> None:
        self._geometry, self._transport, self._limits, self._counts = geometry, transport, limits, counts
        self._ended = ended
        self._at_once = asyncio.Semaphore(limits.sends)

    def start(self, transfer_id: str, puller: Puller, held: RequestBlocks, wanted: RequestBlocks) -> Send:
        """Begins to write what is wanted of the blocks that are held."""
        send = Send()
        done = WriteEnded(transfer_id, puller.worker)
        send.task = asyncio.ensure_future(self._run(send, done, puller, held, wanted))
        return send

    async def _run(self, send: Send, done: WriteEnded, puller: Puller, held: RequestBlocks, wanted: RequestBlocks) -> None:
        failed: str | None = "stopped before it began"
        refused = False
        try:
            failed = await self._write(send, puller, held, wanted)
        except HandoffBlocksError as error:
            failed, refused = str(error), True
        except asyncio.CancelledError:  # while it waited for its turn
            pass
        except KVActorsError as error:
            failed = str(error)
        except Exception as error:
            log.error("a send broke", transfer=done.transfer_id, error=repr(error))
            failed = f"{type(error).__name__}: {error}"
        finally:
            self._ended(replace(done, failed=failed, refused=refused))

    async def _write(self, send: Send, puller: Puller, held: RequestBlocks, wanted: RequestBlocks) -> str | None:
        """Why it was stopped; None if all was written."""
        if wanted.empty:
            return None
        if send.stopped():
            return "stopped before it began"
        for i, (group, of) in enumerate(zip(puller.geometry.groups, wanted.groups, strict=False)):
            if len(of.ids) > group.blocks:  # said before any work is done for it
                raise HandoffBlocksError(f"group {i}: decode names {len(of.ids)} blocks and has {group.blocks}")
        pairs = plan_blocks(self._geometry.groups, puller.geometry.groups, held, wanted)
        descriptors = request_descriptors(puller.route, pairs)
        if not len(descriptors):
            return None
        send.waiting = True
        async with puller.at_once, self._at_once:
            send.waiting = False
            for batch in batches(descriptors, self._limits.batch):
                if send.stopped():
                    return "stopped by the decode worker"
                await self._transport.write(puller.memory, batch)
        self._counts.sends += 1
        self._counts.bytes += descriptors.total_bytes
        return None
