"""What the engine costs besides bytes: whole steps of 16-byte entries, without compute.

A step counts from `begin_step` until its last session is settled: preparing, planning, store calls, coverage, commits and
closes. What it takes is divided by its layers. `fixed` is that of one request with one block; `marginal` is what each further
block adds to each layer, from there to the largest case. The notes have the cost model: a least-squares fit over all cases,
with steps of fewer layers beside them, of

    step = a + b * blocks + c * requests + layers * (d + e * blocks)

where a block counts once for each group that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvactors.bench.figures import Answer, Figure, Target
from kvactors.bench.measure import Measured, in_turn, timed
from kvactors.bench.rig import Rig, layout_of
from kvactors.core.observe import Observer, Span
from kvactors.core.steps import StepRequest
from kvactors.devices import MonotonicClock

NAME = "step"
ENTRY_BYTES = 16
FIXED_US = {("save", 1): 60, ("load", 1): 110, ("save", 5): 300, ("load", 5): 300}
MARGINAL_US = 0.3
KINDS = ("save", "load")


@dataclass(frozen=True, slots=True)
class Sizes:
    """`fewer_layers`: of the steps that the cost model compares with; 0 = no cost model."""

    layers: int
    fewer_layers: int
    groups: tuple[int, ...]
    requests: tuple[int, ...]
    blocks: tuple[int, ...]
    repeat: int


FULL = Sizes(60, 15, (1, 5), (1, 16, 256), (1, 16), 9)
QUICK = Sizes(60, 0, (1, 5), (1, 16), (1, 16), 3)


class Case(NamedTuple):
    kind: str
    layers: int
    requests: int
    blocks: int
    """of each request and group"""


def measure(sizes: Sizes, say: Callable[[str], object], *, pinned: bool = False, observer: Observer | None = None) -> Answer:
    """Every number of groups; `observer` gets the spans of one more step of each kind, which is not measured."""
    figures: list[Figure] = []
    notes: list[str] = []
    for groups in sizes.groups:
        say(f"{groups} group{'s' if groups > 1 else ''}")
        taken = _taken(groups, sizes, pinned)
        figures += _figures(groups, sizes, taken)
        if sizes.fewer_layers:
            notes += [_model(kind, groups, taken) for kind in KINDS]
    if observer is not None:
        _observe(sizes, observer)
    return Answer(figures, notes)


def _taken(groups: int, sizes: Sizes, pinned: bool) -> dict[Case, float]:
    """Median seconds of each case."""
    most = max(sizes.requests) * max(sizes.blocks)
    benches = [
        Bench(groups, layers, most, pinned=pinned) for layers in dict.fromkeys((sizes.layers, sizes.fewer_layers)) if layers
    ]
    try:
        ways: dict[str, Callable[[], float]] = {}
        cases: dict[str, Case] = {}
        for bench in benches:
            for requests in sizes.requests:
                for blocks in sizes.blocks:
                    for kind in KINDS:
                        case = Case(kind, len(bench.rig.layers), requests, blocks)
                        ways[str(case)] = bench.way(case)
                        cases[str(case)] = case
        measured: Measured = in_turn(ways, sizes.repeat)
    finally:
        for bench in benches:
            bench.rig.__exit__()
    return {case: measured.median(name) for name, case in cases.items()}


def _figures(groups: int, sizes: Sizes, taken: Mapping[Case, float]) -> list[Figure]:
    layers, figures = sizes.layers, []
    of = "one group" if groups == 1 else f"{groups} groups"
    for kind in KINDS:
        small = Case(kind, layers, min(sizes.requests), min(sizes.blocks))
        large = Case(kind, layers, max(sizes.requests), max(sizes.blocks))
        fixed = taken[small] / layers * 1e6
        more = groups * (large.requests * large.blocks - small.requests * small.blocks) * layers
        marginal = (taken[large] - taken[small]) / more * 1e6
        limit = FIXED_US.get((kind, groups))
        if limit is not None:
            case = f"{kind}, {of}, {layers} layers: fixed, per layer"
            figures.append(Figure(NAME, case, fixed, None, "µs", Target("<=", limit, "µs")))
        case = f"{kind}, {of}, {layers} layers: marginal, per block and layer"
        figures.append(Figure(NAME, case, marginal, None, "µs", Target("<=", MARGINAL_US, "µs")))
        figures += [
            Figure(
                NAME,
                f"{kind}, {of}, {case.requests} requests of {case.blocks} blocks, per layer / one block",
                taken[case] / layers * 1e6,
                fixed,
                "µs",
            )
            for case in taken
            if case.kind == kind and case.layers == layers and case != small
        ]
    return figures


def _model(kind: str, groups: int, taken: Mapping[Case, float]) -> str:
    """The cost model's formula, in microseconds; fitted to relative errors, so that small steps count as much as large ones."""
    cases = [case for case in taken if case.kind == kind]
    seconds = np.array([taken[case] for case in cases])
    count = np.array([groups * case.requests * case.blocks for case in cases], float)
    requests = np.array([case.requests for case in cases], float)
    layers = np.array([case.layers for case in cases], float)
    terms = np.stack([np.ones(len(cases)), count, requests, layers, layers * count], axis=1)
    found = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(cases)), rcond=None)[0]
    worst = float(np.abs(terms @ found / seconds - 1).max())
    a, b, c, d, e = (found * 1e6).tolist()
    of = "one group" if groups == 1 else f"{groups} groups"
    return (
        f"step, {kind}, {of}: {a:.0f} µs + {b:.1f} µs x blocks + {c:.1f} µs x requests "
        f"+ layers x ({d:.0f} µs + {e:.3f} µs x blocks); off by {worst:.0%} at most"
    )


