"""Every message that crosses an actor boundary.

A happy step, with one group of one layer (C: compute thread, K: coordinator, G: group, P: pool):

    C->K BeginStep      K->G PrepareGroup    G->P Open (get), Ask (readable), Open (put)    P->G TransferDone …
    G->K Prepared       G->P Transfer (get)                                                 P opens the layer's latch
    C->K LayerReady     K->G LayerReady      G->P Transfer (put)                            P uncounts the save task
    P->G TransferDone   G->P Commit          C->K EndStep -> K->G EndGroup                  G->K GroupEnded; K opens the end
    P->G TransferDone   G->K GroupCommitted  K opens the settled latch

A step that is aborted: `AbortStep` (queued transfers are cancelled, those under way awaited), `EndGroup(revoke=True)`, and
the same answers. A preparation that raises: `PrepareFailed`, then `EndGroup(revoke=True)` to every group, and the same
answers. A group that crashed: the supervisor posts `GroupFailed` and answers for it.

`step` names the object that holds all state of one step (or of one `LoadBlocks`); a message of a closed step finds none, is
dropped and counted. Answers to a caller are plain callables, which never block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from kvactors.core.calls import RangeCall
from kvactors.core.events import DeviceEvent
from kvactors.core.queue import Priority
from kvactors.core.reachability import Hit
from kvactors.core.riders import joined
from kvactors.core.sessions import GetSession, PutSession
from kvactors.core.steps import FailedLoad, GroupBlocks, Phase, ReleaseReason, StepRequest
from kvactors.core.store import Outcome, Store

S = TypeVar("S", bound=PutSession | GetSession)

# -- compute thread -> coordinator -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class BeginStep:
    step: int
    requests: Sequence[StepRequest]
    event: DeviceEvent | None


@dataclass(slots=True, eq=False)
class LayerReady:
    """Also coordinator -> group. Loads of the layers after `layer` may run once `event` fired, and with `saves` its saves
    too: exactly one signal of a layer carries them, the entry or the exit of its compute."""

    step: int
    layer: int
    event: DeviceEvent | None
    phase: Phase
    saves: bool


@dataclass(slots=True, eq=False)
class LayerWanted:
    """Also coordinator -> group. The compute thread waits for the loads of `layer`."""

    step: int
    layer: int
    event: DeviceEvent | None


@dataclass(slots=True, eq=False)
class EndStep:
    step: int


@dataclass(slots=True, eq=False)
class AbortStep:
    step: int
    reason: str


@dataclass(slots=True, eq=False)
class LoadBlocks:
    """Loads blocks of requests outside any step; answered by one `LoadDone` each."""

    step: int
    requests: Sequence[StepRequest]
    event: DeviceEvent | None


@dataclass(slots=True, eq=False)
class ReleaseRequest:
    request_id: str
    reason: ReleaseReason
    answer: Callable[[], None]


@dataclass(slots=True, eq=False)
class ForgetRequest:
    """Also coordinator -> group. Drops the memory of committed keys and ends this life of the request id."""

    request_id: str


@dataclass(slots=True, eq=False)
class Lookup:
    """The longest hit of a prompt; answered with a `Hit` (a miss when the deadline passed or the store failed)."""

    hashes: Sequence[bytes]
    prompt_tokens: int
    deadline_s: float
    answer: Callable[[Hit], None]


@dataclass(slots=True, eq=False)
class Drain:
    """Answered with what was left, one line each; empty = all done."""

    deadline_s: float
    answer: Callable[[list[str]], None]


# -- coordinator -> group ----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PrepareGroup:
    """Blocks of one group: per request its id, hashes of the group's blocks, and block lists."""

    step: int
    requests: Sequence[tuple[str, Sequence[bytes], GroupBlocks]]
    event: DeviceEvent | None
    saves: frozenset[str]
    """requests that may save (not tainted)"""


@dataclass(slots=True, eq=False)
class EndGroup:
    """The step is over. With `revoke` (rolled back, or aborted) every put of it is revoked."""

    step: int
    revoke: bool
    reason: str = ""


@dataclass(slots=True, eq=False)
class DropSessions:
    """The store lost its sessions of earlier epochs (I11)."""

    epoch: int
    cause: str


@dataclass(slots=True, eq=False)
class Abandon:
    """A drain's deadline passed: whatever is not at its end is revoked or abandoned; answered by `Drained`."""

    grace_s: float


# -- group -> coordinator ----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Prepared:
    step: int
    group_id: int


@dataclass(slots=True, eq=False)
class PrepareFailed:
    step: int
    group_id: int
    reason: str


@dataclass(slots=True, eq=False)
class GroupEnded:
    """No transfer of the step is under way in the group, and no put session of it is `open`."""

    step: int
    group_id: int


@dataclass(slots=True, eq=False)
class GroupCommitted:
    """Every session of the step in the group reached its end, or is its undertaker's."""

    step: int
    group_id: int


@dataclass(slots=True, eq=False)
class GroupIdle:
    """Sessions that had outlived their step (a lost call held them) have reached their end."""

    group_id: int


@dataclass(slots=True, eq=False)
class GroupFailed:
    """Supervisor -> coordinator: the group's actor crashed."""

    group_id: int
    error: BaseException


@dataclass(slots=True, eq=False)
class Drained:
    group_id: int
    left: Sequence[str]


# -- group or coordinator -> pool, and back ----------------------------------------------------------------------------


