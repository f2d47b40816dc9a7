"""The face that a synchronous forward pass calls: an engine on a loop and a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from kvactors.actors import loops
from kvactors.actors.step_state import StepState
from kvactors.core.answers import listed
from kvactors.core.config import EngineConfig
from kvactors.core.events import DeviceEvent
from kvactors.core.layout import KVLayout
from kvactors.core.ranges import Bases
from kvactors.core.reachability import Hit
from kvactors.core.stats import EngineStats
from kvactors.core.steps import GroupBlocks, ReleaseReason, StepRequest
from kvactors.core.store import Store
from kvactors.core.story import StoryBook
from kvactors.engine.asynchronous import Engine, Inside
from kvactors.engine.crew import CLOSED
from kvactors.engine.intake import Answer
from kvactors.engine.steps import StepView
from kvactors.errors import DeadlineError, EngineClosedError, StepError
from kvactors.messages import LoadDone


class BlockingEngine:
    """Takes the same arguments as `Engine`; its methods block the calling thread, with deadlines, and never poll.

    The loop thread is a daemon. If it dies, every latch is opened with failures and later calls pass through.
    """

    def __init__(
        self, layout: KVLayout, store: Store, bases: Bases, config: EngineConfig | None = None, **options: Any
    ) -> None:
        self._ready = threading.Event()
        self._engine = Engine(layout, store, bases, config, **options)
        self._loop = loops.new_loop()
        self._step_thread = 0
        self._stopped: asyncio.Event | None = None
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="kvactors loop", daemon=True)
        self._thread.start()
        if not self._ready.wait(loops.START_S) or self._failed is not None:
            raise DeadlineError(f"the engine's loop thread did not start: {self._failed!r}")

    def _main(self) -> None:
        try:
            with _switching.every(self._engine.config.switch_interval_s):
                self._loop.run_until_complete(self._serve())
        except BaseException as e:
            self._failed = e
        finally:
            self._engine.crew.give_up(CLOSED if self._failed is None else f"the loop died: {self._failed!r}")
            self._ready.set()
            self._end_tasks()
            self._loop.close()

    def _end_tasks(self) -> None:
        """What a loop that died left behind ends now, while there still is a loop to end it on."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _serve(self) -> None:
        self._stopped = asyncio.Event()
        async with self._engine:
            self._ready.set()
            await self._stopped.wait()

    def close(self) -> None:
        """Stops the loop and its thread; what is under way is reported failed. Idempotent; does not close the store."""
        if self._stopped is not None:
            loops.call_on(self._loop, self._stopped.set)
        self._thread.join(loops.START_S)

    def __enter__(self) -> BlockingEngine:
        if not self._thread.is_alive():
            raise EngineClosedError("this engine was closed; make a new one")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin_step(self, requests: Sequence[StepRequest], event: DeviceEvent | None = None) -> BlockingStep:
        """See `Engine.begin_step`."""
        self._step_thread = threading.get_ident()
        return BlockingStep(self._engine, self._engine.open_step(requests, event))

    # -- lookups, loads, requests --------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes], prompt_tokens: int, deadline_s: float | None = None) -> Hit:
        """See `Engine.lookup`."""
        pending = self.start_lookup(hashes, prompt_tokens, deadline_s)
        pending.wait(self._engine.patience_s)
        return pending.hit

    def start_lookup(self, hashes: Sequence[bytes], prompt_tokens: int, deadline_s: float | None = None) -> PendingHit:
        """Asks, and returns at once; see `Engine.lookup` for what is asked."""
        return PendingHit(self._engine.ask(hashes, prompt_tokens, deadline_s))

    def load(
        self,
        request_id: str,
        blocks: Mapping[int, GroupBlocks],
        hashes: Sequence[bytes],
        event: DeviceEvent | None = None,
    ) -> Load:
        """Starts a load outside any step; returns a handle at once."""
        return Load(self._engine, [request_id], self._engine.start_load(request_id, blocks, hashes, event))

    def load_many(self, requests: Sequence[StepRequest], event: DeviceEvent | None = None) -> Load:
        """Starts one load for several requests; returns a handle at once. See `Engine.load_many`."""
        state = self._engine.start_loads(requests, event)
        return Load(self._engine, [r.request_id for r in requests], state)

    def release(self, request_id: str, reason: ReleaseReason = ReleaseReason.FINISHED, *, wait: bool = True) -> None:
        """See `Engine.release`. Without `wait` it returns at once; a load's own handle then says when its blocks are free."""
        latch = self._engine.start_release(request_id, reason)
        if wait:
            self._engine.driver.in_time(latch.wait(self._engine.patience_s), f"release of {request_id!r}")

    def forget(self, request_id: str) -> None:
        self._engine.forget(request_id)

    def drain(self, deadline_s: float | None = None) -> None:
        """See `Engine.drain`. From the thread that has a step open, that step is aborted: it could never end."""
        engine = self._engine
        step = engine.driver.open_step
        if step is not None and threading.get_ident() == self._step_thread:
            engine.driver.abandon(step, "drained from its own thread")
        answer = engine.start_drain(deadline_s)
        answer.latch.wait(engine.patience_s + (engine.config.drain_deadline_s if deadline_s is None else deadline_s))
        engine.drained(answer)

    # -- looking in ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def keep_stories(self) -> StoryBook:
        """See `Engine.keep_stories`."""
        return self._engine.keep_stories()

    def story(self, request_id: str) -> list[str]:
        return self._engine.story(request_id)

    def inside(self) -> Inside:
        """See `Engine.inside`."""
        return self._engine.inside()

    def violations(self) -> list[str]:
        return self._engine.violations()

    @property
    def fenced_blocks(self) -> frozenset[tuple[int, int]]:
        return self._engine.fenced_blocks

    def wait_unfenced(self, blocks: Collection[tuple[int, int]], seconds: float) -> bool:
        """Waits at most so long until no store call may write these blocks any more; whether that is so."""
        return self._engine.fences.wait_clear(blocks, seconds)

    @property
    def layout(self) -> KVLayout:
        return self._engine.layout

    @property
    def lookup_errors(self) -> int:
        """Lookups that ended in an error or too late; a plain read, where `stats` is a snapshot of everything."""
        return self._engine.lookup_errors

    @property
    def pending_saves(self) -> int:
        return self._engine.pending_saves

    @property
    def patience_s(self) -> float:
        """How long a caller may have to wait for an answer at most, seconds."""
        return self._engine.patience_s


