"""A store that stays full: saves pause, since a search for space in every step would cost calls and find nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

FULL_STEPS = 3
"""Steps in a row that find no space before saves pause."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
"""A pause is twice as long as the one before it, up to this, as long as no key finds space in between."""


@dataclass(slots=True)
class SpacePressure:
    """Of one group. A step is full if it searched for space, more than once, and none of its keys found any. When a pause is
    over, one step searches as usual: it ends the pressure, or begins the next pause."""

    _full_steps: int = 0
    _pause_s: float = 0.0
    _until_s: float = -math.inf
    _found_in: int = -1
    _full: int = -1

    def paused(self, now_s: float) -> bool:
        """Whether the blocks of a step that begins now are skipped."""
        return now_s < self._until_s

    def found(self, step: int) -> None:
        """A key of the step found space."""
        self._full_steps, self._pause_s, self._until_s = 0, 0.0, -math.inf
        self._found_in = step

    def found_none(self, step: int, now_s: float) -> float:
        """Keys of the step gave up their search. Answers how long saves pause now, if they do; else 0."""
        if step in (self._found_in, self._full):
            return 0.0
        self._full = step
        self._full_steps += 1
        if self._full_steps < FULL_STEPS:
            return 0.0
        self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._until_s = now_s + self._pause_s
        return self._pause_s
