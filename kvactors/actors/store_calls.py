"""The store call that belongs to a job, and how old its sessions may be for it.

Runs on the workers, and keeps nothing: whether a job may still run, and what its outcomes mean, is the pool's business.
"""

from __future__ import annotations

from kvactors.actors.audit import AuditedStore
from kvactors.core.answers import reason
from kvactors.core.clock import Clock
from kvactors.core.store import Outcome, Store
from kvactors.errors import StoreCallError, StoreUnreachableError
from kvactors.log import get_logger
from kvactors.messages import Ask, Close, Commit, Job, Kind, Open, Revoke, Transfer

log = get_logger("kvactors.pool")


class StoreCalls:
    """Makes the calls of jobs on a store; `audit` is that store where calls are watched."""

    def __init__(self, store: Store, clock: Clock, audit: AuditedStore | None) -> None:
        self._store, self._clock, self._audit = store, clock, audit

    def make(self, job: Job, epoch: int) -> tuple[list[Outcome], BaseException | None]:
        """Makes the job's call under a life of the store's master.

        Returns:
            an outcome for each key, and what was raised, if anything was: that is an outcome too, for a worker outlives it.
        """
        count = job.count
        if self._audit is not None:
            self._audit.begin(epoch)
        if 0 <= job.epoch != epoch:
            return [Outcome.STALE] * count, None
        try:
            outcomes = self._dispatch(job)
        except StoreUnreachableError as e:
            return [Outcome.UNREACHABLE] * count, e
        except BaseException as e:
            log.warning("store call failed", call=job.label, group=job.group_id, error=reason(e))
            return [Outcome.CALL_FAILED] * count, e
        if len(outcomes) != count:
            return [Outcome.CALL_FAILED] * count, StoreCallError(f"{job.label}: {len(outcomes)} answers for {count} keys")
        return outcomes, None

    def _dispatch(self, job: Job) -> list[Outcome]:
        store = self._store
        match job:
            case Transfer(kind=Kind.PUT):
                return self._put(job)
            case Transfer(kind=Kind.GET):
                return self._get(job)
            case Open(kind=kind):
                keys = [s.key for s in job.sessions]
                call = store.put_open if kind is Kind.PUT else store.get_open
                return call(keys, [job.object_bytes] * len(keys))
            case Commit():
                return store.put_commit([s.key for s in job.sessions])
            case Revoke():
                return store.put_revoke([s.key for s in job.sessions])
            case Close():
                return store.get_close([s.key for s in job.sessions])
            case Ask():
                job.result = job.run(store)
                return [Outcome.OK]
            case _:
                raise TypeError(f"no store call belongs to {job!r}")

    def _put(self, job: Transfer) -> list[Outcome]:
        """Range writes of sessions near the store's discard timeout could land in another object (I11): not made."""
        if self._clock.now() - job.oldest_s > self._store.put_safe_age_s:
            return [Outcome.STALE] * job.count
        return self._store.put_ranges(job.call.batch)

    def _get(self, job: Transfer) -> list[Outcome]:
        """Renews leases that are half gone, and refuses what came in after the lease: its bytes may be another object's."""
        store, batch = self._store, job.call.batch
        gone: dict[str, Outcome] = {}
        if self._clock.now() - job.oldest_s > store.lease_s / 2:
            keys = list(dict.fromkeys(batch.keys))
            renewed_at = self._clock.now()
            answers = store.get_open(keys, [job.object_bytes] * len(keys))
            gone = {k: o for k, o in zip(keys, answers, strict=True) if o is not Outcome.OK}
            for each in (job, *job.parts):
                each.oldest_s = renewed_at
        outcomes = store.get_ranges(batch)
        if self._clock.now() - job.oldest_s > store.lease_s:
            return [Outcome.LEASE_EXPIRED] * job.count
        if gone and len(outcomes) == len(batch.keys):
            return [gone.get(k, o) for k, o in zip(batch.keys, outcomes, strict=True)]
        return outcomes
