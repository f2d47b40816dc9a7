"""Whether memory stays flat over many requests through an engine with a small store.

In a process of its own, so that what other benchmarks left behind hides nothing: a batch of requests at a time is looked up,
loads what is there, saves the rest, is released and forgotten; a third of the prompts come again, the store evicts all the
time. Two measures after each batch: the resident set, which is what an operator sees, and the blocks that Python's allocator
has given out, which shows a leak of small objects long before it fills a page. (tracemalloc would slow every allocation
several times; RSS alone would hide a leak of 1 % in memory that is recycled.)

`growth` is the median of the last tenth of the run beside the median of the tenth after the warm-up; `peak` the most after the
warm-up beside the same. The warm-up is the first two fifths.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvactors.bench.figures import Answer, Figure, Target
from kvactors.bench.rig import BLOCK_TOKENS, Rig, layout_of
from kvactors.core.steps import GroupBlocks, StepRequest
from kvactors.engine import EngineConfig
from kvactors.errors import StoreError
from kvactors.stores import MemoryStore

NAME = "memory"
LIMIT = 1.01

_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024
_BATCH, _LAYERS, _BLOCKS, _NBYTES = 8, 2, 4, 256
_STORE_BYTES = 4 << 20
_AGAIN = 64
"""Prompts that come again: few enough for the store to hold them all under their leases."""
_PROCESS_S = 900.0


@dataclass(frozen=True, slots=True)
class Sizes:
    requests: int


FULL, QUICK = Sizes(100_000), Sizes(10_000)


@dataclass(frozen=True, slots=True)
class Sample:
    """After a batch: KiB of the resident set, and blocks of Python's allocator."""

    rss_kib: float
    python_blocks: int


def measure(sizes: Sizes, say: Callable[[str], object]) -> Answer:
    """Runs the requests in another process.

    Raises:
        StoreError: that process failed; says what it printed.
    """
    say(f"{sizes.requests} requests")
    words = [sys.executable, "-m", __name__, str(sizes.requests)]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=_PROCESS_S, check=False, env=environment)
    if done.returncode:
        raise StoreError(f"bench memory: its process ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return answer(sizes.requests, [Sample(**sample) for sample in json.loads(done.stdout)])


def answer(requests: int, samples: Sequence[Sample]) -> Answer:
    """The figures of a run."""
    tenth = max(1, len(samples) // 10)
    warm, later = samples[4 * tenth : 5 * tenth], samples[4 * tenth :]
    last = samples[-tenth:]
    figures = []
    for what, unit, of in (
        ("resident set", "MiB", lambda s: s.rss_kib / 1024),
        ("Python's allocated blocks", "blocks", lambda s: s.python_blocks),
    ):
        start = statistics.median(map(of, warm))
        growth, peak = statistics.median(map(of, last)), max(map(of, later))
        case = f"{requests} requests, {what}: {{}} / after the warm-up"
        figures.append(Figure(NAME, case.format("at the end"), growth, start, unit, Target("<", LIMIT)))
        figures.append(Figure(NAME, case.format("peak"), peak, start, unit))
    return Answer(figures)


def run(requests: int, store_bytes: int = _STORE_BYTES) -> list[Sample]:
    """Plays that many requests and samples after each batch.

    Raises:
        StoreError: nothing was ever loaded, or sessions stay open: then it was not the engine that was measured.
    """
    store = MemoryStore(store_bytes)
    with Rig(layout_of(2, _LAYERS, _NBYTES), _BATCH * _BLOCKS, 0, EngineConfig(prefetch_layers=1), store=store) as rig:
        taken = _play(rig, max(10, requests // _BATCH))
        rig.engine.drain()
        stats = rig.engine.stats()
    if not stats.groups[0].loaded or stats.sessions.open_now:
        raise StoreError(f"{stats.groups[0].loaded} blocks were loaded, and {stats.sessions.open_now} sessions are open")
    return [Sample(rss, int(blocks)) for rss, blocks in taken.tolist()]


def _play(rig: Rig, batches: int) -> npt.NDArray[np.float64]:
    """Answers (KiB, blocks) after each batch, in memory that is there from the start."""
    taken = np.ones((batches, 2))
    rng = random.Random(0)
    ids = [list(range(i * _BLOCKS, (i + 1) * _BLOCKS)) for i in range(_BATCH)]
    for batch in range(batches):
        prompts = [batch * _BATCH + i if rng.random() < 2 / 3 else rng.randrange(_AGAIN) for i in range(_BATCH)]
        requests = [_request(rig, batch, prompt, ids[i]) for i, prompt in enumerate(dict.fromkeys(prompts))]
        rig.step(requests)
        for request in requests:
            rig.engine.release(request.request_id)
            rig.engine.forget(request.request_id)
        taken[batch] = _resident_kib(), sys.getallocatedblocks()
    return taken


def _request(rig: Rig, batch: int, prompt: int, ids: list[int]) -> StepRequest:
    """Loads what of a prompt is stored, saves the rest."""
    hashes = [b"%08x-%x" % (prompt, i) for i in range(_BLOCKS)]
    hit = rig.engine.lookup(hashes, _BLOCKS * BLOCK_TOKENS + 1)
    found = hit.tokens // BLOCK_TOKENS
    blocks = GroupBlocks(ids, range(found), range(found, _BLOCKS))
    return StepRequest(f"r{batch}-{prompt}", hashes, {g.id: blocks for g in rig.layout.groups})


def _resident_kib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_KIB


if __name__ == "__main__":
    json.dump([asdict(sample) for sample in run(int(sys.argv[1]))], sys.stdout)
