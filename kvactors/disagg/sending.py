"""One request on a prefill worker: what happens to it goes in, what to do comes out. No I/O and no clock in here.

Blocks are held from `prefilled` on and given back by exactly one `FREE`, whatever happens. Whoever drives this sees to two
things. It calls `expire` when the time is up: for an `awaited` record after the life of an orphan, for a `held` one after the
abort timeout. And it says that a send has ended only when none of its bytes can follow any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvactors.disagg.states import (
    PULL_RUNNING,
    PULL_TERMINAL,
    PULL_TRANSITIONS,
    SEND_TERMINAL,
    SEND_TRANSITIONS,
    PullEvent,
    PullState,
    SendEvent,
    SendState,
    Worker,
    walk,
)
from kvactors.errors import HandoffStateError


class SendAction(Enum):
    SEND = "send"
    """Plan and send to the worker; answer with `sent`, `failed` or `refused`."""
    REPORT = "report"
    """Tell the worker that all it asked for was written."""
    FAIL = "fail"
    """Tell the worker that its transfer failed; it has to abort before its blocks are safe."""
    REFUSE = "refuse"
    """Tell the worker that nothing was or will be sent."""
    ACKNOWLEDGE = "acknowledge"
    """Tell the worker that no write follows."""
    FREE = "free"
    """Give the request's blocks back to the engine."""


class SendInstruction(NamedTuple):
    """One thing to do; `worker` is None for what concerns the request as a whole."""

    action: SendAction
    worker: Worker | None = None
    reason: str = ""


