"""Plays a trace through an engine: lookups, admission, steps, restarts after failed loads, and the counts of the report.

The harness reads no wall time and no randomness: its clock, its way to wait and its compute are given to it, so that the
same harness runs live and under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvactors.core.clock import Clock
from kvactors.core.observe import Observer
from kvactors.core.reachability import Hit
from kvactors.core.steps import FailedLoad, ReleaseReason
from kvactors.errors import DrainTimeout, KVActorsError, TraceError
from kvactors.replay.blocks import BlockRules
from kvactors.replay.compute import Compute
from kvactors.replay.hashing import PromptHasher
from kvactors.replay.local_pool import LocalPool
from kvactors.replay.player import StepPlayer
from kvactors.replay.prompt import Prompt
from kvactors.replay.scheduler import Scheduler
from kvactors.replay.tally import Sample, Tally
from kvactors.replay.trace import TraceRequest

MOST_LOAD_TRIES = 3
"""Failed loads of one request before it is computed from token 0 without asking the store."""


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests arrive.

    Attributes:
        concurrency: most requests in play at a time.
        chunk_tokens: most tokens a request computes in a step.
        speed: trace time runs this many times faster than the clock; None = every request is there at once.
    """

    concurrency: int = 1
    chunk_tokens: int = 8192
    speed: float | None = None


