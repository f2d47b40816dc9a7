"""Every message that crosses an actor boundary.

A happy step, with one group of one layer (C: compute thread, K: coordinator, G: group, P: pool):

    C->K BeginStep      K->G PrepareGroup    G->P Open (get), Ask (readable), Open (put)    P->G TransferDone …
    G->K Prepared       K->G Activate        G->P Transfer (get)                            P opens the layer's latch
    C->K LayerReady     K->G LayerReady      G->P Transfer (put)                            P uncounts the save task
    P->G TransferDone   G->P Commit          C->K EndStep -> K->G EndGroup                  G->K GroupEnded, K opens the end latch
    P->G TransferDone   G->K GroupCommitted  K opens the settled latch

A step that is aborted: `AbortStep` (queued transfers are cancelled, those under way awaited), `EndGroup(revoke=True)`, and
the same answers. A preparation that raises: `PrepareFailed`, then `Rollback` to every group, and the same answers. A group
that crashed: the supervisor posts `GroupFailed` and answers for it.

`step` in a message is the object that holds all state of one step; a message of a closed step is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvactors.core.events import DeviceEvent
from kvactors.core.queue import Priority
from kvactors.core.steps import FailedLoad, GroupBlocks, Phase, ReleaseReason, StepRequest
from kvactors.core.store import Outcome, RangeBatch, Store

if TYPE_CHECKING:
    from kvactors.actors.latch import Latch
    from kvactors.actors.step_state import StepState

# -- compute thread -> coordinator -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class BeginStep:
    step: StepState
    requests: Sequence[StepRequest]
    event: DeviceEvent | None


@dataclass(slots=True, eq=False)
class LayerReady:
    """Also coordinator -> group. Saves of `layer` and loads of the layers after it may run once `event` fired."""

    step: StepState
    layer: int
    event: DeviceEvent | None
    phase: Phase


@dataclass(slots=True, eq=False)
class LayerWanted:
    """Also coordinator -> group. The compute thread waits for the loads of `layer`."""

    step: StepState
    layer: int
    event: DeviceEvent | None


@dataclass(slots=True, eq=False)
class EndStep:
    step: StepState
    event: DeviceEvent | None


@dataclass(slots=True, eq=False)
class AbortStep:
    step: StepState
    reason: str


@dataclass(slots=True, eq=False)
class LoadBlocks:
    """Loads blocks outside any step; answered by `LoadDone`, whose latch is `step.ended`."""

    step: StepState
    request: StepRequest
    event: DeviceEvent | None


@dataclass(slots=True, eq=False)
class ReleaseRequest:
    request_id: str
    reason: ReleaseReason
    released: Latch


@dataclass(slots=True, eq=False)
class ForgetRequest:
    """Also coordinator -> group. Drops the memory of committed keys and ends this life of the request id."""

    request_id: str


@dataclass(slots=True, eq=False)
class Lookup:
    """`run` asks the store and decides, on a transfer worker; `answer` takes the result, or the error."""

    run: Callable[[Store], Any]
    answer: Callable[[Any, BaseException | None], None]
    deadline_s: float


@dataclass(slots=True, eq=False)
class Drain:
    deadline_s: float
    drained: Latch
    left: list[str] = field(default_factory=list)


# -- coordinator -> group ----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PrepareGroup:
    """Blocks of one group: per request its id, hashes of the group's blocks, and block lists."""

    step: StepState
    requests: Sequence[tuple[str, Sequence[bytes], GroupBlocks]]
    event: DeviceEvent | None
    saves: frozenset[str]
    """requests that may save (not tainted)"""


@dataclass(slots=True, eq=False)
class Activate:
    step: StepState


@dataclass(slots=True, eq=False)
class Rollback:
    step: StepState
    reason: str


@dataclass(slots=True, eq=False)
class EndGroup:
    """The step is over; with `revoke`, every put of it is revoked and loads that did not start never will."""

    step: StepState
    revoke: bool
    reason: str = ""


@dataclass(slots=True, eq=False)
class Taint:
    """A load of a request failed: its puts from `layer` on are revoked, its later loads are skipped (I12)."""

    step: StepState
    request_id: str
    layer: int


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
    step: StepState
    group_id: int


@dataclass(slots=True, eq=False)
class PrepareFailed:
    step: StepState
    group_id: int
    reason: str


@dataclass(slots=True, eq=False)
class LayerLoaded:
    """All loads of the group on `layer` have ended (whether or not they succeeded)."""

    step: StepState
    group_id: int
    layer: int


@dataclass(slots=True, eq=False)
class LoadFailed:
    step: StepState
    group_id: int
    failure: FailedLoad


@dataclass(slots=True, eq=False)
class GroupEnded:
    """No transfer of the step is under way in the group, and no put session of it is `open`."""

    step: StepState
    group_id: int


@dataclass(slots=True, eq=False)
class GroupCommitted:
    """Every session of the step in the group reached its end."""

    step: StepState
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
class Job:
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
    step: StepState | None = None
    layer: int = -1
    distance: int = 0
    event: DeviceEvent | None = None
    settled: Callable[[list[Outcome]], None] | None = None
    epoch: int = -1

    @property
    def count(self) -> int:
        """How many outcomes the call answers with."""
        raise NotImplementedError  # every message below says its own

    @property
    def label(self) -> str:
        return type(self).__name__.lower()


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer(Job):
    """Moves ranges. `oldest_s` is when the oldest session in it was opened (or renewed), on the engine's clock."""

    kind: Kind
    batch: RangeBatch
    call: Any
    owner: Any
    object_bytes: int
    oldest_s: float

    @property
    def count(self) -> int:
        return len(self.batch.keys)

    @property
    def label(self) -> str:
        return f"{self.kind.value} ranges"


@dataclass(slots=True, eq=False, kw_only=True)
class Open(Job):
    kind: Kind
    keys: Sequence[str]
    sizes: Sequence[int]
    owner: Any

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def label(self) -> str:
        return f"{self.kind.value} open"


@dataclass(slots=True, eq=False, kw_only=True)
class Commit(Job):
    keys: Sequence[str]
    owner: Any

    @property
    def count(self) -> int:
        return len(self.keys)


@dataclass(slots=True, eq=False, kw_only=True)
class Revoke(Job):
    keys: Sequence[str]
    cause: str
    owner: Any

    @property
    def count(self) -> int:
        return len(self.keys)


@dataclass(slots=True, eq=False, kw_only=True)
class Close(Job):
    keys: Sequence[str]
    owner: Any

    @property
    def count(self) -> int:
        return len(self.keys)


@dataclass(slots=True, eq=False, kw_only=True)
class Ask(Job):
    """A question to the store that opens nothing: readable, health, lookup. `result` holds the answer."""

    run: Callable[[Store], Any]
    owner: Any = None
    result: Any = None

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


@dataclass(slots=True, eq=False)
class StoreLost:
    """Pool -> coordinator: a call answered that the master is gone (`unreachable`), or that it lost our sessions."""

    epoch: int
    unreachable: bool
    cause: str


@dataclass(slots=True, eq=False)
class LoadDone:
    """Coordinator -> caller of `LoadBlocks`: what failed, if anything."""

    request_id: str
    failure: FailedLoad | None
    fenced_blocks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
