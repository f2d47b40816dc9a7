"""How much of the shorter of compute and transfer is hidden behind the longer: a step beside max(compute, transfer).

A forward pass of equal layers: wait for the layer's loads, compute, signal it. The compute is numpy in the cache, so that it
takes neither the GIL nor memory bandwidth; but it takes a core, which the transfers had when they ran alone. `transfer` is
the same step without compute, `compute` the same compute without the engine, all three in turn. What cannot be hidden is the
first layer's load, or the last layer's save, so more layers make the ratio smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvactors.bench.compute import NumpyCompute
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


FULL, QUICK = Sizes(32, 96, 256, 7), Sizes(32, 32, 256, 3)


def measure(sizes: Sizes, say: Callable[[str], object], *, pinned: bool = False, observer: Observer | None = None) -> Answer:
    """Loads and saves, each with more, as much and less compute than transfer; `observer` gets the spans of one more step."""
    work = NumpyCompute()
    figures, notes = [], []
    for kind in KINDS:
        say(f"{kind}s")
        with Bench(kind, sizes, work, pinned=pinned) as bench:
            bench.step(0)
            transfer_s = sorted(bench.step(0) for _ in range(3))[1] / sizes.layers
            calls = {times: work.calls_for(times * transfer_s) for times in TARGETS}
            ways = {"transfer": partial(bench.step, 0)}
            for times, n in calls.items():
                ways[f"compute {times}"] = partial(bench.compute, n)
                ways[f"step {times}"] = partial(bench.step, n)
            measured = in_turn(ways, sizes.repeat)
        transfer = measured.median("transfer")
        for times, limit in TARGETS.items():
            compute, step = measured.median(f"compute {times}"), measured.median(f"step {times}")
            case = f"{kind}, compute {times:g}x the transfer / max(compute, transfer)"
            longer = max(compute, transfer)
            figures.append(Figure(NAME, case, step * 1e3, longer * 1e3, "ms", Target("<=", limit)))
            short = "" if compute / sizes.layers >= LEAST_COMPUTE_S else ": less than 2 ms, so the target says little"
            notes.append(
                f"overlap, {kind}, {times:g}x: a layer computes for {compute / sizes.layers * 1e3:.1f} ms and moves for "
                f"{transfer / sizes.layers * 1e3:.1f} ms{short}"
            )
    if observer is not None:
        with Bench("load", sizes, work, observer=observer) as bench:
            bench.step(0)
            bench.step(work.calls_for(LEAST_COMPUTE_S), observer)
    return Answer(figures, notes)


class Bench:
    """Forward passes that load, or save, the same number of blocks on every layer."""

    def __init__(
        self, kind: str, sizes: Sizes, work: NumpyCompute, *, pinned: bool = False, observer: Observer | None = None
    ) -> None:
        layout = layout_of(1, sizes.layers, sizes.kib << 10)
        store_bytes = (layout.object_bytes(0) + 4096) * sizes.blocks
        self._rig = Rig(layout, sizes.blocks, store_bytes, pinned=pinned, observer=observer)
        self._kind, self._work = kind, work
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

    def compute(self, calls: int) -> float:
        """The compute of all layers alone, seconds."""

        def act() -> None:
            for _ in self._rig.layers:
                self._work.run(calls)

        return timed(act)

    def step(self, calls: int, observer: Observer | None = None) -> float:
        """A forward pass with that many calls on each layer, until its blocks may be reused; seconds."""
        rig = self._rig
        if self._kind == "load":
            request = rig.request(self._hashes, self._ids, load=self._every)
        else:
            request = rig.request(rig.fresh(len(self._every)), self._ids, save=self._every)
        work = self._work.run if observer is None else _Watched(self._work, observer).run
        began = time.perf_counter()
        step = rig.engine.begin_step([request])
        for layer in rig.layers:
            arrived(step, layer)
            if calls:
                work(calls)
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

    def __init__(self, work: NumpyCompute, observer: Observer) -> None:
        self._work, self._observer, self._clock, self._layer = work, observer, MonotonicClock(), 0

    def run(self, calls: int) -> None:
        began = self._clock.now()
        self._work.run(calls)
        self._observer.span(Span("compute", f"layer {self._layer}", began, self._clock.now()))
        self._layer += 1
