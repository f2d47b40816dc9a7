"""Whether the store can be reached: opens the circuit when a call said it cannot, probes it, closes it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvactors.actors.mailbox import Mailbox
from kvactors.actors.pool import TransferPool
from kvactors.core.circuit import Circuit
from kvactors.core.queue import Priority
from kvactors.core.stats import EngineStats
from kvactors.core.store import Health, Store
from kvactors.log import get_logger
from kvactors.messages import Ask, TransferDone

log = get_logger("kvactors.store")


class ProbeNow:
    """Timer to the coordinator: ask the store whether it answers again."""


@dataclass(slots=True)
class ProbeDone:
    done: TransferDone


class StoreWatch:
    """The circuit of one engine, and its probes."""

    def __init__(
        self,
        probe_interval_s: float,
        pool: TransferPool,
        stats: EngineStats,
        mailbox: Mailbox[Any],
        later: Callable[[float, Any], Any],
    ) -> None:
        self.circuit = Circuit(probe_interval_s)
        self._pool, self._stats, self._mailbox, self._later = pool, stats, mailbox, later

    def unreachable(self) -> None:
        """A call answered that the store is gone."""
        if self.circuit.trip():
            self._stats.circuit = self.circuit.state
            self._later(self.circuit.next_probe_s(), ProbeNow())

    def probe(self) -> None:
        self._mailbox.reserve()
        self._pool.submit(
            Ask(reply=lambda done: self._mailbox.post(ProbeDone(done)), priority=Priority.DEMANDED, run=_health, what="health")
        )

    def probed(self, done: TransferDone) -> None:
        if done.late:
            return
        self._mailbox.replied()
        answer = done.job.result if isinstance(done.job, Ask) else None
        self.circuit.probed(isinstance(answer, Health) and answer.ok)
        self._stats.circuit = self.circuit.state
        if self.circuit.is_open:
            self._later(self.circuit.next_probe_s(), ProbeNow())
        else:
            log.info("the store answers again")


def _health(store: Store) -> Health:
    return store.health()
