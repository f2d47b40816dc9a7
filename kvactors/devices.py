"""Device events and clocks: the real ones, and manual ones for tests.

A device event says "all work queued before this point is done". On a CPU that is true as soon as it is asked. CUDA and NPU
events have no wait with a deadline, so one thread of the process asks them again and again: the one place that polls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvactors.core.events import DeviceEvent, Devices
from kvactors.errors import ConfigError
from kvactors.log import get_logger

FIRST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 1e-3
"""How long the polling thread sleeps: at first after an event was added or fired, and at most."""

EVENT_DEADLINE_S = 60.0
"""How long an event is polled. Whoever waits for it has a deadline of its own; this one only bounds the polling."""

log = get_logger("kvactors.devices")


class MonotonicClock:
    """The process's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that only moves when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class CpuEvent:
    """Fired from the start: CPU work is done when the call that did it returned."""

    __slots__ = ()

    def fired(self) -> bool:
        return True

    def on_fire(self, callback: Callable[[], None]) -> None:
        callback()


class ManualEvent:
    """Fires when a test says so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fired = False
        self._callbacks: list[Callable[[], None]] = []

    def fired(self) -> bool:
        return self._fired

    def on_fire(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._fired:
                self._callbacks.append(callback)
                return
        callback()

    def fire(self) -> None:
        with self._lock:
            self._fired = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


_CPU_EVENT = CpuEvent()


class CpuDevices:
    """Events of a CPU worker."""

    def record(self) -> DeviceEvent:
        return _CPU_EVENT


@dataclass(slots=True)
class _Pending:
    fired: Callable[[], bool]
    callback: Callable[[], None]
    deadline_s: float


class EventPoller:
    """Asks events whether they fired, from one daemon thread, and calls back those that wait for them.

    The thread starts with the first event and blocks while there is none. Between two rounds it sleeps, longer each time, until
    an event is added or fires. An event past its deadline, or one whose device reports an error, is dropped: its callback is
    never called, and whoever waits for it ends at its own deadline.

    Args:
        changed: what the thread sleeps on; a test gives one that does not sleep.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, changed: threading.Condition | None = None) -> None:
        self._now = now
        self._changed = threading.Condition() if changed is None else changed
        self._added: list[_Pending] = []
        self._thread: threading.Thread | None = None

    def add(self, fired: Callable[[], bool], callback: Callable[[], None], within_s: float) -> None:
        """Calls `callback` once, on the polling thread, when `fired` answers yes within `within_s` seconds."""
        with self._changed:
            self._added.append(_Pending(fired, callback, self._now() + within_s))
            if self._thread is None or not self._thread.is_alive():  # a fork leaves its child without the thread
                self._thread = threading.Thread(target=self._run, name="kvactors-events", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        pending: list[_Pending] = []
        pause_s = FIRST_PAUSE_S
        while True:
            with self._changed:
                if not self._added:
                    self._changed.wait(pause_s if pending else None)
                new, self._added = self._added, []
            before = len(pending)
            pending = [one for one in pending + new if self._waits(one)]
            quiet = not new and len(pending) == before
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if quiet else FIRST_PAUSE_S

    def _waits(self, one: _Pending) -> bool:
        """Whether to ask again; else it was called back or dropped."""
        try:
            if one.fired():
                one.callback()
                return False
        except Exception:
            log.warning("a device event, or what waits for it, raised; nothing waits for it any longer", exc_info=True)
            return False
        if self._now() < one.deadline_s:
            return True
        log.warning("a device event did not fire before its deadline; nothing waits for it any longer")
        return False


_POLLER = EventPoller()


class _Stream:
    """What CUDA and NPU events share: torch's event type, and the device that a thread must have set to ask one."""

    def __init__(self, runtime: Any, deadline_s: float, poller: EventPoller) -> None:
        self.runtime, self.deadline_s, self.poller = runtime, deadline_s, poller
        self.index = runtime.current_device()
        self._ready = threading.local()

    def enter(self) -> None:
        """Sets the device in a thread of ours that has none: an NPU's events need it, and CUDA would open another device."""
        if not getattr(self._ready, "entered", False):
            self.runtime.set_device(self.index)
            self._ready.entered = True


class StreamEvent:
    """An event that was recorded on a compute stream."""

    __slots__ = ("_event", "_stream")

    def __init__(self, stream: _Stream, event: Any) -> None:
        self._stream = stream
        self._event: Any = event

    def fired(self) -> bool:
        event = self._event
        if event is None:
            return True
        self._stream.enter()
        if not event.query():
            return False
        self._event = None
        return True

    def on_fire(self, callback: Callable[[], None]) -> None:
        if self.fired():
            callback()
        else:
            self._stream.poller.add(self.fired, callback, self._stream.deadline_s)


class _StreamDevices:
    """Events on the current stream of one device.

    Make it on the thread that computes: its current device is the one whose events are recorded.

    Args:
        deadline_s: how long an event is polled; after that its callback is dropped.
        runtime: torch's namespace for the device; a test gives a stand-in.

    Raises:
        ConfigError: torch, what it needs for this device, or the device is absent.
    """

    device_type = ""
    modules: tuple[str, ...] = ("torch",)

    def __init__(self, deadline_s: float = EVENT_DEADLINE_S, *, runtime: Any = None, poller: EventPoller | None = None) -> None:
        if deadline_s <= 0:
            raise ConfigError(f"deadline_s is {deadline_s}: give a number of seconds above 0")
        if runtime is None:
            runtime = self._find()
        if not runtime.is_available():
            raise ConfigError(f"{self.device_type} events need a device, and torch finds none")
        self._stream = _Stream(runtime, deadline_s, _POLLER if poller is None else poller)

    def record(self) -> DeviceEvent:
        event = self._stream.runtime.Event()
        event.record()
        return StreamEvent(self._stream, event)

    def _find(self) -> Any:
        for name in self.modules:
            try:
                import_module(name)
            except (ImportError, OSError) as e:  # torch_npu loads the driver's libraries
                raise ConfigError(f"{self.device_type} events need {name}, which cannot be imported here: {e}") from e
        runtime = getattr(import_module("torch"), self.device_type, None)
        if runtime is None:
            raise ConfigError(f"{self.device_type} events: this torch has no torch.{self.device_type}")
        return runtime


class CudaDevices(_StreamDevices):
    """Events of a CUDA worker."""

    device_type = "cuda"


class NpuDevices(_StreamDevices):
    """Events of an Ascend worker. Not verified on hardware."""

    device_type = "npu"
    modules = ("torch", "torch_npu")


_DEVICES: dict[str, Callable[[], Devices]] = {"cpu": CpuDevices, "cuda": CudaDevices, "npu": NpuDevices}


def devices_for(device_type: str) -> Devices:
    """The events of a worker, by the type of the device that it computes on.

    Raises:
        ConfigError: no such type here, or the device is absent.
    """
    make = _DEVICES.get(device_type)
    if make is None:
        raise ConfigError(f"no device events for {device_type!r}; supported are {', '.join(_DEVICES)}")
    return make()
