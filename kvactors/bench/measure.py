"""Ways to do the same thing, measured in turn, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of each repetition, by the name of the way."""

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, way: str) -> float:
        return statistics.median(self.seconds[way])

    def ratio(self, way: str, to: str) -> float:
        """Ratio of medians."""
        return self.median(way) / self.median(to)

    def as_dict(self, to: str) -> dict[str, Any]:
        """Medians in seconds, and ratios to one of the ways."""
        return {way: {"median_s": self.median(way), "ratio": self.ratio(way, to)} for way in self.seconds}


def in_turn(ways: Mapping[str, Callable[[], float]], repeat: int) -> Measured:
    """Each way once for warming up, then `repeat` rounds, each begun by another way. A way answers the seconds it took."""
    names = list(ways)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        ways[name]()
    for i in range(repeat):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(ways[name]())
    return Measured({name: tuple(seconds) for name, seconds in taken.items()})


def timed(act: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
