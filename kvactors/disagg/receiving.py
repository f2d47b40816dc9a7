"""One request on a decode worker: what happens to it goes in, what to do comes out. No I/O and no clock in here.

Its destination blocks go back to the engine by exactly one `RETURN`, and not before the last prefill worker that may write has
settled; until then they are fenced, however long ago the request failed. That it failed is told at once (`FAIL`), so that the
engine computes it again, or fails it, in time; whoever drives this sees to it that this happens in other blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from kvactors.disagg.states import (
    PEER_MAY_WRITE,
    PEER_TERMINAL,
    PEER_TRANSITIONS,
    RECEIVE_FENCED,
    RECEIVE_TERMINAL,
    RECEIVE_TRANSITIONS,
    PeerEvent,
    PeerState,
    ReceiveEvent,
    ReceiveState,
    Worker,
    walk,
)
from kvactors.errors import TransferPlanError


class ReceiveAction(Enum):
    ABORT = "abort"
    """Tell the prefill worker to stop, and to acknowledge; to one that was never asked, so that it frees its blocks."""
    FAIL = "fail"
    """Tell the engine that the request failed; its blocks are not to be used before `RETURN`."""
    RETURN = "return"
    """Give the blocks back to the engine: loaded, failed or aborted, as the record's state says. Unless `FAIL` came before,
    this is also when the engine is told."""


class ReceiveInstruction(NamedTuple):
    """One thing to do; `worker` is None for what concerns the request as a whole."""

    action: ReceiveAction
    worker: Worker | None = None


class Receiving:
    """A request on one decode worker.

    Attributes:
        request_id: the engine's.
        empty: there is nothing to receive; the pulls only let prefill free its blocks, and no blocks are returned.
        state: see `states.py`.
        peers: what each prefill worker that it pulls from is to it.
        reason: why it failed or was aborted, as first said.
        late: messages of prefill workers that came too late or twice; they change nothing.

    Args:
        workers: the prefill workers to pull from: of every stage, `TpMap.pulls`.

    Raises:
        TransferPlanError: there are no workers.
    """

    __slots__ = ("empty", "late", "peers", "reason", "request_id", "state")

    def __init__(self, request_id: str, workers: Iterable[Worker], *, empty: bool = False) -> None:
        self.request_id = request_id
        self.empty = empty
        self.state = ReceiveState.RELEASING if empty else ReceiveState.CONNECTING
        self.peers = dict.fromkeys(workers, PeerState.IDLE)
        self.reason = ""
        self.late = 0
        if not self.peers:
            raise TransferPlanError(f"request {request_id}: there is no prefill worker to pull from; give at least one")

    @property
    def may_be_written(self) -> bool:
        """Whether a prefill worker may still write into the blocks."""
        return not self.empty and any(state in PEER_MAY_WRITE for state in self.peers.values())

    @property
    def unsettled(self) -> list[Worker]:
        """Prefill workers that were asked and have not settled: whose abort to repeat, or whose connection to end."""
        return [worker for worker, state in self.peers.items() if state in PEER_MAY_WRITE]

    # -- from this side ----------------------------------------------------------------------------------------------

    def ask(self, worker: Worker) -> None:
        """A pull is about to be sent to the worker: from now on it may write.

        Raises:
            HandoffStateError: it was asked before, or the request is failing or over; the pull must not be sent.
        """
        after = walk(RECEIVE_TRANSITIONS, self.state, ReceiveEvent.ASK, f"request {self.request_id}")
        self._move_peer(worker, PeerEvent.ASK)
        self.state = after

    def fail(self, reason: str) -> list[ReceiveInstruction]:
        """It cannot succeed any more: the deadline passed, the handshake was refused. Nothing if it is failing or over."""
        if self.state in RECEIVE_FENCED or self.state in RECEIVE_TERMINAL:
            return []
        return self._end(ReceiveEvent.FAIL, reason)

    def abort(self, reason: str) -> list[ReceiveInstruction]:
        """The engine gave the request up. Nothing if it is over, or if the pulls are empty: prefill is freed all the same."""
        if (self.state, ReceiveEvent.ABORT) not in RECEIVE_TRANSITIONS:
            return []
        return self._end(ReceiveEvent.ABORT, reason)

    # -- from prefill workers ----------------------------------------------------------------------------------------

    def reported(self, worker: Worker) -> list[ReceiveInstruction]:
        """The worker wrote all that it was asked for."""
        return self._heard(worker, PeerEvent.REPORT, "")

    def refused(self, worker: Worker, reason: str) -> list[ReceiveInstruction]:
        """The worker says that it sent nothing and will send nothing."""
        return self._heard(worker, PeerEvent.REFUSE, reason)

    def failed(self, worker: Worker, reason: str) -> list[ReceiveInstruction]:
        """The worker's transfer failed, and may still write."""
        return self._heard(worker, PeerEvent.REFUSE if self.empty else PeerEvent.FAILED, reason)

    def acknowledged(self, worker: Worker) -> list[ReceiveInstruction]:
        """The worker stopped: no write follows."""
        return self._heard(worker, PeerEvent.ACKNOWLEDGE, "prefill stopped")

    def dead(self, worker: Worker, reason: str) -> list[ReceiveInstruction]:
        """The connection to the worker is known to be dead: no write can come over it any more."""
        return self._heard(worker, PeerEvent.DEAD, reason)

    # ----------------------------------------------------------------------------------------------------------------

    def _heard(self, worker: Worker, event: PeerEvent, reason: str) -> list[ReceiveInstruction]:
        if (self.peers.get(worker), event) not in PEER_TRANSITIONS:
            self.late += 1
            return []
        after = self._move_peer(worker, event)
        if self.state in (ReceiveState.CONNECTING, ReceiveState.PULLING) and after is not PeerState.REPORTED:
            return self._end(ReceiveEvent.FAIL, reason)
        return self._settle()

    def _end(self, event: ReceiveEvent, reason: str) -> list[ReceiveInstruction]:
        told = self.state in RECEIVE_FENCED
        self._move(event)
        self.reason = self.reason or reason
        if told or self.empty:
            return []
        unsettled = [w for w, state in self.peers.items() if state not in PEER_TERMINAL]
        aborts = [ReceiveInstruction(ReceiveAction.ABORT, worker) for worker in unsettled]
        back = [ReceiveInstruction(ReceiveAction.RETURN)] if self.state in RECEIVE_TERMINAL else self._settle()
        fenced = not back and event is ReceiveEvent.FAIL
        return [ReceiveInstruction(ReceiveAction.FAIL)] * fenced + aborts + back

    def _settle(self) -> list[ReceiveInstruction]:
        states = set(self.peers.values())
        if self.state is ReceiveState.RELEASING:
            if states <= PEER_TERMINAL:
                self._move(ReceiveEvent.SETTLED)
            return []
        if self.state is ReceiveState.PULLING and states == {PeerState.REPORTED}:
            self._move(ReceiveEvent.LOADED)
        elif self.state in RECEIVE_FENCED and not states & PEER_MAY_WRITE:
            self._move(ReceiveEvent.SETTLED)
        else:
            return []
        return [ReceiveInstruction(ReceiveAction.RETURN)]

    def _move(self, event: ReceiveEvent) -> None:
        self.state = walk(RECEIVE_TRANSITIONS, self.state, event, f"request {self.request_id}")

    def _move_peer(self, worker: Worker, event: PeerEvent) -> PeerState:
        state = self.peers.get(worker)
        if state is None:
            raise TransferPlanError(
                f"request {self.request_id}: prefill worker {tuple(worker)} is none of its {len(self.peers)}"
            )
        after = self.peers[worker] = walk(PEER_TRANSITIONS, state, event, f"{self.request_id}, prefill worker {tuple(worker)}")
        return after
