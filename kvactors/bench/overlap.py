"""How much of the shorter of compute and transfer is hidden behind the longer: a step beside max(compute, transfer).

A forward pass of equal layers: wait for the layer's loads, compute, signal it. The compute is numpy in the cache, so that it
takes neither the GIL nor memory bandwidth; but it takes a core, which the transfers had when they ran alone. So the same is
measured with a compute that only waits, as for an accelerator. `transfer` is the same step without compute, `compute` the same
compute without the engine, all three in turn. What cannot be hidden is the first layer's load, or the last layer's save, so
more layers make the ratio smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvactors.bench.compute import Compute, DeviceCompute, NumpyCompute
from kvactors.bench.figures import Answer, Figure, Target
from kvactors.bench.measure import in_turn, timed
from kvactors.bench.rig import Rig, arrived, layout_of
from kvactors.core.observe import Observer, Span
from kvactors.devices import MonotonicClock

NAME = "overlap"
TARGETS = {2.0: 1.05, 1.0: 1.1, 0.5: 1.1}
"""Compute as a multiple of the transfer -> ratio."""
LEAST_COMPUTE_S = 2e-3
KINDS = ("load", "save")


@dataclass(frozen=True, slots=True)
class Sizes:
    """`kib`: of K, and of V, of one block of one layer; a layer's transfer should take 4 ms at least."""

    layers: int
    blocks: int
    kib: int
    repeat: int


FULL, QUICK = Sizes(32, 96, 256, 7), Sizes(32, 24, 256, 3)


def measure(sizes: Sizes, say: Callable[[str], object], *, pinned: bool = False, observer: Observer | None = None) -> Answer:
    """Loads and saves, each with more, as much and less compute than transfer; `observer` gets the spans of one more step."""
    figures: list[Figure] = []
    notes: list[str] = []
    works: dict[str, Compute] = {"numpy": NumpyCompute(), "device": DeviceCompute()}
    for kind in KINDS:
        say(f"{kind}s")
        with Bench(kind, sizes, pinned=pinned) as bench:
            for name, work in works.items():
                transfer, taken = _taken(bench, work, sizes)
                moves_ms = transfer / sizes.layers * 1e3
                for times, (compute, step) in taken.items():
                    what = f"{kind}, {name} compute {times:g}x the transfer"
                    longer = max(compute, transfer)
                    target = Target("<=", TARGETS[times])
                    figures.append(Figure(NAME, f"{what} / max(compute, transfer)", step * 1e3, longer * 1e3, "ms", target))
                    layer_s = compute / sizes.layers
                    short = "" if layer_s >= LEAST_COMPUTE_S else ": less than 2 ms of compute, so its target says little"
                    notes.append(f"overlap, {what}: a layer computes {layer_s * 1e3:.1f} ms, moves {moves_ms:.1f} ms{short}")
    if observer is not None:
        with Bench("load", sizes, observer=observer) as bench:
            bench.step(works["numpy"], 0)
            bench.step(_Watched(works["numpy"], observer), works["numpy"].calls_for(LEAST_COMPUTE_S))
    return Answer(figures, notes)


def _taken(bench: Bench, work: Compute, sizes: Sizes) -> tuple[float, dict[float, tuple[float, float]]]:
    """Seconds of the transfer alone, and of (the compute alone, both) for each multiple of it."""
    bench.step(work, 0)
    transfer_s = sorted(bench.step(work, 0) for _ in range(3))[1] / sizes.layers
    ways = {"transfer": partial(bench.step, work, 0)}
    for times in TARGETS:
        calls = work.calls_for(times * transfer_s)
        ways[f"compute {times}"] = partial(bench.compute, work, calls)
        ways[f"step {times}"] = partial(bench.step, work, calls)
    measured = in_turn(ways, sizes.repeat)
    taken = {times: (measured.median(f"compute {times}"), measured.median(f"step {times}")) for times in TARGETS}
    return measured.median("transfer"), taken


class Bench:
    """Forward passes that load, or save, the same number of blocks on every layer."""

    def __init__(self, kind: str, sizes: Sizes, *, pinned: bool = False, observer: Observer | None = None) -> None:
        layout = layout_of(1, sizes.layers, sizes.kib << 10)
        store_bytes = (layout.object_bytes(0) + 4096) * sizes.blocks
        self._rig = Rig(layout, sizes.blocks, store_bytes, pinned=pinned, observer=observer)
        self._kind = kind
        self._ids, self._every = {0: list(range(0, sizes.blocks, 2)) + list(range(1, sizes.blocks, 2))}, range(sizes.blocks)
        self._hashes: list[bytes] = []
        if kind == "load":
            self._hashes = self._rig.fresh(sizes.blocks)
            request = self._rig.request(self._hashes, self._ids, save=self._every)
            self._rig.step([request])
            self._rig.forget([request])

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._rig.__exit__()

    def compute(self, work: Compute, calls: int) -> float:
        """The compute of all layers alone, seconds."""

        def act() -> None:
            for _ in self._rig.layers:
                work.run(calls)

        return timed(act)

    def step(self, work: Compute, calls: int) -> float:
        """A forward pass with that many calls on each layer, until its blocks may be reused; seconds."""
        rig = self._rig
        if self._kind == "load":
            request = rig.request(self._hashes, self._ids, load=self._every)
        else:
            request = rig.request(rig.fresh(len(self._every)), self._ids, save=self._every)
        began = time.perf_counter()
        step = rig.engine.begin_step([request])
        for layer in rig.layers:
            arrived(step, layer)
            if calls:
                work.run(calls)
            step.layer_ready(layer)
            step.checkpoint(layer)
        step.end()
        taken = time.perf_counter() - began
        step.settled()
        rig.forget([request])
        if self._kind == "save":
            rig.remove(request.hashes)
        return taken


class _Watched:
    """Compute whose layers are spans of a track, so that what lies between two of them is a wait."""

    def __init__(self, work: Compute, observer: Observer) -> None:
        self._work, self._observer, self._clock, self._layer = work, observer, MonotonicClock(), 0

    def calls_for(self, seconds: float) -> int:
        return self._work.calls_for(seconds)

    def run(self, calls: int) -> None:
        began = self._clock.now()
        self._work.run(calls)
        self._observer.span(Span("compute", f"layer {self._layer}", began, self._clock.now()))
        self._layer += 1