@dataclass(slots=True, eq=False)
class Sending:
    """A request on one prefill worker, known by its transfer id; made when the request or a decode worker first names it.

    Attributes:
        expected: decode workers that will pull (`heads.expected_pulls`), once one has said so.
        pulls: what each decode worker that spoke is to the request.
    """

    transfer_id: str
    state: SendState = SendState.AWAITED
    expected: int | None = None
    pulls: dict[Worker, PullState] = field(default_factory=dict)

    @property
    def may_expire(self) -> bool:
        """Whether `expire` is legal now: never while a send runs, nor while the engine still computes the request."""
        return (self.state, SendEvent.EXPIRE) in SEND_TRANSITIONS

    # -- from the engine ---------------------------------------------------------------------------------------------

    def request(self) -> list[SendInstruction]:
        """The request came to this worker."""
        self._move(SendEvent.REQUEST)
        return []

    def prefilled(self) -> list[SendInstruction]:
        """Its prompt is computed; from here on the blocks are held for decode."""
        self._move(SendEvent.PREFILLED)
        out: list[SendInstruction] = []
        for worker, state in list(self.pulls.items()):
            if state is PullState.QUEUED:
                out += self._start(worker)
        return out + self._settle()

    def cancel(self, reason: str) -> list[SendInstruction]:
        """The engine ended the request before it was computed; it has the blocks itself."""
        self._move(SendEvent.CANCEL)
        return self._refuse_queued(reason)

    def expire(self, reason: str) -> list[SendInstruction]:
        """Its time is up; see `may_expire`."""
        held = self.state is SendState.HELD
        self._move(SendEvent.EXPIRE)
        return self._refuse_queued(reason) + ([SendInstruction(SendAction.FREE)] if held else [])

    # -- from decode workers -----------------------------------------------------------------------------------------

    def pull(self, worker: Worker, pullers: int) -> list[SendInstruction]:
        """A decode worker asks for its part, empty or not, and says how many of them will; a second pull changes nothing."""
        known = self.pulls.get(worker)
        if known is PullState.REPORTED:
            return [SendInstruction(SendAction.REPORT, worker)]
        if known is PullState.QUEUED or known in PULL_RUNNING:
            return []
        if known is not None:
            return [SendInstruction(SendAction.REFUSE, worker, f"its earlier pull is {known.value}")]
        if self.state in SEND_TERMINAL:
            return [SendInstruction(SendAction.REFUSE, worker, f"the request is {self.state.value}")]
        if (problem := self._count(pullers)) is not None:
            return [SendInstruction(SendAction.REFUSE, worker, problem)]
        self.pulls[worker] = PullState.QUEUED
        return self._start(worker) if self.state in (SendState.HELD, SendState.SENDING) else []

    def abort(self, worker: Worker, pullers: int) -> list[SendInstruction]:
        """A decode worker gives up its part, or is known to be dead; acknowledged as soon as nothing is being sent to it."""
        known = self.pulls.get(worker)
        if self.state in SEND_TERMINAL or known in PULL_TERMINAL:
            return [SendInstruction(SendAction.ACKNOWLEDGE, worker)]
        if known is PullState.STOPPING:
            return []
        if known is None:
            if self._count(pullers) is not None:
                return [SendInstruction(SendAction.ACKNOWLEDGE, worker)]
            self.pulls[worker] = PullState.QUEUED
        if self._move_pull(worker, PullEvent.ABORT) is PullState.STOPPING:
            return []
        return [SendInstruction(SendAction.ACKNOWLEDGE, worker), *self._settle()]

    # -- from the transport ------------------------------------------------------------------------------------------

    def sent(self, worker: Worker) -> list[SendInstruction]:
        """All the worker asked for was written; also when that was nothing."""
        return self._ended(worker, PullEvent.SENT, "")

    def failed(self, worker: Worker, reason: str) -> list[SendInstruction]:
        """The transfer failed; some of it may have been written."""
        return self._ended(worker, PullEvent.FAILED, reason)

    def refused(self, worker: Worker, reason: str) -> list[SendInstruction]:
        """Nothing was sent: the blocks of the two sides do not match."""
        return self._ended(worker, PullEvent.REFUSE, reason)

    # ----------------------------------------------------------------------------------------------------------------

    def _ended(self, worker: Worker, event: PullEvent, reason: str) -> list[SendInstruction]:
        if self.pulls.get(worker) not in PULL_RUNNING:
            raise HandoffStateError(f"{self._what(worker)}: {event.value!r} is not legal where nothing is being sent to it")
        answer = {
            PullState.REPORTED: SendAction.REPORT,
            PullState.FAILED: SendAction.FAIL,
            PullState.REFUSED: SendAction.REFUSE,
            PullState.ABORTED: SendAction.ACKNOWLEDGE,
        }[self._move_pull(worker, event)]
        if not any(state in PULL_RUNNING for state in self.pulls.values()):
            self._move(SendEvent.IDLE)
        return [SendInstruction(answer, worker, reason), *self._settle()]

    def _start(self, worker: Worker) -> list[SendInstruction]:
        self._move(SendEvent.SEND)
        self._move_pull(worker, PullEvent.START)
        return [SendInstruction(SendAction.SEND, worker)]

    def _settle(self) -> list[SendInstruction]:
        states = self.pulls.values()
        if self.state is not SendState.HELD or len(states) != self.expected or not PULL_TERMINAL.issuperset(states):
            return []
        self._move(SendEvent.REPORTED if set(states) == {PullState.REPORTED} else SendEvent.ABORTED)
        return [SendInstruction(SendAction.FREE)]

    def _refuse_queued(self, reason: str) -> list[SendInstruction]:
        queued = [worker for worker, state in self.pulls.items() if state is PullState.QUEUED]
        for worker in queued:
            self._move_pull(worker, PullEvent.REFUSE)
        return [SendInstruction(SendAction.REFUSE, worker, reason) for worker in queued]

    def _count(self, pullers: int) -> str | None:
        """Why one more decode worker cannot be taken in, if so."""
        expected = pullers if self.expected is None else self.expected
        if pullers != expected or len(self.pulls) >= expected:
            return f"{pullers} workers are said to pull; {expected} are expected and {len(self.pulls)} spoke already"
        self.expected = expected
        return None

    def _move(self, event: SendEvent) -> None:
        self.state = walk(SEND_TRANSITIONS, self.state, event, f"transfer {self.transfer_id}")

    def _move_pull(self, worker: Worker, event: PullEvent) -> PullState:
        after = self.pulls[worker] = walk(PULL_TRANSITIONS, self.pulls[worker], event, self._what(worker))
        return after

    def _what(self, worker: Worker) -> str:
        return f"transfer {self.transfer_id}, decode worker {tuple(worker)}"
