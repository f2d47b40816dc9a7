"""Whether a replay without `--capacity` needs more memory than the machine has; said before it starts, and never refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvactors.errors import TraceError
from kvactors.replay.plan import Plan
from kvactors.replay.summary import si_bytes
from kvactors.replay.trace import TraceReader

_BATCH_BLOCKS = 1 << 19
_MEMINFO = Path("/proc/meminfo")

Words = npt.NDArray[np.uint64]


def available_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """Memory that the machine can give to a program without swapping, bytes; None where it does not say."""
    try:
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    try:
        pages, page_bytes = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
    return pages * page_bytes if pages > 0 and page_bytes > 0 else None


def memory_warning(plan: Plan, available: int | None) -> str | None:
    """One line where the in-process store will hold more than `available` bytes by the end; None where all is well or unknown.

    Different blocks are counted, which reads the trace once more, only where all blocks of the trace would not fit.
    """
    options = plan.options
    if available is None or options.store != "memory" or options.capacity is not None:
        return None
    layout = options.layout
    at_most = sum(layout.object_bytes(g.id) * (plan.summary.input_tokens // g.block_tokens) for g in layout.groups)
    if at_most <= available:
        return None
    try:
        needed = pool_bytes(plan)
    except TraceError:  # it was changed by now; the run says so
        return None
    if needed <= available:
        return None
    return (
        f"warning: the store will hold about {si_bytes(needed)}, and this machine has {si_bytes(available)} of memory left; "
        "give a larger --scale (smaller blocks) or --capacity (the store evicts when it is full)"
    )


def pool_bytes(plan: Plan) -> int:
    """Payload of all different blocks that the replay saves, bytes, if the store never evicts.

    Raises:
        TraceError: the trace can no longer be read.
    """
    rules, summary = plan.rules, plan.summary
    parts = summary.block_tokens // rules.hash_tokens
    blocks = {group.id: _Different() for group in rules.groups}
    reader = TraceReader(
        plan.source, skip_bad=plan.options.skip_bad, limit=summary.requests, expected=summary.checksum, format=summary.format
    )
    for request in reader:
        ids = np.array([h & _WORD for h in request.hash_ids], np.uint64)
        kept = rules.kept(request.input_length)
        for group in rules.groups:
            last = (kept[group.id] + 1) * (group.block_tokens // rules.hash_tokens) - 1  # the fine hash that names the block
            blocks[group.id].add(ids[last // parts] * np.uint64(parts) + (last % parts).astype(np.uint64))
    return sum(rules.layout.object_bytes(g) * different.count() for g, different in blocks.items())


_WORD = (1 << 64) - 1


class _Different:
    """Counts different words; only those take memory, and a batch."""

    def __init__(self) -> None:
        self._known: Words = np.empty(0, np.uint64)
        self._pending: list[Words] = []
        self._waiting = 0

    def add(self, words: Words) -> None:
        self._pending.append(words)
        self._waiting += len(words)
        if self._waiting >= _BATCH_BLOCKS:
            self.count()

    def count(self) -> int:
        self._known = np.unique(np.concatenate([self._known, *self._pending]))
        self._pending, self._waiting = [], 0
        return len(self._known)
