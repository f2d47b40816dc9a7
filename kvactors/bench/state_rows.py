"""Gather and scatter of padded state rows, beside memcpy of as many bytes, by size of a row.

Half the pages of a state are moved, in random order, between their padded places and dense memory of 64 MiB in all. The memory
is there already, as `out` of a gather makes it; a gather into fresh memory is measured beside a memcpy into fresh memory, since
for both most of the time is the operating system's, which gives the pages.

Criterion: at least 0.8 of the memcpy's rate for rows of 64 KiB and more.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvactors.bench.figures import Answer, Figure, Skipped, Target
from kvactors.bench.measure import Measured, in_turn, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAME = "state-rows"
KIBS = (4, 16, 64, 256, 1024, 4096)
GATHER, SCATTER, MEMCPY = "gather", "scatter", "memcpy"
FRESH_GATHER, FRESH_MEMCPY = "gather, fresh", "memcpy, fresh"
CRITERION, CRITERION_KIB = 0.8, 64

_MOVED_BYTES = 64 << 20
_PADDING_BYTES = 512  # pages of a hybrid pool are multiples of an attention page, and so of this


@dataclass(frozen=True, slots=True)
class Row:
    """One row size: seconds of each way to move all its rows."""

    kib: int
    moved_bytes: int
    measured: Measured

    def rate(self, way: str) -> float:
        """How fast, as a part of the memcpy's rate into memory of the same kind."""
        return self.measured.ratio(FRESH_MEMCPY if way == FRESH_GATHER else MEMCPY, way)

    def meets(self) -> bool:
        """Whether gather and scatter meet the criterion, where there is one."""
        return self.kib < CRITERION_KIB or min(self.rate(GATHER), self.rate(SCATTER)) >= CRITERION

    def as_dict(self) -> dict[str, Any]:
        ways = {
            way: {
                "median_s": self.measured.median(way),
                "gb_s": self.moved_bytes / self.measured.median(way) / 1e9,
                "of_memcpy": self.rate(way),
            }
            for way in (GATHER, SCATTER, MEMCPY, FRESH_GATHER)
        }
        return {"kib": self.kib, "moved_bytes": self.moved_bytes, "meets": self.meets(), **ways}


def answer(rows: Sequence[Row]) -> Answer:
    """The rows as figures: rates in GB/s beside the memcpy's."""
    figures = []
    for row in rows:
        target = Target(">=", CRITERION) if row.kib >= CRITERION_KIB else None
        for way, beside, goal in ((GATHER, MEMCPY, target), (SCATTER, MEMCPY, target), (FRESH_GATHER, FRESH_MEMCPY, None)):
            ours, theirs = (row.moved_bytes / row.measured.median(w) / 1e9 for w in (way, beside))
            figures.append(Figure(NAME, f"{way}, rows of {row.kib} KiB / {beside}", ours, theirs, "GB/s", goal))
    return Answer(figures)


def check_torch() -> None:
    """Raises `Skipped` without torch."""
    if importlib.util.find_spec("torch") is None:
        raise Skipped("state rows are torch tensors: pip install 'kvactors[torch]'")


def run(quick: bool, say: Callable[[str], object]) -> list[Row]:
    """All row sizes; `quick` measures fewer rounds. (Fewer bytes would stay in the caches, and say little.)"""
    rows = []
    for kib in KIBS:
        say(f"{kib} KiB")
        rows.append(Row(kib, _MOVED_BYTES, _measure(kib << 10, _MOVED_BYTES, 9 if quick else 41)))
    return rows


def _measure(row_bytes: int, moved_bytes: int, repeat: int) -> Measured:
    import torch

    from kvactors.memory import gather_state_rows, scatter_state_rows_, state_views

    count = moved_bytes // row_bytes
    page_bytes = row_bytes + _PADDING_BYTES
    raw = torch.ones(2 * count * page_bytes, dtype=torch.int8)
    (state,) = state_views(raw, [(row_bytes // 2,)], [torch.float16], page_bytes)
    indices = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))[:count]
    source, target = (
        torch.ones(count, row_bytes // 2, dtype=torch.float16),
        torch.ones(count, row_bytes // 2, dtype=torch.float16),
    )

    def memcpy(to: torch.Tensor) -> None:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), moved_bytes)

    held = in_turn(
        {
            GATHER: lambda: timed(lambda: gather_state_rows(state, indices, out=target)),
            SCATTER: lambda: timed(lambda: scatter_state_rows_(state, indices, source)),
            MEMCPY: lambda: timed(lambda: memcpy(target)),
        },
        repeat,
    )
    fresh = in_turn(  # apart: what comes after them runs on cold caches
        {
            FRESH_GATHER: lambda: timed(lambda: gather_state_rows(state, indices)),
            FRESH_MEMCPY: lambda: timed(lambda: memcpy(torch.empty_like(source))),
        },
        repeat,
    )
    return Measured({**held.seconds, **fresh.seconds})
