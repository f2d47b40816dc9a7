"""What a layer costs the compute thread: `wait_layer`, `layer_ready` and `checkpoint`, beside a bare wake of the same loop.

Every layer loads and saves some blocks of 16-byte entries. Between two layers the thread computes until what the last layer
started is done and the loop sleeps again, so that the latch of the next one is set before `wait_layer` is called: what is left
is the price of the calls themselves. One case does not wait for that: it has what the engine's own work costs the compute
thread while many blocks are on their way. The bare wake is a `call_soon_threadsafe` of nothing on the engine's own loop, after
as much compute, so that the loop sleeps then too.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvactors.bench.compute import NumpyCompute, python_compute
from kvactors.bench.figures import Answer, Figure, Target
from kvactors.bench.rig import Rig, arrived, layout_of

NAME = "hooks"
ENTRY_BYTES = 16

_ROUND_TRIPS = 3
"""Through the loop: an answer of the pool goes to a group, and from there to the coordinator."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """`steps`, `steps_many`: with one block, and with `many` of them; `compute_s`: of a layer, at least."""

    layers: int
    many: int
    steps: int
    steps_many: int
    compute_s: float


FULL, QUICK = Sizes(32, 4096, 60, 20, 1e-3), Sizes(32, 4096, 16, 3, 0.5e-3)


def measure(sizes: Sizes, say: Callable[[str], object], *, pinned: bool = False) -> Answer:
    """Both loops with one block; from one block to many; pure Python."""
    work = NumpyCompute()
    calls = work.calls_for(sizes.compute_s)
    figures = []
    limits = {"uvloop": (25, 250), "asyncio": (60, None)}
    for loop, (p50, p99) in limits.items():
        say(f"{loop}, one block")
        with Bench(sizes.layers, 1, asyncio_loop=loop == "asyncio", pinned=pinned) as one:
            for _ in range(sizes.steps + 1):
                one.step(lambda: work.run(calls))
            ours, wakes = one.taken()
        for what, rank, limit in (("p50", 0.5, p50), ("p99", 0.99, p99)):
            target = None if limit is None else Target("<=", limit, "µs")
            case = f"{loop}, numpy compute, one block, {what} / bare wake"
            figures.append(Figure(NAME, case, quantile(ours, rank), quantile(wakes, rank), "µs", target))
    figures += _from_one_to_many(sizes, work, calls, say, pinned)
    say("pure Python")
    with Bench(sizes.layers, 1, pinned=pinned) as one:
        plain = python_compute(sizes.compute_s)
        for _ in range(max(2, sizes.steps // 3)):
            one.step(plain)
        ours, wakes = one.taken()
    case = "uvloop, pure Python compute, one block, p50 / bare wake"
    figures.append(Figure(NAME, case, quantile(ours, 0.5), quantile(wakes, 0.5), "µs"))
    return Answer(figures)


def _from_one_to_many(sizes: Sizes, work: NumpyCompute, calls: int, say: Callable[[str], object], pinned: bool) -> list[Figure]:
    say(f"{sizes.many} blocks")
    figures = []
    for settle, what, target in ((True, "", Target("<=", 1.2)), (False, ", engine at work", None)):
        with Bench(sizes.layers, 1) as one, Bench(sizes.layers, sizes.many, pinned=pinned) as many:
            for _ in range(sizes.steps_many + 1):
                for bench in (one, many):
                    bench.step(lambda: work.run(calls), settle=settle)
            ours, baseline = (quantile(bench.taken()[0], 0.5) for bench in (many, one))
        case = f"uvloop, numpy compute{what}, {sizes.many} blocks / one block, p50"
        figures.append(Figure(NAME, case, ours, baseline, "µs", target))
    return figures


class Bench:
    """Steps whose layers all load and save `blocks` blocks."""

    def __init__(self, layers: int, blocks: int, *, asyncio_loop: bool = False, pinned: bool = False) -> None:
        layout = layout_of(1, layers, ENTRY_BYTES)
        store_bytes = 3 * blocks * (layout.object_bytes(0) + 64)
        self.rig = Rig(layout, 2 * blocks, store_bytes, asyncio_loop=asyncio_loop, pinned=pinned)
        self._blocks = blocks
        self._ids = {0: list(range(2 * blocks))}
        self._ours: list[float] = []
        self._wakes: list[float] = []
        self._loaded = self.rig.fresh(blocks)
        request = self.rig.request(self._loaded, {0: self._ids[0][:blocks]}, save=range(blocks))
        self.rig.step([request])
        self.rig.forget([request])

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.rig.__exit__()

    def step(self, compute: Callable[[], object], *, settle: bool = True) -> None:
        """One step; its calls are timed layer by layer, beside a wake each. Without `settle` the engine may be at work."""
        rig, engine, blocks, now = self.rig, self.rig.engine, self._blocks, time.perf_counter
        wake, nothing = engine._loop.call_soon_threadsafe, _nothing
        saved = rig.fresh(blocks)
        request = rig.request([*self._loaded, *saved], self._ids, load=range(blocks), save=range(blocks, 2 * blocks))
        step = engine.begin_step([request])
        for layer in rig.layers:
            compute()
            arrived(step, layer)
            if settle:
                self._settle(compute)
            began = now()
            step.wait_layer(layer)
            waited = now()
            compute()
            ready = now()
            step.layer_ready(layer)
            step.checkpoint(layer)
            done = now()
            self._ours.append(waited - began + done - ready)
            compute()
            self._settle(compute)
            began = now()
            wake(nothing)
            self._wakes.append(now() - began)
        step.end()
        step.settled()
        rig.forget([request])
        rig.remove(saved)

    def _settle(self, compute: Callable[[], object]) -> None:
        """Computes until no transfer is under way and the loop has nothing to do."""
        engine = self.rig.engine
        while engine.pending_saves or engine.stats().queued:
            compute()
        compute()
        for _ in range(_ROUND_TRIPS):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), engine._loop).result()
        compute()

    def taken(self) -> tuple[list[float], list[float]]:
        """Microseconds of the calls and of the wakes, layer by layer, without those of the first step."""
        first = len(self.rig.layers)
        return [s * 1e6 for s in self._ours[first:]], [s * 1e6 for s in self._wakes[first:]]


def quantile(values: list[float], rank: float) -> float:
    """The value with that share of the others below it."""
    if rank == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, int(rank * len(values)))]


def _nothing() -> None:
    pass
