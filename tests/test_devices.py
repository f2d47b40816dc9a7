"""Device events: what a worker records, and the thread that asks whether they fired."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvactors.devices import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    CpuDevices,
    CudaDevices,
    EventPoller,
    ManualClock,
    NpuDevices,
    devices_for,
)
from kvactors.errors import ConfigError

TIMEOUT_S = 20.0
"""For a thread to do what it has to; nothing waits that long when all is well."""


class StandInEvent:
    """Answers queries as its runtime says; `None` there is a device error."""

    def __init__(self, runtime: StandInRuntime) -> None:
        self.runtime = runtime
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        assert self.recorded
        self.runtime.asked_on.add(threading.get_ident())
        answer = self.runtime.answers.pop(0) if self.runtime.answers else True
        if answer is None:
            raise RuntimeError("the device is lost")
        return answer


class StandInRuntime:
    """Like `torch.cuda` and `torch.npu`: one device, whose events answer queries from a list, and then fire."""

    def __init__(self, *answers: bool | None, available: bool = True) -> None:
        self.answers, self.available = list(answers), available
        self.asked_on: set[int] = set()
        self.set_on: dict[int, int] = {}

    def Event(self) -> StandInEvent:
        return StandInEvent(self)

    def is_available(self) -> bool:
        return self.available

    def current_device(self) -> int:
        return 3

    def set_device(self, index: int) -> None:
        self.set_on[threading.get_ident()] = index


class NoSleep(threading.Condition):
    """A condition whose timed waits return at once and move a clock; its untimed ones are real, and are told to a test."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.waits: list[float | None] = []
        self.idle = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        if timeout is None:
            self.idle.release()
            return super().wait()
        self.clock.advance(timeout)
        return False


