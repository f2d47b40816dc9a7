"""The driver of one simulated instance: admits requests, plays steps on all its engines in lockstep, and checks the bytes."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvactors.core.events import DeviceEvent
from kvactors.core.layout import Group, GroupKind, KVLayout
from kvactors.core.reachability import Hit
from kvactors.core.steps import NULL_BLOCK, GroupBlocks, Phase, ReleaseReason, StepRequest
from kvactors.devices import ManualEvent
from kvactors.engine import Engine, Step
from kvactors.errors import DrainTimeout
from kvactors.simulate.judge import Judge
from kvactors.simulate.local import LocalBlocks
from kvactors.simulate.prompts import SimRequest
from kvactors.simulate.stream import Stream

if TYPE_CHECKING:
    from kvactors.simulate.world import World

MOST_STEPS = 400
CHUNKS = (1, 1, 2, 4)
"""Scheduler boundaries that a request computes in one step."""


class Driver:
    """Serves a list of requests. `engines` and `blocks` go by rank: TP ranks and PP stages of one model."""

    def __init__(
        self,
        world: World,
        number: int,
        engines: Sequence[Engine],
        blocks: Sequence[LocalBlocks],
        requests: Sequence[SimRequest],
        streams: Sequence[Stream],
        rng: random.Random,
    ) -> None:
        self.world, self.number, self.engines, self.blocks = world, number, engines, blocks
        self.streams = streams
        self.waiting = list(requests)
        self._all = list(requests)
        self.running: list[SimRequest] = []
        self.steps = 0
        self._rng = rng
        self._stages: dict[int, list[int]] = {}
        for rank, local in enumerate(blocks):
            self._stages.setdefault(local.layout.pp_rank, []).append(rank)
        self._boundary = engines[0].reachability.boundary_tokens
        self._hash_tokens = engines[0].hash_tokens
        self.judge = Judge(world, blocks, self._hash_tokens)
        self._loads: dict[asyncio.Task[None], None] = {}  # in order: a set of tasks has none
        self._batch = rng.choice((4, 7, 10))
        self._reckless = rng.random() < 0.5
        """aborts, overtakes, preempts"""
        self._aborts = 0
        self._left_early = False
        self._published: set[str] = set()
        self._crash_at = rng.randrange(5, 400) if world.trouble.draw("crash", world.trouble.rates.crash) else -1

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._crash_at >= 0:
            engine = self._rng.choice(list(self.engines))
            victim: Any = self._rng.choice(list(engine.crew.groups.values()))
            self._plant_crash(victim)
        for engine in self.engines:
            await engine.start()

    def _plant_crash(self, actor: Any) -> None:
        handle, left = actor.handle, [self._crash_at]

        async def crash(message: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("crashed by the simulation")
            await handle(message)

        actor.handle = crash

    async def serve(self) -> None:
        stop_at = self._rng.randrange(3, 60) if self._reckless and self._rng.random() < 0.2 else MOST_STEPS
        self._left_early = stop_at < MOST_STEPS
        while (self.waiting or self.running or self._loads) and self.steps < stop_at:
            for task in [t for t in self._loads if t.done()]:
                del self._loads[task]
                task.result()
            for local, engine in zip(self.blocks, self.engines, strict=True):
                local.fenced |= engine.fenced_blocks
            await self._admit()
            batch = [r for r in self.running if not r.loading]
            self._rng.shuffle(batch)
            batch = batch[: self._batch]
            if not batch:
                if self._loads:
                    await asyncio.wait(list(self._loads), return_when=asyncio.FIRST_COMPLETED)
                    continue
                if self.waiting:
                    await self._make_room()
                continue
            await self._play(batch)
            if self._reckless and self.running and self._rng.random() < 0.15:
                await self._disturb(self._rng.choice(self.running))

    async def finish(self) -> None:
        """Drains, and checks that nothing was left behind."""
        for task in list(self._loads):
            await task
        for engine in self.engines:
            slowed_s = self.world.slowed_s
            try:
                await engine.drain()
            except DrainTimeout:
                each_s = (self.world.slowed_s - slowed_s) / (len(self.world.stores) * engine.config.workers)
                if "freeze" not in self.world.trouble.injected and each_s < engine.config.drain_deadline_s / 2:
                    raise  # no worker can have been kept that long
        for engine in self.engines:
            sessions = engine.stats().sessions
            self.judge.must(sessions.open_now == 0, f"I2: {sessions.open_now} sessions are open after the drain")
            for broken in engine.violations():
                self.judge.must(False, broken)
        if not self._aborts and not self._left_early:
            self.judge.saved(self._published)

    async def stop(self) -> None:
        for task in list(self._loads):
            task.cancel()
        for engine in self.engines:
            await engine.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        while self.waiting and len(self.running) <= self._batch:
            r = self.waiting[0]
            hit = await self.engines[0].lookup(r.hashes, r.tokens)
            self.judge.hit(r, hit)
            if not self._place(r, hit):
                return
            self.waiting.pop(0)
            self.running.append(r)
            if r.hit and self._rng.random() < 0.3:
                r.loading = True
                task = asyncio.ensure_future(self._load_ahead(r))
                self._loads[task] = None

    def _place(self, r: SimRequest, hit: Hit) -> bool:
        """Gives the request a local block for each block that it loads or computes; False if they are not there."""
        tables: list[dict[int, dict[int, int]]] = []
        for local in self.blocks:
            table: dict[int, dict[int, int]] = {}
            tables.append(table)
            for n, g in enumerate(local.layout.groups):
                count = len(r.hashes) * self._hash_tokens // g.block_tokens
                needed = [i for i, m in enumerate(hit.masks[n]) if m] if hit.tokens else []
                indices = needed + list(range(hit.tokens // g.block_tokens, count))
                ids = local.take(g.id, len(indices)) if g.layers else []
                if ids is None:
                    self._free_tables(tables)
                    return False
                table[g.id] = dict(zip(indices, ids, strict=False))
        r.tables, r.hit, r.masks = tables, hit.tokens, hit.masks
        r.computed = hit.tokens
        if r.restarted_at is not None:
            r.restarted_at = hit.tokens
        return True

    def _free_tables(self, tables: list[dict[int, dict[int, int]]]) -> None:
        """The blocks are somebody else's from now on: what that one writes comes next on the stream."""
        for local, stream, table in zip(self.blocks, self.streams, tables, strict=False):
            for group, ids in table.items():
                stream.submit(partial(local.scribble, group, list(ids.values())))
                local.give_back(group, list(ids.values()))

    async def _make_room(self) -> None:
        if self.running:
            await self._preempt(self._rng.choice(self.running))
        else:
            self.waiting.pop(0)  # it can never fit

    async def _leave(self, r: SimRequest, reason: ReleaseReason) -> None:
        """The request goes; its blocks are scribbled over as soon as `release` returned."""
        for engine in self.engines:
            await engine.release(r.id, reason)
        self._note_fences()
        self._free_tables(r.tables)
        r.tables = []
        if reason is not ReleaseReason.PREEMPTED:
            for engine in self.engines:
                engine.forget(r.id)
        if r in self.running:
            self.running.remove(r)

    async def _preempt(self, r: SimRequest) -> None:
        if r.loading:
            return
        await self._leave(r, ReleaseReason.PREEMPTED)
        r.bad_restart = False
        if r.wrong:
            r.restarted_at = 0
        r.hit = r.computed = 0
        self.waiting.append(r)

    async def _disturb(self, r: SimRequest) -> None:
        if self._rng.random() < 0.5:
            await self._preempt(r)
        elif r.loading:
            r.dead = True
            self._aborts += 1
            for engine in self.engines:
                await engine.release(r.id, ReleaseReason.ABORTED)
        else:
            await self._leave(r, ReleaseReason.ABORTED)

    def _note_fences(self) -> None:
        for local, engine in zip(self.blocks, self.engines, strict=True):
            local.fenced = set(engine.fenced_blocks) | {w for s in engine.crew.states.values() for w in s.fenced}

    # -- loads outside steps -------------------------------------------------------------------------------------------

    async def _load_ahead(self, r: SimRequest) -> None:
        failed = False
        for rank, (engine, local) in enumerate(zip(self.engines, self.blocks, strict=True)):
            blocks = {g.id: self._blocks(r, rank, g, load=True, save=range(0)) for g in local.layout.groups if g.layers}
            done = await engine.load(r.id, blocks, r.hashes, self._device(rank, lambda: None))
            failed = failed or done.failure is not None
            if done.failure is None and not r.dead:
                for g in local.layout.groups:
                    for layer in {local.layout.stage_layer(layer) for layer in g.layers}:
                        self.judge.loaded(r, rank, g, layer)
        if r.dead:
            await self._leave(r, ReleaseReason.ABORTED)
        elif failed:
            if not self._reckless:
                self.judge.blame(r)
            if len(self.engines) == 1 and self._rng.random() < 0.4 and r.failures == 0:
                r.failures, r.hit, r.wrong = 1, 0, {0}  # computes on, from missing KV: must never be published
            else:
                await self._restart(r)
        else:
            r.hit = 0
        r.loading = False

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _blocks(self, r: SimRequest, rank: int, g: Group, *, load: bool, save: range) -> GroupBlocks:
        table = r.tables[rank][g.id]
        count = len(r.hashes) * self._hash_tokens // g.block_tokens
        ids = [table.get(i, NULL_BLOCK) for i in range(count)]
        n = [x.id for x in self.blocks[rank].layout.groups].index(g.id)
        loads = [i for i, m in enumerate(r.masks[n]) if m] if load and r.hit else []
        return GroupBlocks(ids, loads, [i for i in save if i in table])

    def _saved(self, r: SimRequest, g: Group, end: int) -> range:
        return range(r.computed // g.block_tokens, end // g.block_tokens)

    async def _play(self, batch: list[SimRequest]) -> None:
        self.steps += 1
        ends: dict[str, int] = {}
        for r in batch:
            top = len(r.hashes) * self._hash_tokens // self._boundary * self._boundary
            ends[r.id] = max(
                r.computed, min(r.computed + self._rng.choice(CHUNKS) * self._boundary, top) // self._boundary * self._boundary
            )
        steps: list[Step] = []
        for rank, engine in enumerate(self.engines):
            layout = self.blocks[rank].layout
            requests = [
                StepRequest(
                    r.id,
                    r.hashes,
                    {
                        g.id: self._blocks(r, rank, g, load=not r.bad_restart, save=self._saved(r, g, ends[r.id]))
                        for g in layout.groups
                        if g.layers
                    },
                    r.restarted_at,
                )
                for r in batch
            ]
            steps.append(engine.begin_step(requests, self._device(rank, lambda: None)))
        for r in batch:
            if r.bad_restart:  # nothing was loaded: whatever the caller claims, the KV is wrong
                r.wrong, r.restarted_at, r.hit, r.bad_restart = {0}, None, 0, False
            elif r.restarted_at is not None:
                r.wrong, r.restarted_at, r.first_wrong = set(), None, -1
        stop_after = self._rng.randrange(5) if self._reckless and self._rng.random() < 0.2 else None
        for stage, ranks in self._stages.items():
            for layer in range(self.blocks[ranks[0]].layout.stage_layers):
                if layer == stop_after:
                    await self._cut_short(steps, batch)
                    return
                await self._layer(steps, ranks, layer, batch, ends, stage)
        for step in steps:
            await step.end()
        self._note_fences()
        if self._rng.random() < 0.5:
            for step in steps:
                await step.settled()
        await self._after(batch, steps, ends)

    async def _layer(
        self,
        steps: Sequence[Step],
        ranks: Sequence[int],
        layer: int,
        batch: list[SimRequest],
        ends: dict[str, int],
        stage: int,
    ) -> None:
        """One layer on all ranks of a stage: loads first, on every rank; then they agree on what failed, and compute."""
        for rank in ranks:
            failed = await steps[rank].wait_layer(layer)
            for r in batch:
                if r.id in failed and rank not in r.wrong:
                    self._spread(r, stage, layer, steps)
        for rank in ranks:
            for r in batch:
                if r.hit and rank not in r.wrong:
                    for g in self.blocks[rank].layout.groups:
                        self.judge.loaded(r, rank, g, layer)
        for rank in ranks:
            await self._compute(steps[rank], rank, layer, batch, ends)

    def _spread(self, r: SimRequest, stage: int, layer: int, steps: Sequence[Step]) -> None:
        """What one rank computes from missing KV reaches its own stage from that layer on, and later stages whole."""
        for other, step in enumerate(steps):
            theirs = self.blocks[other].layout.pp_rank
            if theirs >= stage:
                r.wrong.add(other)
                at = layer if theirs == stage else 0
                if r.id not in step.failures or step.failures[r.id].layer > at:
                    step.fail(r.id, at, "another rank's load failed")

    async def _compute(self, step: Step, rank: int, layer: int, batch: list[SimRequest], ends: dict[str, int]) -> None:
        layout = self.blocks[rank].layout
        if self.world.trouble.draw("slow", self.world.trouble.rates.slow):
            await asyncio.sleep(self.world.trouble.pick(0.0, 2.0))
        entry = self._work(layout, rank, batch, ends, lambda g: g.kind is not GroupKind.STATE)
        rest = self._work(layout, rank, batch, ends, lambda g: g.kind is GroupKind.STATE)
        event = self._device(rank, partial(self._write, rank, layer, entry))
        if self._rng.random() < 0.5:
            step.layer_ready(layer, event, Phase.ENTRY)  # the attention groups' cache is written, the state is not
        event = self._device(rank, partial(self._write, rank, layer, rest))
        step.layer_ready(layer, event, Phase.EXIT)
        await step.checkpoint(layer)

    def _work(
        self, layout: KVLayout, rank: int, batch: list[SimRequest], ends: dict[str, int], of: Callable[[Group], bool]
    ) -> list[tuple[int, int, bytes, bool]]:
        return [
            (g.id, r.tables[rank][g.id][i], self.judge.hash_of(g, r, i), rank not in r.wrong)
            for r in batch
            for g in layout.groups
            if g.layers and of(g)
            for i in self._saved(r, g, ends[r.id])
            if i in r.tables[rank][g.id]
        ]

    def _write(self, rank: int, layer: int, work: list[tuple[int, int, bytes, bool]]) -> None:
        for group, block, block_hash, right in work:
            self.blocks[rank].write(group, layer, block, block_hash, right)

    def _device(self, rank: int, work: Callable[[], None]) -> DeviceEvent:
        """Queues `work` on the rank's stream, late at times; the event after it may be lost (the device driver hangs)."""
        trouble, stream = self.world.trouble, self.streams[rank]
        late = trouble.draw("event_late", trouble.rates.event_late)
        stream.submit(work, trouble.pick(0.0, 0.01) if late else 0.0)
        return ManualEvent() if trouble.draw("event_lost", trouble.rates.event_lost) else stream.record()

    async def _cut_short(self, steps: Sequence[Step], batch: list[SimRequest]) -> None:
        """The forward pass raised: the step is aborted, or the next one simply begins."""
        self._aborts += 1
        if self._rng.random() < 0.5:
            for step in steps:
                await step.abort("the forward pass raised")
        else:
            for rank, step in enumerate(steps):
                await self._overtake(step, rank)
        self._note_fences()
        for r in batch:
            await self._restart(r)

    async def _overtake(self, old: Step, rank: int) -> None:
        """The next step begins while one is open; late signals of the old one must not count for it."""
        local, engine = self.blocks[rank], self.engines[rank]
        g = next(g for g in local.layout.groups if g.layers)
        ids = local.take(g.id, 1)
        if ids is None:
            follower = engine.begin_step([])
            await follower.end()
        else:
            name = f"x{self.number}-{self.steps}-{rank}"
            k = g.block_tokens // self._hash_tokens
            hashes = [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(k)]
            r = StepRequest(name, hashes, {g.id: GroupBlocks(ids, (), (0,))})
            follower = engine.begin_step([r], self.streams[rank].record())
            for layer in range(local.layout.stage_layers):
                old.layer_ready(layer, self.streams[rank].record())
                await asyncio.sleep(0)
                event = self._device(rank, partial(local.write, g.id, layer, ids[0], hashes[-1], True))
                follower.layer_ready(layer, event)
                await follower.checkpoint(layer)
            await follower.end()
            await engine.release(name, ReleaseReason.FINISHED)
            engine.forget(name)
            self._note_fences()
            local.give_back(g.id, ids)
        self.judge.must(old._state.ended.is_open, "I9: a step that was overtaken did not end")

    def _judge_rest(self, r: SimRequest, rank: int, step: Step) -> None:
        """What a failed load says it has brought in is there."""
        for g in self.blocks[rank].layout.groups:
            for layer in {self.blocks[rank].layout.stage_layer(layer) for layer in g.layers}:
                self.judge.loaded(r, rank, g, layer, before=step.failures[r.id].first_token)

    async def _after(self, batch: list[SimRequest], steps: Sequence[Step], ends: dict[str, int]) -> None:
        failed = {r for step in steps for r in step.failures}
        for r in batch:
            if r.id in failed:
                if not self._reckless:
                    self.judge.blame(r)
                for rank, step in enumerate(steps):
                    if r.id in step.failures:
                        r.first_wrong = step.failures[r.id].first_token
                        self.judge.failure(step.failures[r.id], rank, r)
                        self._judge_rest(r, rank, step)
                self._excuse(r, ends[r.id])
                if self._rng.random() < 0.5 and r.failures == 0:
                    r.failures = 1  # carries on, computing from missing KV: must never be published
                    r.hit, r.computed = 0, ends[r.id]
                else:
                    await self._restart(r)
                    continue
            else:
                for rank, local in enumerate(self.blocks):
                    for g in local.layout.groups:
                        for layer in {local.layout.stage_layer(layer) for layer in g.layers}:
                            self.judge.loaded(r, rank, g, layer)  # nothing came in late, or was overwritten
                        if not r.wrong and g.layers and local.layout.stores(g.id, self.engines[rank].tp_rank):
                            saved = [i for i in self._saved(r, g, ends[r.id]) if i in r.tables[rank][g.id]]
                            self._published |= {local.key(g.id, self.judge.hash_of(g, r, i)) for i in saved}
                r.hit, r.computed = 0, max(r.computed, ends[r.id])
            top = len(r.hashes) * self._hash_tokens // self._boundary * self._boundary
            if r.computed >= top:
                await self._leave(r, ReleaseReason.FINISHED)

    def _excuse(self, r: SimRequest, end: int) -> None:
        """What a failed request would have saved is saved by nobody else in this step either (I10)."""
        for rank, local in enumerate(self.blocks):
            for g in local.layout.groups:
                saved = [i for i in self._saved(r, g, end) if i in r.tables[rank].get(g.id, {})]
                self.world.excused |= {local.key(g.id, self.judge.hash_of(g, r, i)) for i in saved}

    async def _restart(self, r: SimRequest) -> None:
        """Starts again from what is still readable; after some failures, from nothing."""
        r.failures += 1
        miss = Hit(0, tuple(() for _ in self.blocks[0].layout.groups))
        hit = miss if r.failures > 3 else await self.engines[0].lookup(r.hashes, r.tokens)
        self.judge.hit(r, hit)
        self._note_fences()
        self._free_tables(r.tables)
        r.tables = []
        if not self._place(r, hit) and not self._place(r, miss):
            self.running.remove(r)
            r.hit = r.computed = 0
            for engine in self.engines:
                await engine.release(r.id, ReleaseReason.PREEMPTED)
            self.waiting.append(r)
        r.restarted_at = r.computed
        claims = len(self.engines) == 1 and r.tables and r.hit > r.first_wrong >= 0
        r.bad_restart = bool(claims) and self._rng.random() < 0.3

    # -- checks --------------------------------------------------------------------------------------------------------

    def story(self, violation: str) -> list[str]:
        """What happened to the sessions of the requests that a violation names, or whose key it names."""
        words = {w.strip(",:;") for w in violation.split()}
        named = [r for r in self._all if r.id in words or words & self._keys_of(r)]
        return [f"{r.id}: {line}" for r in named for engine in self.engines for line in engine.story(r.id)][-120:]

    def _keys_of(self, r: SimRequest) -> set[str]:
        return {
            local.key(g.id, self.judge.hash_of(g, r, i))
            for local in self.blocks
            for g in local.layout.groups
            for i in range(len(r.hashes) * self._hash_tokens // g.block_tokens)
        }
