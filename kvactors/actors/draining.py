"""A drain, from its request to its answer: asked, then done, or its deadline passes and the groups abandon what is left."""

from __future__ import annotations

from collections.abc import Iterable

from kvactors.core.stats import EngineStats
from kvactors.messages import Drain, Drained


class DrainExpired:
    """Timer to the coordinator: the drain's deadline passed."""


class Draining:
    """At most one drain per engine; whoever asks again gets the same answer.

    Attributes:
        asked: new steps pass through from now on.
        over: it was answered; only `close` is legal.
        abandoning: groups that have not yet said what they abandoned.
    """

    def __init__(self, stats: EngineStats) -> None:
        self.abandoning: set[int] = set()
        self._stats = stats
        self._waiting: list[Drain] = []
        self._left: list[str] | None = None
        self._leftovers: list[str] = []
        self.asked = False

    @property
    def over(self) -> bool:
        return self._left is not None

    def ask(self, message: Drain) -> bool:
        """Takes a request; True if it is the first, whose deadline counts."""
        if self._left is not None:
            message.answer(self._left)
            return False
        self._waiting.append(message)
        first, self.asked = not self.asked, True
        if first:
            self._stats.state = "draining"
        return first

    def expire(self, groups: Iterable[int]) -> bool:
        """The deadline passed: True if the groups are now to abandon what they have."""
        if self.over or self.abandoning:
            return False
        self.abandoning = set(groups)
        return True

    def abandoned(self, message: Drained) -> bool:
        """A group abandoned what was left; True when it was the last to answer."""
        if message.group_id not in self.abandoning:
            return False
        self.abandoning.discard(message.group_id)
        self._leftovers.extend(message.left)
        return not self.abandoning

    def finish(self, steps_left: Iterable[str] = ()) -> None:
        """Answers everybody with what was left; nothing = all done."""
        self._stats.state = "drained"
        self._answer([*steps_left, *self._leftovers])

    def fail(self, reason: str) -> None:
        """The engine ended first."""
        if self.asked and not self.over:
            self._answer([reason])

    def _answer(self, left: list[str]) -> None:
        self._left = left
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            message.answer(left)