class Kind(Enum):
    PUT = "put"
    GET = "get"


@dataclass(slots=True, eq=False, kw_only=True)
class Job(ABC):
    """One blocking store call, made by a transfer worker.

    Attributes:
        reply: takes the `TransferDone`; never blocks (its sender reserved the slot).
        settled: called by the thread that finished the job, after the reply was posted: uncounts tasks, opens latches.
        event: the job waits for it before it takes a worker.
        epoch: life of the store's master under which the job's sessions were opened; -1 = the job needs none.
    """

    reply: Callable[[TransferDone], None]
    priority: Priority
    group_id: int = -1
    step: int = -1
    layer: int = -1
    distance: int = 0
    event: DeviceEvent | None = None
    settled: Callable[[], None] | None = None
    epoch: int = -1
    deadline_s: float = 0.0
    """by when a worker must have taken it; set by the pool"""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many outcomes the call answers with."""

    @property
    def parts(self) -> Sequence[Job]:
        """The jobs that its call answers: itself, or the transfers that were joined."""
        return (self,)

    @property
    def label(self) -> str:
        return type(self).__name__.lower()

    @property
    def method(self) -> str:
        """The store's method that it calls."""
        return _METHODS.get(self.label, self.label.replace(" ", "_"))


_METHODS = {"commit": "put_commit", "revoke": "put_revoke", "close": "get_close"}


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer(Job):
    """Moves ranges.

    Attributes:
        oldest_s: when the oldest session in it was opened (or renewed), on the engine's clock.
        run: which run of layers it is read in, see `read_runs`; -1 = any. Only layers of one run go in one call.
        whole: whether it is part of a read of whole objects, which should go in one call.
    """

    kind: Kind
    call: RangeCall
    object_bytes: int
    oldest_s: float
    run: int = -1
    whole: bool = False

    @property
    def count(self) -> int:
        return len(self.call.batch.keys)

    @property
    def parts(self) -> Sequence[Transfer]:
        return (self,)

    @property
    def label(self) -> str:
        return f"{self.kind.value} ranges"


@dataclass(slots=True, eq=False, kw_only=True)
class JoinedTransfer(Transfer):
    """Several layers of the same rows in one store call. Made by the pool for a worker, and known to nobody else: each of the
    joined transfers gets an answer of its own."""

    joined: Sequence[Transfer]

    @classmethod
    def of(cls, parts: Sequence[Transfer]) -> JoinedTransfer:
        first = parts[0]
        return cls(
            reply=_never,
            priority=first.priority,
            group_id=first.group_id,
            step=first.step,
            layer=first.layer,
            distance=first.distance,
            epoch=min(p.epoch for p in parts),
            kind=first.kind,
            call=joined([p.call for p in parts]),
            object_bytes=first.object_bytes,
            oldest_s=min(p.oldest_s for p in parts),
            joined=parts,
        )

    @property
    def parts(self) -> Sequence[Transfer]:
        return self.joined


def _never(done: TransferDone) -> None:
    raise AssertionError(f"{done.job.label}: the parts of a joined transfer are answered, not the whole")


@dataclass(slots=True, eq=False, kw_only=True)
class SessionJob(Job, Generic[S]):
    """A metadata call on sessions of one kind: one outcome for each."""

    sessions: Sequence[S]

    @property
    def count(self) -> int:
        return len(self.sessions)


@dataclass(slots=True, eq=False, kw_only=True)
class Open(SessionJob[PutSession | GetSession]):
    kind: Kind
    object_bytes: int
    background: bool = False
    """a put open that the step's preparation does not wait for"""

    @property
    def label(self) -> str:
        return f"{self.kind.value} open"


@dataclass(slots=True, eq=False, kw_only=True)
class Commit(SessionJob[PutSession]):
    pass


@dataclass(slots=True, eq=False, kw_only=True)
class Revoke(SessionJob[PutSession]):
    pass


@dataclass(slots=True, eq=False, kw_only=True)
class Close(SessionJob[GetSession]):
    pass


@dataclass(slots=True, eq=False, kw_only=True)
class Ask(Job):
    """Any other call, whose answer `result` holds: readable (a lookup's too), health, the revoke of keys without a session.
    `what`: the method, in words."""

    run: Callable[[Store], Any]
    what: str = "readable"
    result: Any = None

    @property
    def label(self) -> str:
        return self.what

    @property
    def count(self) -> int:
        return 1


@dataclass(slots=True, eq=False)
class TransferDone:
    """A job's outcomes, one per key, in order. `late`: the job was given up as lost earlier and has now returned."""

    job: Job
    outcomes: list[Outcome]
    started_s: float
    ended_s: float
    epoch: int
    error: BaseException | None = None
    late: bool = False

    def answers(self) -> list[TransferDone]:
        """The answer of each job that the call was made for: the same outcomes, since all have the same keys."""
        parts = self.job.parts
        if len(parts) == 1:
            return [self]
        return [TransferDone(p, list(self.outcomes), self.started_s, self.ended_s, self.epoch, self.error) for p in parts]


@dataclass(slots=True, eq=False)
class StoreLost:
    """Pool -> coordinator: a call answered that the master is gone (`unreachable`), or that it lost our sessions."""

    epoch: int
    unreachable: bool
    cause: str


@dataclass(slots=True, eq=False)
class LoadDone:
    """What the caller of `LoadBlocks` gets: what failed, if anything."""

    request_id: str
    failure: FailedLoad | None = None
    fenced_blocks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
