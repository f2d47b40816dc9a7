"""The compute thread's side of a step: what it counts, what it posts, and what it reads, without ever blocking.

Posting is an append to a deque; a layer for which nobody has anything to do posts nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from kvactors.actors.actor import Post
from kvactors.actors.latch import SaveGate
from kvactors.actors.pool import TransferPool
from kvactors.actors.step_state import LayerTask, StepState
from kvactors.core.config import EngineConfig
from kvactors.core.events import DeviceEvent, Devices
from kvactors.core.layout import GroupKind, KVLayout
from kvactors.core.steps import Phase
from kvactors.errors import ConfigError, DeadlineError, LoadFailedError, StepError
from kvactors.messages import AbortStep, EndStep, LayerReady, LayerWanted


class StepDriver:
    """See the module.

    Attributes:
        open_step: the step that its caller did not end or abort yet.
    """

    def __init__(
        self,
        layout: KVLayout,
        config: EngineConfig,
        gate: SaveGate,
        devices: Devices,
        hookless_layers: Sequence[int],
        pool: TransferPool,
        post: Post,
    ) -> None:
        bad = sorted(layer for layer in hookless_layers if not 0 <= layer < layout.stage_layers)
        if bad:
            raise ConfigError(f"hookless_layers {bad}: this stage's layers are 0 to {layout.stage_layers - 1}")
        self.open_step: StepState | None = None
        self._config, self._gate, self._devices, self._pool, self._post = config, gate, devices, pool, post
        self._layers = layout.stage_layers
        self._hookless = frozenset(hookless_layers)
        self._state_layers = frozenset(
            layout.stage_layer(layer) for g in layout.groups if g.kind is GroupKind.STATE for layer in g.layers
        )

    def signal(self, state: StepState, layer: int, event: DeviceEvent | None, phase: Phase, *, save: bool = True) -> None:
        """A layer is ready: counts its save task, and posts only if somebody has something to do.

        A layer that holds any recurrent state posts all its saves after compute: at its entry the state is the previous
        step's.

        Raises:
            StepError: the stage has no such layer, or the phase is no `Phase`.
        """
        self._check_layer("layer_ready", layer)
        if not isinstance(phase, Phase):
            raise StepError(f"layer_ready({layer}): phase is {phase!r}; give a Phase")
        if state.passed_through or state.aborted or state.closed:
            return
        loads = state.loads.get(layer)
        if loads is not None and not loads.ended:
            state.fail_layer(layer, f"layer {layer} was signalled before its loads had been waited for")
        saves = save and layer in state.save_layers and layer not in state.saves
        saves = saves and (phase is Phase.EXIT or layer not in self._state_layers)
        if saves:
            self._gate.add()
            state.begin_save(layer, self._gate.done)
        window = bisect_right(state.load_layers, layer) + self._config.prefetch_layers
        if saves or (state.window_sent < window and state.window_sent < len(state.load_layers)):
            state.window_sent = window
            self._post(LayerReady(state.id, layer, self._devices.record() if event is None else event, phase, saves))

    def want(self, state: StepState, layer: int) -> LayerTask | None:
        """The layer's loads, if they have to be waited for; tells the engine that somebody does, if it could do anything about
        it: not if all of them are planned and nothing waits for its turn.

        Raises:
            StepError: the stage has no such layer.
        """
        self._check_layer("wait_layer", layer)
        task = state.loads.get(layer)
        if task is None or task.ended:
            return None
        if not state.passed_through and not (task.planned and not self._pool.waiting):
            self._post(LayerWanted(state.id, layer, self._devices.record()))
        return task

    def fail(self, state: StepState, request_id: str, layer: int, reason: str) -> None:
        """Another rank's load of the request failed on `layer`; nothing if the request takes no part in the step.

        Raises:
            StepError: the stage has no such layer.
        """
        self._check_layer("fail", layer)
        if request_id in state.requests:
            state.fail_request(request_id, layer, reason)

    def record(self) -> DeviceEvent:
        """An event for the work queued so far: what a caller that gives none means."""
        return self._devices.record()

    def _check_layer(self, call: str, layer: int) -> None:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < self._layers:
            raise StepError(f"{call}({layer!r}): this stage's layers are the whole numbers 0 to {self._layers - 1}")

    def waited(self, state: StepState, layer: int, in_time: bool) -> frozenset[str]:
        """What `wait_layer` returns once its wait is over.

        Raises:
            LoadFailedError: in strict mode, if a load failed.
        """
        if not in_time:
            state.fail_layer(layer, f"layer {layer} did not arrive before the deadline")
            state.fence_layer(layer)
        failed = state.failed_by(layer)
        if failed and self._config.strict:
            reasons = "; ".join(f"{f.request_id}: {f.reason}" for f in state.failures().values())
            raise LoadFailedError(f"layer {layer}: the loads of {sorted(failed)} failed ({reasons})")
        return failed

    def finish(self, state: StepState, event: DeviceEvent | None) -> None:
        """Asks for the end of a step; that is the exit of its hookless layers, and of no others."""
        for layer in sorted(self._hookless & state.save_layers):
            self.signal(state, layer, event, Phase.EXIT)
        if not state.ended.is_open and not state.aborted:
            self._post(EndStep(state.id))
        self._over(state)

    def abandon(self, state: StepState, reason: str) -> None:
        """Asks for the step to be aborted."""
        state.aborted = True
        if not state.ended.is_open:
            self._post(AbortStep(state.id, reason))
        self._over(state)

    def _over(self, state: StepState) -> None:
        if self.open_step is state:
            self.open_step = None

    @property
    def patience_s(self) -> float:
        """How long a caller waits for an answer at most (I9), seconds: a preparation may take the step's deadline; what it
        leads to waits that long for an event or a worker, and a call may take its own; once more, for what follows on it."""
        return 2 * self._config.step_deadline_s + 2 * self._config.call_deadline_s

    @property
    def settle_patience_s(self) -> float:
        """How long the sessions of a step that has ended may take to their end: a commit, and a revoke with its retries."""
        return 5 * (self._config.step_deadline_s + self._config.call_deadline_s)

    @staticmethod
    def in_time(in_time: bool, what: str) -> None:
        """Raises `DeadlineError` unless `in_time`."""
        if not in_time:
            raise DeadlineError(f"{what}: no answer before the deadline; its blocks may still be in use")
