"""Loads between steps: started with a plan, looked after at the end of every step, reported once each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvactors.core.clock import Clock
from kvactors.core.steps import NULL_BLOCK, GroupBlocks, ReleaseReason, StepRequest
from kvactors.engine import BlockingEngine, Load
from kvactors.log import get_logger
from kvactors.vllm.messages import Life, LoadPlan, WorkerReport

log = get_logger("kvactors.vllm.loads", burst=10)


@dataclass(slots=True)
class Waiting:
    """The load of one life.

    Attributes:
        handle: the engine's load, which all loads of its step share; None: it could not be made.
        told: its request was reported, its blocks are held.
    """

    plan: LoadPlan
    handle: Load | None
    began_s: float
    told: bool = False

    @property
    def over(self) -> bool:
        return self.handle is None or self.handle.done


class LoadsBetween:
    """See the module.

    Args:
        deadline_s: a load that takes longer is reported failed; its blocks are held until its store calls have returned.
        several_groups: failures are told by request, not by block.
    """

    def __init__(self, engine: BlockingEngine, clock: Clock, deadline_s: float, *, several_groups: bool) -> None:
        self._block_tokens = {g.id: g.block_tokens for g in engine.layout.groups}
        self._engine, self._clock, self._deadline_s, self._several = engine, clock, deadline_s, several_groups
        self._waiting: dict[Life, Waiting] = {}
        self._ended = threading.Event()
        """set when a load of the engine's ends"""
        self.deadlines = 0

    def start(self, plans: Sequence[LoadPlan]) -> None:
        """Starts the loads of a step as one load of the engine, so that they share its store calls; one that cannot be made is
        reported failed."""
        asked = [StepRequest(p.life.name, p.hashes, p.groups) for p in plans if not p.problem]
        handle = self._engine.load_many(asked) if asked else None
        now = self._clock.now()
        for plan in plans:
            if plan.problem:
                log.error("a load that cannot be made", request=plan.life.request_id, problem=plan.problem)
            self._waiting[plan.life] = Waiting(plan, None if plan.problem else handle, now)
        if handle is not None:
            handle.on_done(self._ended.set)

    def cancel(self, life: Life) -> None:
        """The request is gone: nothing more of its load starts. It is still reported, once its blocks are free of it."""
        waiting = self._waiting.get(life)
        if waiting is not None and not waiting.over:
            self._engine.release(life.name, ReleaseReason.ABORTED, wait=False)

    def wait(self, seconds: float) -> bool:
        """Waits until nothing is under way, at most so long for each load; whether that is so."""
        return all(w.handle is None or w.handle.wait(seconds) for w in self._waiting.values())

    def wait_any(self, seconds: float) -> None:
        """Waits at most so long for a load to end; not at all if none is under way, or one that was not reported is over."""
        self._ended.clear()
        under_way = any(not w.over for w in self._waiting.values())
        if under_way and all(w.told or not w.over for w in self._waiting.values()):
            self._ended.wait(seconds)

    def poll(self, report: WorkerReport) -> tuple[set[str], set[str], set[int]]:
        """What is over since the last call.

        Returns:
            requests whose loads are over, those of them to be repeated whole, and local blocks that did not arrive.
        """
        over: set[str] = set()
        failed: set[str] = set()
        invalid: set[int] = set()
        for life, waiting in list(self._waiting.items()):
            if waiting.over:
                self._over(life, waiting, report, over, failed, invalid)
            elif not waiting.told and self._clock.now() - waiting.began_s > self._deadline_s:
                self.deadlines += 1
                log.warning("a load missed its deadline", request=life.request_id, deadline_s=self._deadline_s)
                self._engine.release(life.name, ReleaseReason.ABORTED, wait=False)
                self._hold(life, waiting, report, over, failed)
        return over, failed, invalid

    def _over(
        self,
        life: Life,
        waiting: Waiting,
        report: WorkerReport,
        over: set[str],
        failed: set[str],
        invalid: set[int],
    ) -> None:
        fenced = self._engine.fenced_blocks & load_places(waiting.plan.groups)
        if fenced and not waiting.told:  # a call that was given up may still write
            self._hold(life, waiting, report, over, failed)
        if fenced:
            return
        del self._waiting[life]
        if waiting.told:
            report.returned.update(_blocks(waiting.plan))
            return
        over.add(life.request_id)
        failure = None if waiting.handle is None else waiting.handle.result(life.name).failure
        if waiting.handle is not None and failure is None:
            return
        first = 0 if failure is None else failure.first_token
        reason = waiting.plan.problem if failure is None else failure.reason
        log.warning("a load failed", request=life.request_id, first_token=first, reason=reason)
        report.failed[life] = first
        if self._several or failure is None:
            failed.add(life.request_id)
        else:
            invalid |= loaded_from(waiting.plan.groups, first, self._block_tokens)

    def _hold(self, life: Life, waiting: Waiting, report: WorkerReport, over: set[str], failed: set[str]) -> None:
        waiting.told = True
        over.add(life.request_id)
        failed.add(life.request_id)
        report.failed[life] = 0
        report.held.update(_blocks(waiting.plan))


def loaded_from(groups: Mapping[int, GroupBlocks], first: int, block_tokens: Mapping[int, int]) -> set[int]:
    """Local blocks that were to be loaded, at and after a token."""
    found = {int(b.block_ids[i]) for g, b in groups.items() for i in b.load if (i + 1) * block_tokens[g] > first}
    return found - {NULL_BLOCK}


def blocks_from(groups: Mapping[int, GroupBlocks], first: int, block_tokens: Mapping[int, int]) -> set[int]:
    """All local blocks of a request at and after a token, whoever filled them."""
    found = {int(b) for g, of in groups.items() for i, b in enumerate(of.block_ids) if (i + 1) * block_tokens[g] > first}
    return found - {NULL_BLOCK}


def load_places(groups: Mapping[int, GroupBlocks]) -> set[tuple[int, int]]:
    """(group id, local block id) of all that is to be loaded."""
    return {(g, int(b.block_ids[i])) for g, b in groups.items() for i in b.load}


def _blocks(plan: LoadPlan) -> Counter[int]:
    return Counter({block_id for _, block_id in load_places(plan.groups)} - {NULL_BLOCK})
