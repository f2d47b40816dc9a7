"""The engine on the caller's own loop: what its callers ask for, and what they are answered; `crew.py` has who does it.

Whatever breaks, wrong bytes are never used or published, and the model goes on: a step of an engine that cannot move
anything passes through, with its loads reported failed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvactors.actors.fences import Fences
from kvactors.actors.latch import Latch, SaveGate
from kvactors.actors.mailbox import Mailbox
from kvactors.actors.pool import TransferPool
from kvactors.actors.step_state import StepState
from kvactors.actors.workers import Executor
from kvactors.core.admission import hashes_problem
from kvactors.core.answers import CheckedStore, listed, shown
from kvactors.core.clock import Clock
from kvactors.core.config import EngineConfig, seconds
from kvactors.core.events import DeviceEvent, Devices
from kvactors.core.layout import KVLayout, finest_hash_tokens
from kvactors.core.lookup import KeySpace
from kvactors.core.observe import Observer
from kvactors.core.ranges import Bases
from kvactors.core.reachability import Hit, Reachability
from kvactors.core.sessions import SessionTable
from kvactors.core.stats import EngineStats
from kvactors.core.steps import GroupBlocks, ReleaseReason, StepRequest
from kvactors.core.store import Store, require_store
from kvactors.core.story import StoryBook
from kvactors.devices import CpuDevices, MonotonicClock
from kvactors.engine.crew import CLOSED, Crew
from kvactors.engine.driver import StepDriver
from kvactors.engine.intake import Answer, Intake
from kvactors.engine.steps import Step
from kvactors.errors import ConfigError, DrainTimeout, EngineDeadError, StepError
from kvactors.messages import BeginStep, Drain, ForgetRequest, LoadBlocks, LoadDone, Lookup, ReleaseRequest


class Inside(NamedTuple):
    """What a live view reads."""

    layout: KVLayout
    config: EngineConfig
    clock: Clock
    stats: EngineStats
    tables: Sequence[SessionTable]
    mailboxes: Sequence[Mailbox[Any]]
    pool: TransferPool
    gate: SaveGate
    fences: Fences


class Engine:
    """One engine per worker rank, on the running asyncio loop.

    Args:
        layout: this stage's layout.
        store: where objects go; the caller owns it, and has registered the memory behind `bases` with it.
        bases: (group id, physical layer, entry name) -> local address of block 0.
        config: limits and deadlines.
        clock, rng, devices: time, randomness, device events; by default the real ones.
        hookless_layers: stage layers that never get a `layer_ready`; the end of the step stands for it.
        hash_tokens: tokens per fine hash; by default the greatest common divisor of the groups' block sizes.
        tp_rank: this worker's rank; decides which head it stores and reads.
        stages: layouts of all pipeline stages, which lookups need; may be left out where there is one, or by a rank that
            never looks up.
        observer: takes spans of work, for timelines.
        executor: runs the transfer workers; by default daemon threads.

    Raises:
        LayoutError, ConfigError: the arguments contradict each other.
    """

    def __init__(
        self,
        layout: KVLayout,
        store: Store,
        bases: Bases,
        config: EngineConfig | None = None,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        devices: Devices | None = None,
        hookless_layers: Sequence[int] = (),
        hash_tokens: int | None = None,
        tp_rank: int = 0,
        stages: Sequence[KVLayout] = (),
        observer: Observer | None = None,
        executor: Executor | None = None,
    ) -> None:
        require_store(store)
        store = CheckedStore(store)
        if not isinstance(bases, Mapping):
            raise ConfigError(
                f"bases: came {shown(bases)}; give (group id, physical layer, entry name) -> local address of block 0"
            )
        self.layout = layout
        self.tp_rank = tp_rank
        self.config = config = EngineConfig() if config is None else config
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self.rng = random.Random(0) if rng is None else rng
        self.hash_tokens = finest_hash_tokens(layout.groups) if hash_tokens is None else hash_tokens
        self.reachability = Reachability(layout.groups, self.hash_tokens)
        self._stages = list(stages) or [layout]
        self._keys: KeySpace | None = KeySpace(self._stages) if stages or layout.pp_size == 1 else None
        self.crew = Crew(
            layout,
            store,
            bases,
            config,
            clock=self.clock,
            reachability=self.reachability,
            hash_tokens=self.hash_tokens,
            tp_rank=tp_rank,
            find=self._find,
            observer=observer,
            executor=executor,
        )
        self.gate, self.fences = self.crew.gate, self.crew.fences
        self.driver = StepDriver(
            layout,
            config,
            self.gate,
            CpuDevices() if devices is None else devices,
            hookless_layers,
            self.crew.pool,
            self.crew.coordinator.mailbox.post,
        )
        group_layers = {gid: tuple(actor.context.ranges.layers) for gid, actor in self.crew.groups.items()}
        self._intake = Intake(layout, self.hash_tokens, group_layers, self.crew.stats)

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts actors and workers on the running loop, once.

        Raises:
            EngineClosedError: it was started before; make a new engine.
        """
        self.crew.start()

    async def close(self) -> None:
        """Stops everything; what is under way is reported failed. Idempotent; does not close the store.

        Store calls under way get a second to return: until they do they may touch memory (`fenced_blocks`).
        """
        await self.crew.close()

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin_step(self, requests: Sequence[StepRequest], event: DeviceEvent | None = None) -> Step:
        """Opens a step; returns at once. `event` guards earlier work on the blocks. Aborts a step that is still open."""
        return Step(self, self.open_step(requests, event))

    def open_step(self, requests: Sequence[StepRequest], event: DeviceEvent | None) -> StepState:
        state = self._intake.state(requests)
        previous, self.driver.open_step = self.driver.open_step, state
        if previous is not None and not previous.ended.is_open:
            previous.aborted = True
        if self.crew.is_dead():
            self._refuse(state)
        elif state.groups or state.failed or (previous is not None and not previous.ended.is_open):
            self.crew.states[state.id] = state
            guard = self.driver.record() if event is None else event
            self.crew.post(BeginStep(state.id, list(state.requests.values()), guard))
            if self.crew.is_dead():  # died between the check and the post
                self._refuse(state)
        else:
            state.ended.open()
            state.settled.open()
        return state

    def _refuse(self, state: StepState) -> None:
        self.crew.stats.steps_passed_through += 1
        state.pass_through(self.crew.dead)
        state.give_up(self.crew.dead)
        if self.config.strict:
            raise EngineDeadError(f"{self.crew.dead}; begin no step on this engine")

    @property
    def patience_s(self) -> float:
        """How long a caller waits for an answer at most, seconds."""
        return self.driver.patience_s

    # -- lookups and loads ---------------------------------------------------------------------------------------------

    def _find(self, hashes: Sequence[bytes], prompt_tokens: int, store: Store) -> Hit:
        keys = self._keys
        assert keys is not None

        def readable(group_id: int, block_hash: bytes) -> bool:
            return keys.readable_many(group_id, [block_hash], store.readable)[0]

        def readable_many(group_id: int, block_hashes: Sequence[bytes]) -> list[bool]:
            return keys.readable_many(group_id, block_hashes, store.readable)

        return self.reachability.longest_hit(hashes, prompt_tokens, readable, readable_many=readable_many)

    def ask(self, hashes: Sequence[bytes], prompt_tokens: int, deadline_s: float | None) -> Answer[Hit]:
        answer = Answer(Hit(0, tuple(() for _ in self.layout.groups)))
        wait = self.config.call_deadline_s if deadline_s is None else deadline_s
        problem = hashes_problem(hashes)
        if problem or not isinstance(prompt_tokens, int) or prompt_tokens < 0:
            raise ConfigError(f"lookup: {problem or f'prompt_tokens is {prompt_tokens!r}; give a whole number >= 0'}")
        if not seconds(wait):
            raise ConfigError(f"lookup: a deadline of {wait!r}; give seconds, more than 0")
        if self._keys is None:
            raise ConfigError(f"lookup: {self.layout.pp_size} pipeline stages; give Engine the layouts of all as `stages`")
        if self.crew.dead:
            answer.give(answer.value)
        else:
            self.crew.post(Lookup(hashes, prompt_tokens, wait, answer.give))
        return answer

    async def lookup(self, hashes: Sequence[bytes], prompt_tokens: int, deadline_s: float | None = None) -> Hit:
        """The longest common reachable boundary of a prompt, at most `prompt_tokens - 1`. An error or a late answer is a miss.

        Args:
            hashes: fine chained hashes, one per `hash_tokens` tokens from token 0.

        Raises:
            ConfigError: the arguments make no sense.
        """
        answer = self.ask(hashes, prompt_tokens, deadline_s)
        await answer.latch.wait_async(self.patience_s)
        return answer.value

    def start_load(
        self, request_id: str, blocks: Mapping[int, GroupBlocks], hashes: Sequence[bytes], event: DeviceEvent | None
    ) -> StepState:
        state = self._intake.state([StepRequest(request_id, hashes, blocks)], windowed=False)
        if request_id in state.problems:
            raise StepError(f"load for {request_id!r}: {state.problems[request_id]}")
        return self._begin_load(state, event)

    def start_loads(self, requests: Sequence[StepRequest], event: DeviceEvent | None) -> StepState:
        return self._begin_load(self._intake.state(requests, windowed=False), event)

    def _begin_load(self, state: StepState, event: DeviceEvent | None) -> StepState:
        if self.crew.is_dead():
            self._refuse(state)
            return state
        self.crew.states[state.id] = state
        guard = self.driver.record() if event is None else event
        self.crew.post(LoadBlocks(state.id, list(state.requests.values()), guard))
        if self.crew.is_dead():
            self._refuse(state)
        return state

    def load_done(self, state: StepState, request_id: str) -> LoadDone:
        request = state.requests.get(request_id)
        fenced: dict[int, tuple[int, ...]] = {}
        for group_id, blocks in sorted(request.groups.items()) if request is not None and state.fenced else ():
            mine = {(group_id, int(blocks.block_ids[i])) for i in blocks.load} & state.fenced
            if mine:
                fenced[group_id] = tuple(sorted(block_id for _, block_id in mine))
        return LoadDone(request_id, state.failure(request_id), fenced)

    async def load(
        self,
        request_id: str,
        blocks: Mapping[int, GroupBlocks],
        hashes: Sequence[bytes],
        event: DeviceEvent | None = None,
    ) -> LoadDone:
        """Loads blocks outside any step, all layers at once; returns when every block arrived or failed.

        Raises:
            StepError: the block lists contradict themselves.
            DeadlineError: no answer in time; the destinations may still be written.
        """
        state = self.start_load(request_id, blocks, hashes, event)
        self.driver.in_time(await state.ended.wait_async(self.patience_s), f"load for {request_id!r}")
        return self.load_done(state, request_id)

    async def load_many(self, requests: Sequence[StepRequest], event: DeviceEvent | None = None) -> dict[str, LoadDone]:
        """`load` for several requests at once: each store call is made for the blocks of all of them (what they save is left
        out). They fail one by one; so does one whose block lists contradict themselves, or that loads into the same local block
        as one before it. A call that fails as a whole fails all of them.

        Returns:
            what came of each request, when every block of all of them arrived or failed.

        Raises:
            StepError: `requests` is no sequence of `StepRequest`.
            DeadlineError: no answer in time; the destinations may still be written.
        """
        state = self.start_loads(requests, event)
        names = [r.request_id for r in requests]
        self.driver.in_time(await state.ended.wait_async(self.patience_s), f"loads for {listed(names)}")
        return {name: self.load_done(state, name) for name in names}

    # -- requests, drain -----------------------------------------------------------------------------------------------

    def start_release(self, request_id: str, reason: ReleaseReason) -> Latch:
        """Opens when nothing of the request is under way; at once if it is part of the open step (takes effect at its end)."""
        latch = Latch()
        if not isinstance(request_id, str) or not isinstance(reason, ReleaseReason):
            raise ConfigError(f"release({request_id!r}, {reason!r}): give a request id and a ReleaseReason")
        if self.crew.dead:
            latch.open()
            return latch
        self.crew.post(ReleaseRequest(request_id, reason, latch.open))
        step = self.driver.open_step
        if step is not None and request_id in step.requests:
            return _opened()
        return latch

    async def release(self, request_id: str, reason: ReleaseReason = ReleaseReason.FINISHED) -> None:
        """The request ended, was aborted, or was preempted: its blocks may be reused once this returns; while a step of its is
        open, it returns at once, and they may be reused once that step has ended, whatever the reason."""
        latch = self.start_release(request_id, reason)
        self.driver.in_time(await latch.wait_async(self.patience_s), f"release of {request_id!r}")

    def forget(self, request_id: str) -> None:
        """Drops the memory of the request's committed keys, after finish or abort."""
        if not isinstance(request_id, str):
            raise ConfigError(f"forget({request_id!r}): give a request id")
        if not self.crew.dead:
            self.crew.post(ForgetRequest(request_id))

    def start_drain(self, deadline_s: float | None) -> Answer[list[str]]:
        answer: Answer[list[str]] = Answer([])
        wait = self.config.drain_deadline_s if deadline_s is None else deadline_s
        if not seconds(wait):
            raise ConfigError(f"drain: a deadline of {wait!r}; give seconds, more than 0")
        if self.crew.dead:
            answer.give([] if self.crew.dead == CLOSED else [f"the engine is dead: {self.crew.dead}"])
        else:
            self.crew.post(Drain(wait, answer.give))
        return answer

    async def drain(self, deadline_s: float | None = None) -> None:
        """An accepted step may finish; new ones pass through. Returns when every session is at its end.

        Raises:
            DrainTimeout: the deadline passed; lists what was left. Then only `close` is legal.
        """
        answer = self.start_drain(deadline_s)
        await answer.latch.wait_async(self.patience_s + (self.config.drain_deadline_s if deadline_s is None else deadline_s))
        self.drained(answer)

    def drained(self, answer: Answer[list[str]]) -> None:
        if not answer.latch.is_open:
            raise DrainTimeout(["the engine did not answer"])
        if answer.value:
            raise DrainTimeout(answer.value)

    # -- looking in ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of all counters."""
        return self.crew.snapshot()

    def keep_stories(self) -> StoryBook:
        """Notes from now on what happens to each request, for `story`; some 25 MB at most. Asked for again, the same book."""
        return self.crew.keep_stories()

    def story(self, request_id: str) -> list[str]:
        """What happened to a request and its sessions, one line each, oldest first; nothing without `keep_stories`."""
        return [] if self.crew.story is None else self.crew.story.tell(request_id)

    def inside(self) -> Inside:
        """The engine's own parts, for whoever looks on from another thread: to be read, never to be changed."""
        crew = self.crew
        return Inside(
            self.layout, self.config, self.clock, crew.stats, crew.tables, crew.mailboxes, crew.pool, crew.gate, crew.fences
        )

    @property
    def fenced_blocks(self) -> frozenset[tuple[int, int]]:
        """(group id, local block id) that a store call past its deadline may still write; never reuse one while it is here."""
        return self.fences.blocks()

    @property
    def lookup_errors(self) -> int:
        return self.crew.stats.lookup_errors

    @property
    def pending_saves(self) -> int:
        """Save tasks (all saves of one layer of one step) that are unfinished."""
        return self.gate.pending

    @property
    def invariants_checked(self) -> int:
        return 1 + (0 if self.crew.audit is None else self.crew.audit.checked)

    def violations(self) -> list[str]:
        """Every invariant found broken so far (with `audit`), and once drained, whether the session counts add up (I2)."""
        return self.crew.violations()


def _opened() -> Latch:
    latch = Latch()
    latch.open()
    return latch
