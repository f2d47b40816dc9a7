"""What one group knows of one step, and what its two halves (loads and saves) share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvactors.actors.actor import Post
from kvactors.actors.fences import Fences
from kvactors.actors.mailbox import Mailbox
from kvactors.actors.pool import TransferPool
from kvactors.actors.range_debug import RangeDebug
from kvactors.actors.step_state import StepState
from kvactors.core.calls import RangeCall
from kvactors.core.clock import Clock
from kvactors.core.config import EngineConfig
from kvactors.core.events import DeviceEvent
from kvactors.core.loads import StepLoads
from kvactors.core.ranges import GroupRanges
from kvactors.core.saves import StepSaves
from kvactors.core.sessions import GetSession, PutSession, SessionTable
from kvactors.core.stats import GroupStats
from kvactors.messages import Job

KEYS_PER_CALL = 1024
"""Most keys in one metadata call: converting its arguments holds the GIL."""

S = TypeVar("S", PutSession, GetSession)


def per_call(sessions: Sequence[S]) -> Iterator[Sequence[S]]:
    """The sessions in order, in parts that one metadata call takes."""
    for lo in range(0, len(sessions), KEYS_PER_CALL):
        yield sessions[lo : lo + KEYS_PER_CALL]


@dataclass(slots=True, eq=False)
class GroupStep:
    """One step (or `LoadBlocks`) in one group.

    Attributes:
        gets_awaited, puts_awaited: answers that the preparation still waits for.
        reads, writes: range calls that have not come back.
        held: keys whose get session this step owns a share of.
        retries: put sessions that found no space; opened again in the background until the first save is due.
        opening: background opens under way.
        closing: get closes this step asked for that have not come back.
        block_of: local block id of each put session that is still `opening`.
    """

    state: StepState
    event: DeviceEvent | None
    loads: StepLoads | None = None
    saves: StepSaves | None = None
    gets_awaited: int = 0
    puts_awaited: int = 0
    error: str = ""
    prepared: bool = False
    started_early: bool = False
    ending: bool = False
    ended: bool = False
    reads: int = 0
    writes: int = 0
    held: list[str] = field(default_factory=list)
    released: bool = False
    closing: int = 0
    retries: list[PutSession] = field(default_factory=list)
    opening: int = 0
    block_of: dict[PutSession, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class GroupContext:
    """What the parts of a group actor work with.

    Attributes:
        key_parts: what stands before and after the hash in this rank's keys.
        stores: whether this rank writes the group's objects.
        fences: local blocks that store calls past their deadline may still write.
    """

    group_id: int
    ranges: GroupRanges
    key_parts: tuple[str, str]
    stores: bool
    table: SessionTable
    stats: GroupStats
    pool: TransferPool
    clock: Clock
    config: EngineConfig
    mailbox: Mailbox[Any]
    upward: Post
    later: Callable[[float, Any], Any]
    fences: Fences
    range_debug: RangeDebug | None = None

    def key(self, block_hash: bytes) -> str:
        before, after = self.key_parts
        return f"{before}{block_hash.hex()}{after}"

    def submit(self, job: Job) -> None:
        """Sends a job to the pool, with a slot reserved for its reply."""
        self.mailbox.reserve()
        self.pool.submit(job)

    def submit_together(self, jobs: Sequence[Job]) -> None:
        """Sends jobs that share an event; no worker takes one before all are queued, so that they may go in one call."""
        for _ in jobs:
            self.mailbox.reserve()
        self.pool.submit_together(jobs)

    def fence(self, call: RangeCall, by: int) -> None:
        """A read past its deadline (+1) may still write its destinations; one that has returned (-1) may not."""
        self.fences.add([(self.group_id, block_id) for block_id in call.block_ids.tolist()], by)

    def replied(self) -> None:
        """A reply was taken out of the mailbox."""
        self.mailbox.replied()
