"""The prefill/decode hand-off in one worker rank: does what a step's plan says, and tells at its end what is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvactors.core.layout import KVLayout
from kvactors.disagg.blocks import NULL_BLOCK, RequestBlocks
from kvactors.disagg.geometry import WorkerGeometry
from kvactors.disagg.messages import Outcome, OutcomeKind
from kvactors.log import get_logger
from kvactors.vllm.handoff_blocks import real_ids
from kvactors.vllm.messages import HandoffPlan, Pull, WorkerReport

if TYPE_CHECKING:
    from kvactors.disagg.worker import HandoffWorker

log = get_logger("kvactors.vllm.handoff", burst=10)

IDLE_WAIT_S = 0.01
"""How long a step that computes nothing waits for a hand-off to end. While blocks are held vLLM steps as fast as it can."""


@dataclass(slots=True)
class Counters:
    """Since the start; the names are those of the statistics."""

    handoff_received: int = 0
    handoff_received_bytes: int = 0
    handoff_failed: int = 0
    handoff_fenced_blocks: int = 0


class HandoffSide:
    """See the module.

    Args:
        worker: its own end of the hand-off; closed here.
        geometry, layout: of this rank's caches.
        early: pulls may begin before the forward pass of their step, because no device is still at work on their blocks.
    """

    def __init__(self, worker: HandoffWorker, geometry: WorkerGeometry, layout: KVLayout, *, early: bool) -> None:
        self.layout = layout
        self._worker, self._early = worker, early
        self._block_bytes = [sum(e.payload_bytes for entries in g.layers.values() for e in entries) for g in geometry.groups]
        self.counters = Counters()
        self._held: dict[str, str] = {}
        """transfer id -> prefill's own request id"""
        self._pulls: dict[str, Pull] = {}
        """by name, until they are reported"""
        self._fenced: dict[str, Pull] = {}
        """reported failed, and a late write may still come into their blocks"""
        self._late: list[Pull] = []
        self._idle = False
        self._moved = False

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, plan: HandoffPlan, *, runs: bool) -> None:
        """The step's plan is here. `runs`: it computes something."""
        self._start_pulls()
        self._idle, self._moved = not runs, self._moved or bool(plan)
        for transfer_id in plan.requests:
            self._worker.request(transfer_id)
        for held in plan.prefilled:
            self._held[held.transfer_id] = held.request_id
            self._worker.prefilled(held.transfer_id, held.blocks)
        for transfer_id, reason in plan.cancelled:
            self._worker.cancel(transfer_id, reason)
        self._late = list(plan.pulls)
        if self._early:
            self._start_pulls()
        for name, reason in plan.given_up:
            if name in self._pulls:  # else it is over, and the report of it is on its way
                self._worker.give_up(name, reason)

    def start_loads(self) -> None:
        """The forward pass is on its way: pulls may begin."""
        self._start_pulls()

    def _start_pulls(self) -> None:
        pulls, self._late = self._late, []
        for pull in pulls:
            if not pull.blocks.empty:
                self._pulls[pull.name] = pull
            self._worker.receive(pull.name, pull.source, pull.blocks)

    # -- what is reported ----------------------------------------------------------------------------------------------

    def finished(self, report: WorkerReport) -> tuple[set[str], set[str], set[str]]:
        """Request ids whose blocks are vLLM's again after sending, whose pulls are over, and of these those that failed.

        A pull that fails while its blocks may still be written puts them into `report`, which vLLM's scheduler reads before it
        frees them.
        """
        if self._idle and self._worker.pending:
            self._worker.wait(IDLE_WAIT_S)
        sent = {self._held.pop(t) for t in self._worker.freed() if t in self._held}
        received: set[str] = set()
        failed: set[str] = set()
        for outcome in self._worker.outcomes():
            self._note(outcome, report, received, failed)
        self._moved = self._moved or bool(sent or received)
        return sent, received, failed

    def _note(self, outcome: Outcome, report: WorkerReport, received: set[str], failed: set[str]) -> None:
        name = outcome.request_id
        if outcome.kind is OutcomeKind.RETURNED:
            if (fenced := self._fenced.pop(name, None)) is not None:
                report.returned.update(_count(fenced.blocks))
            return
        pull = self._pulls.pop(name, None)
        if pull is None:
            log.error("a hand-off was told twice, or never asked for", request=name, outcome=outcome.kind.value)
            return
        received.add(pull.request_id)
        if outcome.kind is OutcomeKind.LOADED:
            self.counters.handoff_received += 1
            self.counters.handoff_received_bytes += self._bytes(pull.blocks)
        if outcome.kind is not OutcomeKind.FAILED:
            return
        log.warning("a hand-off failed", request=pull.request_id, reason=outcome.reason, fenced=outcome.fenced)
        failed.add(pull.request_id)
        self.counters.handoff_failed += 1
        if outcome.fenced:
            blocks = _count(pull.blocks)
            self._fenced[name] = pull
            self.counters.handoff_fenced_blocks += len(blocks)
            report.held.update(blocks)

    def _bytes(self, blocks: RequestBlocks) -> int:
        """What was asked for, on this rank."""
        return _weigh(blocks, self._block_bytes)

    # -- both ----------------------------------------------------------------------------------------------------------

    def take_moved(self) -> bool:
        """Whether anything began or ended since the last call."""
        moved, self._moved = self._moved, False
        return moved

    def totals(self) -> dict[str, float]:
        """The counters since the start."""
        totals: dict[str, float] = asdict(self.counters)
        if (sent := self._worker.sent) is not None:
            totals |= {
                "handoff_sent": sent.sends,
                "handoff_sent_bytes": sent.bytes,
                "handoff_expired": sent.expired,
            }
        return totals

    def close(self) -> None:
        self._worker.close()


def _count(blocks: RequestBlocks) -> Counter[int]:
    return Counter(real_ids(blocks))


def _weigh(blocks: RequestBlocks, block_bytes: Sequence[int]) -> int:
    return sum(
        size * sum(1 for i in group.ids if i != NULL_BLOCK) for group, size in zip(blocks.groups, block_bytes, strict=True)
    )
