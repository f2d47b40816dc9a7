"""One step, or one load outside steps, as the coordinator sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvactors.actors.step_state import StepState


@dataclass(slots=True, eq=False)
class Run:
    """Which groups still owe which answer, and what has been asked."""

    state: StepState
    preparing: set[int] = field(default_factory=set)
    ending: set[int] = field(default_factory=set)
    settling: set[int] = field(default_factory=set)
    held: deque[Any] = field(default_factory=deque)
    active: bool = False
    failed: str = ""
    end_asked: bool = False
    end_sent: bool = False
    released: set[str] = field(default_factory=set)
    """requests of a load outside steps that were aborted while others of it go on"""

    def waits_for(self) -> str:
        if self.preparing:
            return f"{group_names(self.preparing)} are preparing"
        if self.ending:
            return f"{group_names(self.ending)} have transfers under way"
        return f"{group_names(self.settling)} have sessions without an end" if self.settling else "its end was not asked for"


def group_names(groups: Iterable[int]) -> str:
    """`groups 0, 2`."""
    return f"groups {', '.join(map(str, sorted(groups)))}"
