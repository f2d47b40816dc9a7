"""A step, as its caller holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvactors.actors.step_state import StepState
from kvactors.core.events import DeviceEvent
from kvactors.core.sessions import Owner
from kvactors.core.steps import FailedLoad, Phase

if TYPE_CHECKING:
    from kvactors.engine.asynchronous import Engine


class StepView:
    """What both faces of a step share."""

    def __init__(self, engine: Engine, state: StepState) -> None:
        self._engine = engine
        self._state = state

    @property
    def id(self) -> int:
        return self._state.id

    @property
    def problems(self) -> Mapping[str, str]:
        """Requests that take no part in the step, and why."""
        return self._state.problems

    @property
    def failures(self) -> Mapping[str, FailedLoad]:
        """Requests whose load failed so far."""
        return self._state.failures()

    @property
    def fenced_blocks(self) -> frozenset[tuple[int, int]]:
        """(group id, local block id) of this step that a store call past its deadline may still write."""
        return frozenset(self._state.fenced)

    @property
    def saved(self) -> Sequence[Owner]:
        """Whose blocks this step committed; all of them once it has settled."""
        return tuple(self._state.saved)

    @property
    def passed_through(self) -> bool:
        """Whether nothing is moved for this step."""
        return self._state.passed_through

    def layer_ready(
        self, layer: int, event: DeviceEvent | None = None, phase: Phase = Phase.EXIT, *, save: bool = True
    ) -> None:
        """The layer's cache is written once `event` (default: recorded now) fires: save it, load ahead. Never blocks.

        Without `save` only the loads go on; the layer's saves follow with a later call for it.
        """
        self._engine.driver.signal(self._state, layer, event, phase, save=save)

    def fail(self, request_id: str, layer: int, reason: str) -> None:
        """Another rank's load of the request failed on stage layer `layer`: what is computed from there on is wrong here too.

        Call it before that layer is signalled; nothing of the request from there on is published (I12).

        Raises:
            StepError: the stage has no such layer.
        """
        self._engine.driver.fail(self._state, request_id, layer, reason)


class Step(StepView):
    """One step, for tasks on the engine's loop."""

    async def wait_layer(self, layer: int) -> frozenset[str]:
        """Waits until every load of the stage layer has ended; returns the requests whose load failed on it or before it.

        Raises:
            LoadFailedError: in strict mode, instead of returning a non-empty set.
        """
        engine, state = self._engine, self._state
        task = engine.driver.want(state, layer)
        in_time = task is None or await task.latch.wait_async(engine.patience_s)
        return engine.driver.waited(state, layer, in_time)

    async def checkpoint(self, layer: int) -> None:  # noqa: ARG002 - the layer names the place, for the reader
        """Waits while more than `max_pending_saves` save tasks are unfinished. Prefetched loads are not waited for."""
        while (blocked := self._engine.gate.blocked()) is not None:
            self._engine.driver.in_time(await blocked.wait_async(self._engine.patience_s), "checkpoint: the pending saves")

    async def end(self, event: DeviceEvent | None = None) -> None:
        """Ends the step; returns when every save and every started load of it has ended, so blocks may be reused."""
        self._engine.driver.finish(self._state, event)
        self._engine.driver.in_time(await self._state.ended.wait_async(self._engine.patience_s), f"end of step {self.id}")

    async def abort(self, reason: str = "by the caller") -> None:
        """No new transfer starts, those under way are awaited, every put of the step is revoked."""
        self._engine.driver.abandon(self._state, reason)
        self._engine.driver.in_time(await self._state.ended.wait_async(self._engine.patience_s), f"abort of step {self.id}")

    async def settled(self) -> None:
        """Waits until every session of the step has reached its end."""
        self._engine.driver.in_time(
            await self._state.settled.wait_async(self._engine.driver.settle_patience_s), f"step {self.id}"
        )