class Harness:
    """Plays requests until the trace ends or `stop` is called.

    Args:
        engine: a started engine over `pool`'s bases.
        pool: local block memory, registered with the engine's store.
        rules: which blocks a prompt needs.
        compute: where filling and comparing run.
        clock: for pacing and times.
        sleep: waits that many seconds on `clock`, or less when the harness is stopped.
        pace: see `Pace`.
        observer: takes spans, or None.
        on_progress: called after each step with the tally.
    """

    def __init__(
        self,
        engine: Any,
        pool: LocalPool,
        rules: BlockRules,
        compute: Compute,
        *,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]],
        pace: Pace | None = None,
        observer: Observer | None = None,
        on_progress: Callable[[Tally], None] | None = None,
    ) -> None:
        self.pace = pace or Pace()
        self.tally = Tally.of(g.id for g in rules.groups)
        self.stopped = False
        self.violations: list[str] = []
        self.checks = 0
        self.wall_s = 0.0
        self._engine, self._rules, self._clock, self._sleep = engine, rules, clock, sleep
        self._hasher = PromptHasher(rules.hash_tokens)
        self._scheduler = Scheduler(rules, pool, self.pace.concurrency, self.pace.chunk_tokens)
        self._on_progress = on_progress
        self._player = StepPlayer(engine, pool, rules, compute, clock, self.tally, observer, settle=self.pace.concurrency == 1)
        self._next: Prompt | None = None
        self._start_s = 0.0
        self._circuit_open = False

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def stop(self) -> None:
        """Starts no further step; the one in hand ends normally."""
        self.stopped = True

    def give_up(self) -> None:
        """Notes that the play was broken off: what was under way was not awaited, so sessions may be open."""
        self.stopped = True
        self.wall_s = self._clock.now() - self._start_s
        self._look_for_outage()
        self.tally.event("given up: what was under way was not awaited")
        self._sample()

    async def play(self, requests: Iterator[TraceRequest]) -> None:
        """Plays the requests, then drains the engine. Failures of requests are counted, not raised."""
        self._start_s = self._clock.now()
        try:
            await self._play(requests)
            for prompt in self._scheduler.running:
                await self._engine.release(prompt.id, ReleaseReason.ABORTED)
        except KVActorsError as error:
            self._broke(f"the engine could not go on: {error}")
            for prompt in [*self._scheduler.running, *self._scheduler.waiting]:
                self._fail(prompt, "the engine could not go on")
        try:
            await self._engine.drain()
        except DrainTimeout as error:
            self._look_for_outage()
            if self._store_failed():
                self.tally.event(f"the store did not answer: {error}")
            else:
                self._broke(str(error))
        except KVActorsError as error:
            self._broke(f"drain: {error}")
        self.wall_s = self._clock.now() - self._start_s
        self._look_for_outage()
        self._check_end()
        self._sample()

    async def _play(self, requests: Iterator[TraceRequest]) -> None:
        scheduler = self._scheduler
        while not self.stopped:
            for prompt in scheduler.grow():
                await self._engine.release(prompt.id, ReleaseReason.PREEMPTED)
            wait_s = await self._admit(requests)
            if not scheduler.running:
                if wait_s is None:
                    return
                await self._sleep(wait_s)
                continue
            batch = list(scheduler.running)
            result = await self._player.play(batch)
            self._look_for_outage()
            for prompt in batch:
                if prompt.id in result.problems:
                    await self._leave(prompt, failed=f"the engine left it out: {result.problems[prompt.id]}")
                elif prompt.id not in result.failures:
                    await self._advance(prompt)
            for prompt in reversed(batch):  # each restarts before all others, so the first to arrive comes last
                failed = result.failures.get(prompt.id)
                if failed is not None and prompt.id not in result.problems:
                    self._restart(prompt, failed)
            if self._on_progress is not None:
                self._on_progress(self.tally)

    # -- requests enter and leave ------------------------------------------------------------------------------------

    async def _admit(self, requests: Iterator[TraceRequest]) -> float | None:
        """Admits what fits; answers how long until the next request arrives, or None when there is none to wait for."""
        scheduler = self._scheduler
        while scheduler.has_room and not self.stopped:
            if not scheduler.waiting:
                if self._next is None and (request := self._read(requests)) is not None:
                    self._next = self._prompt(request)
                if self._next is None:
                    return None
                wait_s = self._next.arrival_s - (self._clock.now() - self._start_s)
                if wait_s > 0:
                    return wait_s
                prompt, self._next = self._next, None
                self._count_new(prompt)
                if (why := scheduler.why_never(prompt)) is not None:
                    self._fail(prompt, why)
                    continue
                scheduler.waiting.append(prompt)
            prompt = scheduler.waiting[0]
            if not scheduler.worth_trying(prompt):
                return 0.0
            hit = await self._lookup(prompt)
            if not scheduler.admit(prompt, hit):
                if scheduler.running:
                    return 0.0
                scheduler.waiting.popleft()
                self._fail(prompt, f"its first step does not fit the {scheduler.pool.limit} local blocks, all of them free")
                continue
            scheduler.waiting.popleft()
            if prompt.restarting:
                self.tally.recomputed_tokens += max(0, prompt.lost_tokens - hit.tokens)
                prompt.restarting, prompt.lost_tokens = False, 0
                prompt.restarted_at = hit.tokens
            if prompt.served is None and hit.tokens == 0:
                prompt.served = 0
        return 0.0

    def _read(self, requests: Iterator[TraceRequest]) -> TraceRequest | None:
        """The next request; a trace that cannot be read on ends here, and the requests in play go on."""
        try:
            return next(requests, None)
        except TraceError as error:
            self._broke(str(error))
            return None

    def _prompt(self, request: TraceRequest) -> Prompt:
        arrival_s = request.timestamp_ms / 1000.0 / self.pace.speed if self.pace.speed else 0.0
        kept = self._rules.kept(request.input_length)
        return Prompt(f"r{request.line}", request, self._hasher.hashes(request), kept, arrival_s)

    def _count_new(self, prompt: Prompt) -> None:
        self.tally.requests += 1
        self.tally.input_tokens += prompt.length
        boundary = self._rules.boundary_tokens
        if prompt.length >= boundary:
            self.tally.note_prefix(prompt.hashes[boundary // self._rules.hash_tokens - 1], may_hit=prompt.length > boundary)
        for group, n in zip(self._rules.groups, self._rules.looked_up(prompt.length), strict=True):
            self.tally.groups[group.id].looked_up += n

    async def _lookup(self, prompt: Prompt) -> Hit:
        if prompt.failures >= MOST_LOAD_TRIES:
            return Hit(0, tuple(() for _ in self._rules.groups))
        hit: Hit = await self._engine.lookup(prompt.hashes, prompt.length)
        if hit.tokens >= prompt.length:
            self._broke(f"{prompt.id}: a hit of {hit.tokens} tokens leaves nothing to compute of {prompt.length}")
        return hit

    def _restart(self, prompt: Prompt, failed: FailedLoad) -> None:
        """A load failed: nothing of this try counts; the request starts again from what is still readable."""
        if prompt.failures == 0:
            self.tally.load_failed += 1
        prompt.failures += 1
        prompt.restarting = True
        prompt.lost_tokens = prompt.hit.tokens if prompt.hit is not None else prompt.computed
        self.tally.event(
            f"{prompt.id}: load of {prompt.lost_tokens} tokens failed from token {failed.first_token} on ({failed.reason})"
        )
        self._scheduler.restart(prompt)

    async def _advance(self, prompt: Prompt) -> None:
        prompt.restarted_at = None
        if prompt.hit is not None:
            if prompt.served is None:
                prompt.served = prompt.hit.tokens
                self.tally.hit_tokens += prompt.hit.tokens
                for g, indices in prompt.loading.items():
                    self.tally.groups[g].hit += len(indices)
            prompt.hit, prompt.loading = None, {}
        prompt.computed = prompt.end
        if prompt.done:
            await self._leave(prompt)

    async def _leave(self, prompt: Prompt, failed: str | None = None) -> None:
        self._scheduler.finish(prompt)
        reason = ReleaseReason.FINISHED if failed is None else ReleaseReason.ABORTED
        await self._engine.release(prompt.id, reason)
        self._engine.forget(prompt.id)
        if failed is not None:
            self._fail(prompt, failed)
            return
        self.tally.completed += 1
        self.tally.computed_tokens += prompt.length - (prompt.served or 0)
        if self.tally.wants_sample():
            self._sample()

    def _fail(self, prompt: Prompt, why: str) -> None:
        self.tally.failed += 1
        self.tally.event(f"{prompt.id} (line {prompt.request.line}): failed: {why}")

    # -- counts ------------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        stats = self._engine.stats()
        tally = self.tally
        tally.sample(
            Sample(
                self._clock.now() - self._start_s,
                tally.completed,
                tally.input_tokens,
                tally.hit_tokens,
                tuple(g.hit for g in tally.groups.values()),
                sum(g.bytes_saved for g in stats.groups.values()),
                sum(g.bytes_loaded for g in stats.groups.values()),
                stats.sessions.open_now,
                tally.load_failed,
            )
        )

    def _look_for_outage(self) -> None:
        """Counts an outage of the store once, however long it lasts."""
        open_before, self._circuit_open = self._circuit_open, self._engine.stats().circuit != "closed"
        if self._circuit_open and not open_before:
            self.tally.outages += 1

    def _store_failed(self) -> bool:
        """Whether the store was unreachable, or calls on it did not return: what is left then is no fault of the engine's."""
        return bool(self.tally.outages or self._engine.stats().lost_workers)

    def _check_end(self) -> None:
        """What must hold once a run has ended; the engine checks its own invariants."""
        stats, tally = self._engine.stats(), self.tally
        s = stats.sessions
        ended = s.put_committed + s.put_revoked + s.put_poisoned + s.put_abandoned
        self._check(s.open_now == 0, f"{s.open_now} sessions are open after the drain (I2)")
        self._check(s.put_opened == ended or s.open_now > 0, f"{s.put_opened} put sessions were opened, {ended} ended (I2)")
        self._check(tally.hit_tokens <= tally.input_tokens, "more tokens were hit than asked for")
        if not tally.load_failed and not self.stopped:
            loaded = sum(g.bytes_loaded for g in stats.groups.values())
            self._check(loaded == tally.verified_bytes, f"{loaded} bytes were loaded, {tally.verified_bytes} verified")
        if not self.stopped:
            self._check(self._scheduler.pool.used == 0, f"{self._scheduler.pool.used} local blocks were not given back")

    def _check(self, holds: bool, text: str) -> None:
        self.checks += 1
        if not holds:
            self._broke(text)

    def _broke(self, text: str) -> None:
        self.violations.append(text)
