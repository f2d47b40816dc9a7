"""Which benchmarks there are, in the order of a whole run, and how each is started."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from kvactors.bench.figures import Answer
from kvactors.core.observe import Observer


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        quick: smaller sizes and fewer repeats.
        pinned: each thread on a core, see `pin_threads`.
        trace: what `replay` plays; None: drawn.
        observer: takes the spans of a timeline, where a benchmark has one.
    """

    quick: bool = False
    pinned: bool = False
    trace: str | None = None
    observer: Observer | None = None


Say = Callable[[str], object]
"""Takes a line about what is being measured."""

_PINNED = ("copy", "hooks", "step", "overlap", "replay", "layered")
OBSERVED = ("step", "overlap")
"""Those with a timeline."""

NAMES = ("copy", "hooks", "step", "lookup", "overlap", "replay", "mooncake", "layered", "groups", "state-rows", "memory")


def run(name: str, settings: Settings, say: Say) -> Answer:
    """Measures one of `NAMES`. What earlier ones left behind (vLLM alone imports a million objects) is kept out of the garbage
    collector's sight meanwhile: going through it takes longer than a layer.

    Raises:
        Skipped: it needs something that is not here.
        KVActorsError: the store or the engine failed, or moved something else than it should.
    """
    gc.collect()
    gc.freeze()
    try:
        return _run(name, settings, say)
    finally:
        gc.unfreeze()


def _run(name: str, settings: Settings, say: Say) -> Answer:
    if name == "mooncake":
        return _mooncake(settings, say)
    if name == "state-rows":
        return _state_rows(settings, say)
    module = importlib.import_module(f"kvactors.bench.{name}")
    options: dict[str, object] = {}
    if name in _PINNED:
        options["pinned"] = settings.pinned
    if name in OBSERVED:
        options["observer"] = settings.observer
    if name == "replay":
        options["trace"] = settings.trace
    try:
        answer: Answer = module.measure(module.QUICK if settings.quick else module.FULL, say, **options)
    finally:
        if settings.pinned:
            importlib.import_module("kvactors.bench.machine").unpin()
    return answer


def _mooncake(settings: Settings, say: Say) -> Answer:
    from kvactors.bench import mooncake

    mooncake.check_mooncake()
    layers = mooncake.QUICK_LAYERS if settings.quick else mooncake.LAYERS
    return mooncake.answer(mooncake.run(quick=settings.quick, say=lambda size: say(f"ranges of {size}")), layers)


def _state_rows(settings: Settings, say: Say) -> Answer:
    from kvactors.bench import state_rows

    state_rows.check_torch()
    return state_rows.answer(state_rows.run(settings.quick, lambda size: say(f"rows of {size}")))
