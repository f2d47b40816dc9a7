"""What vLLM-Ascend's layers report while they run, and the compute window around their attention. Not verified on hardware.

vLLM-Ascend calls the connector four times for a layer (docs/ascend.md, "Hooks", names the functions):

    wait_for_layer_load(name)    before the layer's cache is written or read
    on_kv_cache_written(name)    the cache is written, the operator comes next; full attention gives an EMPTY name
    (window)                     the operator is being launched: `ascend_windows` puts this one there
    save_kv_layer(name)          the layer is over; a state layer (GDN) calls only this one, with an EMPTY name

`AscendLayers` finds out which layer an empty name means, and tells a `LayerHooks`. It never raises into the forward pass for an
order that it does not know: it reports no more layers of the step, and `end_step` says why the step must be aborted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvactors.core.events import DeviceEvent, Devices
from kvactors.errors import StepError
from kvactors.log import get_logger

log = get_logger("kvactors.vllm")


class LayerHooks(Protocol):
    """What a worker does when a layer of the model reports. Names it does not know are ignored."""

    def wait_layer(self, layer_name: str, /) -> None:
        """Returns when the layer's loads have ended."""
        ...

    def layer_entry(self, layer_name: str, /, event: DeviceEvent | None = None) -> None:
        """The layer's attention caches are written once `event` fires: put them, and get what later layers need."""
        ...

    def layer_exit(self, layer_name: str, /, event: DeviceEvent | None = None) -> None:
        """Everything of the layer is written once `event` fires; the checkpoint too, if it had none in this step."""
        ...

    def checkpoint(self, layer_name: str, /) -> None:
        """The layer's attention was launched: waits while too many saves are unfinished."""
        ...


@contextmanager
def compute_window(hooks: LayerHooks, layer_name: str, devices: Devices) -> Iterator[None]:
    """The time in which transfers of a layer are hidden: its body launches the attention operator, and nothing else.

    At its entry the layer's caches are written, and an event on the compute stream says when. If the body raises there is no
    checkpoint: whoever owns the step aborts it.
    """
    hooks.layer_entry(layer_name, devices.record())
    yield
    hooks.checkpoint(layer_name)


class StateLayerOrder:
    """Which layer an empty name means: the next state layer of the step.

    The layers that report by their names prove the order: before each of them exactly the state layers in front of it must have
    reported. A step in which no state layer reports is in order: other versions, and other kinds of states, have no such hook.

    Args:
        names_in_order: the model's layers as the forward pass runs them, without drafts.
        named: those among them that report by their names (attention); the others report with an empty one.
    """

    def __init__(self, names_in_order: Sequence[str], named: Collection[str] = ()) -> None:
        named = frozenset(named)
        self._states = [name for name in names_in_order if name not in named]
        self._states_before: dict[str, int] = {}
        states = 0
        for name in names_in_order:
            if name in named:
                self._states_before[name] = states
            else:
                states += 1
        self.begin()

    def begin(self) -> None:
        """A step begins: the first state layer is next."""
        self._reported = 0
        self._silent = False
        self._seen: set[str] = set()

    def next_state(self, says: str = "") -> str | None:
        """The state layer that reports now; None for one that is not the model's own.

        Args:
            says: the name, where the caller happens to know it.

        Raises:
            StepError: all state layers have reported, or another one is next.
        """
        if says and says not in self._states:
            return None
        if self._silent:
            raise StepError(f"a state layer ({says or 'unnamed'}) reported, but none in front of an earlier layer had")
        if self._reported == len(self._states):
            raise StepError(f"a state layer ({says or 'unnamed'}) reported after all {len(self._states)} of this step had")
        name = self._states[self._reported]
        if says and says != name:
            raise StepError(f"state layer {says} reported where {name} is next")
        self._reported += 1
        return name

    def passed(self, name: str) -> None:
        """A layer reported by its name; nothing for one that is not the model's own.

        Raises:
            StepError: it did so before, or other state layers have reported than those in front of it.
        """
        before = self._states_before.get(name)
        if before is None:
            return
        if name in self._seen:
            raise StepError(f"layer {name} reported twice in one step")
        self._seen.add(name)
        if before and not self._reported:
            self._silent = True
        elif before != self._reported:
            raise StepError(f"layer {name} reported after {self._reported} state layers, with {before} in front of it")

    def end(self) -> None:
        """The forward pass is over.

        Raises:
            StepError: only some of the state layers reported.
        """
        if 0 < self._reported < len(self._states):
            missing = self._states[self._reported]
            raise StepError(f"only {self._reported} of {len(self._states)} state layers reported; {missing} did not")


class AscendLayers:
    """vLLM-Ascend's calls, told to a `LayerHooks`; outside of a step (profiling, dummy batches) nothing is told.

    Args:
        hooks: who is told.
        devices: where events are recorded, on the compute stream.
        order: the model's layers, for names that are empty.
    """

    def __init__(self, hooks: LayerHooks, devices: Devices, order: StateLayerOrder) -> None:
        self._hooks, self._devices, self._order = hooks, devices, order
        self._running = False
        self._begin()

    def _begin(self) -> None:
        self._doubt = ""
        self._current = self._entered = self._state = ""
        self._in_window = False
        self._order.begin()

    def begin_step(self) -> None:
        """A step with a forward pass begins."""
        self._begin()
        self._running = True

    def end_step(self) -> str:
        """The forward pass is over. Returns why the step must be aborted, or "" if it may be published."""
        if self._running and not self._doubt:
            try:
                self._order.end()
            except StepError as e:
                self._distrust(e)
        self._running = False
        return self._doubt

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The layer begins; may be called again for the same layer."""
        if self._running:
            self._current = layer_name
            self._hooks.wait_layer(layer_name)

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        """The layer's caches are written; an empty name means the layer that waited for its loads last."""
        name = layer_name or self._current
        if self._running and not self._doubt and name and name != self._entered:
            self._entered = name
            self._hooks.layer_entry(name, self._devices.record())

    @contextmanager
    def window(self, layer_name: str = "", *, written: bool = True) -> Iterator[None]:
        """The compute window of a layer, around the launch of its operator; a window inside of another adds nothing.

        Args:
            layer_name: empty for the layer that waited for its loads last.
            written: whether its caches are written by now. Else the body calls `on_kv_cache_written`; a version whose body does
                not has no window.
        """
        name = layer_name or self._current
        if not self._running or self._doubt or not name or self._in_window:
            yield
            return
        self._in_window = True
        try:
            if written and name != self._entered:
                self._entered = name
                with compute_window(self._hooks, name, self._devices):
                    yield
            else:
                yield
                if name == self._entered:
                    self._hooks.checkpoint(name)
        finally:
            self._in_window = False

    @contextmanager
    def state_layer(self, name: str) -> Iterator[None]:
        """The body is the compute of this state layer: an empty name in it means this one."""
        self._state, before = name, self._state
        try:
            yield
        finally:
            self._state = before

    def save_kv_layer(self, layer_name: str) -> None:
        """The layer is over; an empty name means a state layer."""
        if not self._running or self._doubt:
            return
        try:
            if layer_name:
                self._order.passed(layer_name)
                name: str | None = layer_name
            else:
                name = self._order.next_state(self._state)
        except StepError as e:
            self._distrust(e)
            return
        if layer_name:
            self._current = self._entered = ""
        if name:
            self._hooks.layer_exit(name, self._devices.record())

    def _distrust(self, error: StepError) -> None:
        self._doubt = f"the layers of this step did not report in the model's order: {error}"
        log.warning(f"{self._doubt}; nothing of the step is published")
