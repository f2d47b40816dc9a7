"""Runs many seeds, makes failing ones smaller, and says how to repeat them."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.sharedctypes import RawValue

from kvactors.errors import KVActorsError
from kvactors.replay.interrupts import Interrupts
from kvactors.simulate.faults import PRESETS, preset_of
from kvactors.simulate.world import Outcomes, Scenario, World

CHUNK = 20
"""Seeds that a process runs before it answers."""

COLLECT_EVERY = 10
"""Runs between two collections of garbage; a run leaves about 1 MB of cycles behind."""


@dataclass(slots=True)
class Totals:
    """What all runs did together."""

    seeds: int = 0
    events: int = 0
    steps: int = 0
    saved: int = 0
    loaded: int = 0
    joined: int = 0
    paused: int = 0
    failing: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    presets: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0
    stopped: bool = False
    interrupted: bool = False
    exit_code: int = 0
    """128 + the signal's number, if one interrupted it."""

    def add(self, o: Outcomes) -> None:
        self.seeds += 1
        self.events += o.events
        self.steps += o.steps
        self.saved += o.saved
        self.loaded += o.loaded
        self.joined += o.joined
        self.paused += o.paused
        self.failing += bool(o.violations)
        self.injected.update(o.injected)
        self.presets[o.scenario.faults] += 1

    def line(self) -> str:
        """The summary: one line, the last of the output."""
        rate = self.seeds / self.wall_s if self.wall_s else 0.0
        faults = sum(n for kind, n in self.injected.items() if kind != "event_late")
        return (
            f"{self.seeds} seeds over {len(self.presets)} preset(s): {self.events} events, {self.steps} steps, "
            f"{self.saved} blocks saved, {self.loaded} loaded, {faults} faults injected; "
            f"{self.failing} failing; {rate:.0f} seeds/s"
            f"{'; stopped after the most failures' if self.stopped else ''}{'; interrupted' if self.interrupted else ''}"
        )


def scenario(
    seed: int, faults: str, *, requests: int = 20, most_faults: int | None = None, model: str | None = None
) -> Scenario:
    """The scenario of a seed under a preset (or under the one that `all` gives it)."""
    preset = preset_of(faults, seed)
    return Scenario(seed, preset, PRESETS[preset], requests, most_faults, model)


class Stop:
    """Says to all processes that no further seed is wanted; without a lock, so that a signal's handler may say it."""

    def __init__(self) -> None:
        self._said = RawValue("b", 0)

    def say(self) -> None:
        self._said.value = 1

    @property
    def said(self) -> bool:
        return bool(self._said.value)


def run_seeds(scenarios: Iterable[Scenario], jobs: int = 1, stop: Stop | None = None) -> Generator[Outcomes, None, None]:
    """Runs scenarios, in order with one job, else in whatever order `jobs` processes finish them; none begins after `stop`.

    Raises:
        KVActorsError: a process was killed.
    """
    stop = Stop() if stop is None else stop
    if jobs > 1:
        yield from _run_in_processes(iter(scenarios), jobs, stop)
        return
    with _without_gc():
        gc.freeze()  # what the program itself holds needs no second look at each collection
        try:
            for n, s in enumerate(scenarios):
                if stop.said:
                    break
                yield World(s).run()
                if n % COLLECT_EVERY == COLLECT_EVERY - 1:
                    gc.collect()
        finally:
            gc.unfreeze()


