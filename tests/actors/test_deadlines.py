"""What the pool answers by itself, on virtual time: jobs that nobody takes, and calls of an earlier life of the master."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvactors.core.store import Outcome
from tests.actors.test_joined_calls import GET, Desk, on_a_desk


async def at(desk: Desk, seconds: float) -> None:
    """Lets time pass until then."""
    passed = desk.loop.create_future()
    desk.loop.call_at(seconds, passed.set_result, None)
    await passed


def test_a_job_that_no_worker_takes_is_answered_at_its_deadline() -> None:
    async def body(desk: Desk) -> None:
        await at(desk, 1.0)
        [job] = desk.submit(0)
        await at(desk, 10.9)
        assert desk.answered == []
        await at(desk, 11.1)
        assert [(done.job, done.outcomes[0]) for done in desk.answered] == [(job, Outcome.NOT_STARTED)]

    on_a_desk(body, call_deadline_s=6.0, step_deadline_s=10.0)


def test_what_waits_for_the_last_worker_fails_as_soon_as_it_is_lost() -> None:
    async def body(desk: Desk) -> None:
        jobs = desk.submit(0, 2, 4, way=GET)
        under_way = [desk.pool.take(worker) for worker in desk.hands.workers]
        await at(desk, 6.1)
        lost, unmade = [Outcome.LOST] * 2, [Outcome.NOT_STARTED] * 2
        assert [done.job for done in desk.answered] == [*under_way, jobs[2]] == jobs
        assert [done.outcomes for done in desk.answered] == [lost, lost, unmade]

    on_a_desk(body, good=0, workers=1, max_lost_workers=0, call_deadline_s=6.0, step_deadline_s=60.0)


@pytest.mark.parametrize("outcome", [Outcome.NOT_FOUND, Outcome.UNREACHABLE])
def test_a_master_is_lost_once_however_many_calls_say_so(outcome: Outcome) -> None:
    """I11: what was opened after the first of them said so is not void."""

    def body(desk: Desk) -> None:
        desk.submit(0, 2)
        desk.store.answers["0/1/0"] = outcome
        taken = [(worker, desk.pool.take(worker)) for worker in desk.hands.workers[:2]]
        for worker, done in [(worker, desk.pool.call(job)) for worker, job in taken if job is not None]:
            desk.pool.finish(worker, done)
        assert len(desk.answered) == 2
        assert desk.pool.epoch == 1

    on_a_desk(body, good=0)


def test_a_renewed_lease_counts_from_the_call_that_renewed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: when its answer takes longer than the lease, what is read then may be another object's."""

    def body(desk: Desk) -> None:
        def slow(keys: Sequence[str], _sizes: Sequence[int]) -> list[Outcome]:
            desk.loop._now += desk.store.lease_s + 1
            return [Outcome.OK] * len(keys)

        monkeypatch.setattr(desk.store, "get_open", slow)
        [job] = desk.submit(0, way=GET)
        job.oldest_s -= 0.6 * desk.store.lease_s
        desk.work()
        assert [done.outcomes for done in desk.answered] == [[Outcome.LEASE_EXPIRED] * 2]

    on_a_desk(body)
