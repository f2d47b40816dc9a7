"""Layer by layer beside whole objects: a simulated forward pass that loads a prefix and saves what it computes.

The bench-only switch lies in the driver here, not in the engine: the same engine, store, settings and calls, in another order.

* layered: on each layer `wait_layer`, compute, `layer_ready`, `checkpoint`.
* whole: first `wait_layer` of every layer, each followed by a `layer_ready` without saves, which moves the window of the
  loads on as it does otherwise, so that they run as deep and as parallel; then all the compute; then `layer_ready` of every
  layer with its saves. That is what a connector does which loads before the forward pass and saves after it.

Time to first token: from `begin_step` to the end of the last layer's compute. Exposed tail: from there until the step has
ended, when the blocks may be reused. Tokens/s: prompt tokens over both. Each way has a pool of its own, which is as empty in
each round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvactors.bench.compute import Compute, DeviceCompute, NumpyCompute
from kvactors.bench.figures import Answer, Figure, Target
from kvactors.bench.rig import BLOCK_TOKENS, Rig, arrived, layout_of

NAME = "layered"
COMPUTE = (0.0, 0.5, 1.0, 2.0)
"""Compute of a layer, as a multiple of its transfers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """`loaded`, `saved`: blocks; `kib`: of K, and of V, of one block of one layer."""

    layers: int
    loaded: int
    saved: int
    kib: int
    repeat: int


FULL, QUICK = Sizes(32, 64, 32, 128, 9), Sizes(32, 16, 8, 128, 5)


@dataclass(slots=True)
class Times:
    """Seconds of each round."""

    first_token: list[float] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float, float]:
        """Of first token, tail, and both together."""
        both = [a + b for a, b in zip(self.first_token, self.tail, strict=True)]
        return statistics.median(self.first_token), statistics.median(self.tail), statistics.median(both)


def measure(sizes: Sizes, say: Callable[[str], object], *, pinned: bool = False) -> Answer:
    """Both ways in turn, with more and more compute: numpy, which takes a core, and a wait, as for an accelerator."""
    figures: list[Figure] = []
    with Pass(sizes, pinned=pinned) as layered, Pass(sizes, pinned=pinned) as whole:
        for name, work in (("numpy", NumpyCompute()), ("device", DeviceCompute())):
            layered.run(work, 0, whole=False)
            transfer_s = sum(layered.run(work, 0, whole=False)) / sizes.layers
            for times in COMPUTE if name == "numpy" else COMPUTE[1:]:
                what = f"{name} compute {times:g}x the transfers"
                say(what)
                calls = work.calls_for(times * transfer_s) if times else 0
                figures += _figures(
                    what, (sizes.loaded + sizes.saved) * BLOCK_TOKENS, *_taken(layered, whole, work, calls, sizes)
                )
    return Answer(figures)


def _taken(layered: Pass, whole: Pass, work: Compute, calls: int, sizes: Sizes) -> tuple[Times, Times]:
    ours, theirs = Times(), Times()
    for i in range(sizes.repeat + 1):
        turn = ((layered, False, ours), (whole, True, theirs))
        for forward, is_whole, into in turn if i % 2 else turn[::-1]:
            first, tail = forward.run(work, calls, whole=is_whole)
            if i:
                into.first_token.append(first)
                into.tail.append(tail)
    return ours, theirs


def _figures(what: str, tokens: int, ours: Times, theirs: Times) -> list[Figure]:
    (first, tail, both), (their_first, their_tail, their_both) = ours.medians(), theirs.medians()
    case = f"{what}: {{}} / whole objects"
    faster, more = (None, None) if " 0x " in what else (Target("<", 1), Target(">", 1))
    return [
        Figure(NAME, case.format("time to first token"), first * 1e3, their_first * 1e3, "ms", faster),
        Figure(NAME, case.format("tokens/s"), tokens / both, tokens / their_both, "tokens/s", more),
        Figure(NAME, case.format("exposed tail"), tail * 1e3, their_tail * 1e3, "ms", faster),
    ]


class Pass:
    """Forward passes of one engine over one pool."""

    def __init__(self, sizes: Sizes, *, pinned: bool = False) -> None:
        layout = layout_of(1, sizes.layers, sizes.kib << 10)
        blocks = sizes.loaded + sizes.saved
        self._rig = Rig(layout, blocks, (layout.object_bytes(0) + 4096) * blocks, pinned=pinned)
        self._saved = sizes.saved
        self._ids = {0: list(range(0, blocks, 2)) + list(range(1, blocks, 2))}
        self._load, self._save = range(sizes.loaded), range(sizes.loaded, blocks)
        self._prefix = self._rig.fresh(sizes.loaded)
        request = self._rig.request(self._prefix, self._ids, save=self._load)
        self._rig.step([request])
        self._rig.forget([request])

    def __enter__(self) -> Pass:
        return self

    def __exit__(self, *_: object) -> None:
        self._rig.__exit__()

    def run(self, work: Compute, calls: int, *, whole: bool) -> tuple[float, float]:
        """One forward pass with that many calls of compute on each layer. Seconds to the first token, and of the tail."""
        rig, layers, compute, now = self._rig, self._rig.layers, work.run, time.perf_counter
        fresh = rig.fresh(self._saved)
        request = rig.request([*self._prefix, *fresh], self._ids, load=self._load, save=self._save)
        began = now()
        step = rig.engine.begin_step([request])
        if whole:
            for layer in layers:
                arrived(step, layer)
                step.layer_ready(layer, save=False)
            for _ in layers:
                compute(calls)
        else:
            for layer in layers:
                arrived(step, layer)
                compute(calls)
                step.layer_ready(layer)
                step.checkpoint(layer)
        token = now()
        if whole:
            for layer in layers:
                step.layer_ready(layer)
                step.checkpoint(layer)
        step.end()
        ended = now()
        step.settled()
        rig.forget([request])
        rig.remove(fresh)
        return token - began, ended - token