class Bench:
    """Steps of one number of groups and layers."""

    def __init__(
        self, groups: int, layers: int, most_blocks: int, *, pinned: bool = False, observer: Observer | None = None
    ) -> None:
        layout = layout_of(groups, layers, ENTRY_BYTES)
        store_bytes = 4 * groups * most_blocks * (layout.object_bytes(0) + 64)
        self.rig = Rig(layout, most_blocks, store_bytes, pinned=pinned, observer=observer)

    def way(self, case: Case) -> Callable[[], float]:
        """A step of that case, again and again: of new blocks, or of the same ones."""
        return self._save(case) if case.kind == "save" else self._load(case)

    def _save(self, case: Case) -> Callable[[], float]:
        def once() -> float:
            requests = self._requests(case, [self.rig.fresh(case.blocks) for _ in range(case.requests)], save=True)
            taken = timed(lambda: self.rig.step(requests))
            self._over(requests, remove=True)
            return taken

        return once

    def _load(self, case: Case) -> Callable[[], float]:
        hashes = [self.rig.fresh(case.blocks) for _ in range(case.requests)]
        saving = self._requests(case, hashes, save=True)
        self.rig.step(saving)
        self._over(saving)

        def once() -> float:
            requests = self._requests(case, hashes, save=False)
            taken = timed(lambda: self.rig.step(requests))
            self._over(requests)
            return taken

        return once

    def _requests(self, case: Case, hashes: Sequence[Sequence[bytes]], *, save: bool) -> list[StepRequest]:
        made, every = [], range(case.blocks)
        for i, of_request in enumerate(hashes):
            ids = list(range(i * case.blocks, (i + 1) * case.blocks))
            moved = {"save": every} if save else {"load": every}
            made.append(self.rig.request(of_request, {g.id: ids for g in self.rig.layout.groups}, **moved))
        return made

    def _over(self, requests: Sequence[StepRequest], *, remove: bool = False) -> None:
        self.rig.forget(requests)
        if remove:
            for request in requests:
                self.rig.remove(request.hashes)


def _observe(sizes: Sizes, observer: Observer) -> None:
    """One step of each kind for a timeline, with the compute thread's own calls on a track."""
    groups, requests, blocks = max(sizes.groups), sizes.requests[len(sizes.requests) // 2], max(sizes.blocks)
    bench = Bench(groups, sizes.layers, requests * blocks, observer=observer)
    clock = MonotonicClock()
    try:
        for kind in KINDS:
            way = bench.way(Case(kind, sizes.layers, requests, blocks))
            began = clock.now()
            way()
            observer.span(Span("harness", f"{kind} step", began, clock.now(), {"groups": groups, "requests": requests}))
    finally:
        bench.rig.__exit__()
