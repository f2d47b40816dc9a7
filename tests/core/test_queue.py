"""Which transfer goes next."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvactors.core.circuit import Circuit
from kvactors.core.queue import Priority, TransferQueue


@dataclass(eq=False)
class Job:
    name: str
    priority: Priority
    distance: int = 0


def queue(*jobs: Job) -> TransferQueue[Job]:
    q: TransferQueue[Job] = TransferQueue()
    for job in jobs:
        q.push(job)
    return q


def order(q: TransferQueue[Job], loads_only: bool = False) -> str:
    names = ""
    while (job := q.pop(loads_only)) is not None:
        names += job.name
    return names


def jobs() -> list[Job]:
    return [
        Job("c", Priority.COMMIT),
        Job("s", Priority.SAVE),
        Job("o", Priority.PUT_OPEN),
        Job("3", Priority.PREFETCH, 3),
        Job("1", Priority.PREFETCH, 1),
        Job("d", Priority.DEMANDED),
        Job("2", Priority.PREFETCH, 1),
        Job("e", Priority.DEMANDED),
    ]


def test_loads_first_then_opens_saves_commits() -> None:
    assert order(queue(*jobs())) == "de123osc"


def test_a_loads_only_worker_never_takes_a_save() -> None:
    q = queue(*jobs())
    assert order(q, loads_only=True) == "de123"
    assert order(q) == "osc"


def test_a_wanted_prefetch_goes_before_the_others() -> None:
    q = queue(*jobs())
    q.promote(lambda job: job.distance == 3)
    assert order(q) == "de312osc"


def test_jobs_can_be_taken_out() -> None:
    q = queue(*jobs())
    assert len(q) == 8
    assert q.peak == 8
    gone = q.remove(lambda job: job.name in "s1d")
    assert sorted(job.name for job in gone) == ["1", "d", "s"]
    assert q.remove(lambda _: False) == []
    assert order(q) == "e23oc"


@pytest.mark.parametrize("gone", "0123456")
def test_the_order_of_prefetches_outlives_a_removal(gone: str) -> None:
    q = queue(*(Job(str(d), Priority.PREFETCH, d) for d in (3, 0, 6, 2, 5, 1, 4)))
    assert [job.name for job in q.remove(lambda job: job.name == gone)] == [gone]
    assert order(q) == "0123456".replace(gone, "")


def test_the_circuit_opens_once_and_probes_ever_less_often() -> None:
    closed = []
    circuit = Circuit(1.0, on_close=lambda: closed.append(True))
    circuit.probed(True)
    assert not closed
    assert circuit.trip()
    assert not circuit.trip(), "it is open already"
    assert circuit.state == "open"
    assert [circuit.next_probe_s() for _ in range(5)] == [1, 2, 4, 8, 8]
    circuit.probed(False)
    assert circuit.is_open
    circuit.probed(True)
    assert closed == [True]
    assert circuit.state == "closed"
    assert circuit.trip()
    assert circuit.next_probe_s() == 1