def _run_in_processes(scenarios: Iterator[Scenario], jobs: int, stop: Stop) -> Iterator[Outcomes]:
    context = multiprocessing.get_context("fork")
    processes = ProcessPoolExecutor(jobs, context, _begin_process, (stop,))
    chunks = iter(lambda: list(islice(scenarios, CHUNK)), [])
    try:
        running = {processes.submit(_run_chunk, chunk) for chunk in islice(chunks, 2 * jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {processes.submit(_run_chunk, chunk) for chunk in islice(chunks, len(done))}
            for future in done:
                yield from future.result()
    except BrokenProcessPool as error:
        if not stop.said:  # else the signal went to all of us
            raise KVActorsError("a process of the simulation was killed (too little memory?); give fewer --jobs") from error
    finally:
        stop.say()
        processes.shutdown(cancel_futures=True)


_stop = Stop()
"""In a process of a simulation: its parent's."""


def _begin_process(stop: Stop) -> None:
    """Ctrl-C is the parent's to handle, and so is SIGTERM; but one that is for this process alone ends it."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _without_gc() -> Iterator[None]:
    """A run is full of cycles that live as long as it does: collecting between runs is enough, and faster."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run_chunk(scenarios: Sequence[Scenario]) -> list[Outcomes]:
    return [_run_one(s) for s in scenarios if not _stop.said]


def _run_one(s: Scenario) -> Outcomes:
    with _without_gc():
        outcomes = World(s).run()
    if not outcomes.violations:
        outcomes.log_tail = []
    return outcomes


def shrink(failing: Scenario, run: Callable[[Scenario], Outcomes] | None = None) -> Scenario:
    """A smaller scenario that still fails: fewer requests, then fewer faults."""
    run = run or (lambda s: World(s).run())

    def fails(s: Scenario) -> bool:
        return bool(run(s).violations)

    requests = _least(1, failing.requests, lambda n: fails(replace(failing, requests=n)))
    smaller = replace(failing, requests=requests)
    total = sum(run(smaller).injected.values())
    faults = _least(0, total, lambda n: fails(replace(smaller, most_faults=n)))
    return replace(smaller, most_faults=faults) if faults < total else smaller


def _least(low: int, high: int, fails: Callable[[int], bool]) -> int:
    """A small number for which it fails, by halving; `high` is known to fail."""
    while low < high:
        middle = (low + high) // 2
        if fails(middle):
            high = middle
        else:
            low = middle + 1
    return high


def command(s: Scenario) -> str:
    """The exact command that repeats a scenario."""
    words = [f"kvactors simulate --seeds {s.seed}:{s.seed + 1} --faults {s.faults}"]
    if s.requests != Scenario.__dataclass_fields__["requests"].default:
        words.append(f"--requests {s.requests}")
    if s.most_faults is not None:
        words.append(f"--most-faults {s.most_faults}")
    if s.model is not None:
        words.append(f"--layout {shlex.quote(s.model)}")
    return " ".join(words)


def simulate(
    scenarios: Iterable[Scenario],
    *,
    jobs: int,
    most_failures: int,
    say: Callable[[str], None],
    on_progress: Callable[[Totals], None] | None = None,
) -> Totals:
    """Runs scenarios and tells of each failing one; stops early after `most_failures`, and after the run in hand at Ctrl-C,
    SIGTERM or SIGHUP.

    `on_progress` gets the totals after each run, before a failing one is told of.
    """
    totals, stop, interrupts = Totals(), Stop(), Interrupts()

    def interrupted(_count: int) -> None:
        totals.interrupted, totals.exit_code = True, interrupts.exit_code
        stop.say()

    logger = logging.getLogger("kvactors")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the injected faults are no news
    with interrupts, interrupts.passed_to(interrupted), closing(run_seeds(scenarios, jobs, stop)) as runs:
        try:
            _simulate(runs, totals, most_failures, say, on_progress)
        finally:
            logger.setLevel(level)
    return totals


def _simulate(
    runs: Iterable[Outcomes],
    totals: Totals,
    most_failures: int,
    say: Callable[[str], None],
    on_progress: Callable[[Totals], None] | None,
) -> None:
    start = time.monotonic()
    for outcomes in runs:
        totals.add(outcomes)
        totals.wall_s = time.monotonic() - start
        if on_progress is not None:
            on_progress(totals)
        if outcomes.violations:
            _tell(outcomes, say)
        totals.stopped = totals.failing >= most_failures
        if totals.stopped or totals.interrupted:
            break
    totals.wall_s = time.monotonic() - start
    if not totals.loaded and not totals.interrupted:
        say("warning: no run loaded a single block; nothing was proven about loads")


def _tell(outcomes: Outcomes, say: Callable[[str], None]) -> None:
    small = shrink(outcomes.scenario)
    again = World(small).run()
    if not again.violations:
        say(f"FAILING seed {outcomes.scenario.seed}: {outcomes.violations[0]}")
        say(f"  it does not repeat with {command(outcomes.scenario)}")
        return
    say(f"FAILING seed {small.seed}, model {again.model}: {again.violations[0]}")
    say(f"  repeat: {command(small)}")
    say(f"  log hash: {again.log_hash}; injected: {again.injected}")
    for title, lines in (("story", again.story[-25:]), ("last events", again.log_tail[-25:])):
        say(f"  {title}:")
        for line in lines:
            say(f"    {line}")