class Polling:
    """A poller whose thread never sleeps, and what became of its events."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.changed = NoSleep(self.clock)
        self.poller = EventPoller(self.clock.now, self.changed)
        self.called: list[str] = []

    def until_idle(self) -> None:
        assert self.changed.idle.acquire(timeout=TIMEOUT_S), "the thread did not come to rest"

    def add(self, name: str, fired: Callable[[], bool], within_s: float = 1.0) -> None:
        self.poller.add(fired, lambda: self.called.append(name), within_s)


@pytest.fixture
def polling() -> Polling:
    return Polling()


def answers(*given: bool | None) -> Callable[[], bool]:
    event = StandInRuntime(*given).Event()
    event.record()
    return event.query


def test_the_pause_grows_and_the_thread_blocks_when_nothing_is_pending(polling: Polling) -> None:
    polling.add("a", answers(*[False] * 9, True))
    polling.until_idle()
    assert polling.called == ["a"]
    *pauses, last = polling.changed.waits
    assert last is None, "with nothing pending it waits for a notice, not for a time"
    growing = [FIRST_PAUSE_S * 2**n for n in range(9)]
    assert pauses == [min(pause, LONGEST_PAUSE_S) for pause in growing]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_it_asks_often_again_after_an_event_fired(polling: Polling) -> None:
    first, second = [False] * 6, [False] * 8

    def one() -> bool:
        return not first or first.pop()

    def other() -> bool:
        return not second or second.pop()

    with polling.changed:  # both are added before the thread looks
        polling.add("one", one)
        polling.add("other", other)
    polling.until_idle()
    assert polling.called == ["one", "other"]
    pauses = [pause for pause in polling.changed.waits if pause is not None]
    assert pauses[5] == LONGEST_PAUSE_S
    assert pauses[6] == FIRST_PAUSE_S, "the first one fired in the round before"


def test_an_event_past_its_deadline_is_dropped(polling: Polling, caplog: pytest.LogCaptureFixture) -> None:
    polling.add("never", lambda: False, within_s=10 * LONGEST_PAUSE_S)
    polling.until_idle()
    assert polling.called == []
    assert "before its deadline" in caplog.text
    asked = len(polling.changed.waits) - 1
    assert 10 <= asked <= 20, "ten of the longest pauses, and the shorter ones before"


def test_a_device_error_drops_its_event_and_no_other(polling: Polling, caplog: pytest.LogCaptureFixture) -> None:
    with polling.changed:
        polling.add("broken", answers(False, None))
        polling.add("sound", answers(False, False, False, True))
    polling.until_idle()
    assert polling.called == ["sound"]
    assert "the device is lost" in caplog.text


def test_a_callback_that_raises_takes_nobody_with_it(polling: Polling, caplog: pytest.LogCaptureFixture) -> None:
    def bad() -> None:
        raise ValueError("a bad callback")

    polling.poller.add(answers(False, True), bad, 1.0)
    polling.until_idle()
    polling.add("next", answers(False, True))
    polling.until_idle()
    assert polling.called == ["next"]
    assert "a bad callback" in caplog.text


def test_one_thread_serves_all_devices() -> None:
    done = threading.Semaphore(0)
    runtimes = [StandInRuntime(False, False, True) for _ in range(2)]
    for runtime in runtimes:
        CudaDevices(runtime=runtime).record().on_fire(lambda: done.release())
    for _ in runtimes:
        assert done.acquire(timeout=TIMEOUT_S)
    threads = set.union(*(runtime.asked_on for runtime in runtimes)) - {threading.get_ident()}
    assert len(threads) == 1
    (thread,) = [t for t in threading.enumerate() if t.ident in threads]
    assert thread.daemon


@pytest.mark.parametrize("kind", [CudaDevices, NpuDevices])
def test_an_event_calls_back_once_when_it_fires(kind: type[CudaDevices] | type[NpuDevices], polling: Polling) -> None:
    runtime = StandInRuntime(False, False, False, True)
    event = kind(runtime=runtime, poller=polling.poller).record()
    assert not event.fired()
    called: list[int] = []
    event.on_fire(lambda: called.append(threading.get_ident()))
    assert called == []
    polling.until_idle()
    assert len(called) == 1
    assert called != [threading.get_ident()]
    assert event.fired()
    assert runtime.answers == [], "an event that fired is not asked again"
    event.on_fire(lambda: called.append(threading.get_ident()))
    assert called[1:] == [threading.get_ident()], "one that fired calls back at once"
    assert runtime.set_on.keys() == runtime.asked_on, "every thread that asks has the device set first"
    assert set(runtime.set_on.values()) == {runtime.current_device()}


def test_an_error_of_the_device_reaches_who_asks() -> None:
    event = CudaDevices(runtime=StandInRuntime(None, None)).record()
    with pytest.raises(RuntimeError, match="the device is lost"):
        event.fired()
    with pytest.raises(RuntimeError, match="the device is lost"):
        event.on_fire(lambda: None)


def test_devices_by_type() -> None:
    assert isinstance(devices_for("cpu"), CpuDevices)
    assert devices_for("cpu").record().fired()
    with pytest.raises(ConfigError, match="'xpu'; supported are cpu, cuda, npu"):
        devices_for("xpu")


def torch_with(monkeypatch: pytest.MonkeyPatch, **namespaces: Any) -> None:
    torch = ModuleType("torch")
    vars(torch).update(namespaces)
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_absent_modules_and_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    with pytest.raises(ConfigError, match="cuda events need torch, which cannot be imported"):
        devices_for("cuda")
    torch_with(monkeypatch, cuda=StandInRuntime(available=False))
    with pytest.raises(ConfigError, match="cuda events need a device, and torch finds none"):
        devices_for("cuda")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigError, match="npu events need torch_npu, which cannot be imported"):
        devices_for("npu")
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(ConfigError, match=r"this torch has no torch\.npu"):
        devices_for("npu")
    torch_with(monkeypatch, npu=StandInRuntime())
    assert isinstance(devices_for("npu"), NpuDevices)
    with pytest.raises(ConfigError, match="deadline_s is 0"):
        NpuDevices(0.0)


def has(device: str) -> bool:
    try:
        __import__("torch_npu" if device == "npu" else "torch")
        runtime = getattr(sys.modules["torch"], device)
    except (ImportError, OSError, AttributeError):
        return False
    return bool(runtime.is_available())


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(name, marks=[getattr(pytest.mark, name), pytest.mark.skipif(not has(name), reason=f"no {name} device")])
        for name in ("cuda", "npu")
    ],
)
def test_a_real_event_fires_after_the_work_before_it(device: str) -> None:
    import torch

    devices = devices_for(device)
    work = torch.randn(4096, 4096, device=device)
    for _ in range(50):
        work = work @ work / 64
    event = devices.record()
    fired = threading.Event()
    event.on_fire(fired.set)
    assert fired.wait(TIMEOUT_S)
    assert event.fired()