class BlockingStep(StepView):
    """One step, for the compute thread. See `Step` for what each call means."""

    def wait_layer(self, layer: int, deadline_s: float | None = None) -> frozenset[str]:
        """See `Step.wait_layer`. Past `deadline_s` (by default the engine's own patience) whatever is missing has failed; its
        blocks may still be written until the step has ended."""
        engine, state = self._engine, self._state
        task = engine.driver.want(state, layer)
        patience = engine.patience_s if deadline_s is None else min(deadline_s, engine.patience_s)
        return engine.driver.waited(state, layer, task is None or task.latch.wait(patience))

    def checkpoint(self, layer: int) -> None:  # noqa: ARG002 - the layer names the place, for the reader
        while (blocked := self._engine.gate.blocked()) is not None:
            self._engine.driver.in_time(blocked.wait(self._engine.patience_s), "checkpoint: the pending saves")

    def end(self, event: DeviceEvent | None = None, patience_s: float | None = None) -> bool:
        """See `Step.end`. Past `patience_s` the step is aborted: what has not started never will, what is under way is awaited.

        Returns:
            whether the step ended by itself.
        """
        engine, state = self._engine, self._state
        engine.driver.finish(state, event)
        if patience_s is not None and not state.ended.wait(patience_s):
            self.abort(f"its saves took longer than {patience_s:g} s")
            return False
        engine.driver.in_time(state.ended.wait(engine.patience_s), f"end of step {self.id}")
        return True

    def abort(self, reason: str = "by the caller") -> None:
        self._engine.driver.abandon(self._state, reason)
        self._engine.driver.in_time(self._state.ended.wait(self._engine.patience_s), f"abort of step {self.id}")

    def settled_within(self, seconds: float) -> bool:
        """Waits at most so long until every session of the step has reached its end; whether all have."""
        return self._state.settled.wait(seconds)

    def settled(self) -> None:
        self._engine.driver.in_time(self._state.settled.wait(self._engine.driver.settle_patience_s), f"step {self.id}")


class PendingHit:
    """A lookup that was asked for."""

    def __init__(self, answer: Answer[Hit]) -> None:
        self._answer = answer

    def wait(self, seconds: float) -> bool:
        """Waits for the answer at most so long; whether it is there."""
        return self._answer.latch.wait(seconds)

    @property
    def done(self) -> bool:
        return self._answer.latch.is_open

    @property
    def hit(self) -> Hit:
        """What was found; a miss while there is no answer."""
        return self._answer.value


class Load:
    """A load outside any step, for one request or several."""

    def __init__(self, engine: Engine, request_ids: Sequence[str], state: StepState) -> None:
        self._engine, self._request_ids, self._state = engine, request_ids, state

    @property
    def done(self) -> bool:
        """Whether every block of every request arrived or failed; a plain read."""
        return self._state.ended.is_open

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls back once at the end, at once if that is past: on the thread that ends it, which must not be held up."""
        self._state.ended.on_open(callback)

    def wait(self, seconds: float) -> bool:
        """Waits for the end at most so long; whether it is there."""
        return self._state.ended.wait(seconds)

    def result(self, request_id: str | None = None) -> LoadDone:
        """Waits for the end of the whole load; what came of one request, which may be left out where there is only one.

        Raises:
            StepError: the load has no such request, or several and none was named.
            DeadlineError: no answer in time; the destinations may still be written.
        """
        if request_id is None and len(self._request_ids) == 1:
            request_id = self._request_ids[0]
        if request_id is None or request_id not in self._request_ids:
            raise StepError(f"result({request_id!r}): the load is for {listed(self._request_ids)}; name one of them")
        self._engine.driver.in_time(self._state.ended.wait(self._engine.patience_s), f"load for {request_id!r}")
        return self._engine.load_done(self._state, request_id)


class _Switching:
    """How often the interpreter switches threads, which is one number for all engines of a process: the shortest that one of
    them asks for, and as before once none does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: list[float] = []
        self._before = 0.0

    @contextlib.contextmanager
    def every(self, interval_s: float | None) -> Iterator[None]:
        if interval_s is None:
            yield
            return
        with self._lock:
            if not self._asked:
                self._before = sys.getswitchinterval()
            self._asked.append(interval_s)
            sys.setswitchinterval(min(self._asked))
        try:
            yield
        finally:
            with self._lock:
                self._asked.remove(interval_s)
                sys.setswitchinterval(min(self._asked, default=self._before))


_switching = _Switching()
