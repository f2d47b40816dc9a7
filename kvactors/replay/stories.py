"""Writes what happened to every request of a replay, while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvactors.core.story import StoryBook
from kvactors.engine import Engine
from kvactors.live.story_file import Sink, StoryWriter
from kvactors.replay.plan import Plan


class StoryLog:
    """Takes the events of the engine's book of stories after each step, and at the end.

    Attributes:
        complete: whether the run came to its own end.
        problem: why not all of them could be written; the sink's own trouble is the sink's to tell.
    """

    def __init__(self, sink: Sink, plan: Plan) -> None:
        self.complete = False
        self.problem: Exception | None = None
        self._sink, self._plan = sink, plan
        self._book: StoryBook | None = None
        self._writer: StoryWriter | None = None

    @contextlib.contextmanager
    def look(self, engine: Engine) -> Iterator[None]:
        """Has the engine keep stories from now on."""
        options = self._plan.options
        run = f"{options.trace}, {options.layout.model}, {options.store}"
        self._writer = StoryWriter(self._sink, run, engine.clock.now())
        self._book = engine.keep_stories()
        self._book.hand_to(self._writer.write)
        yield

    def progress(self) -> None:
        """A step has ended: writes what happened, so that it is there whatever becomes of the run."""
        if self._book is not None:
            self._book.hand_on()

    def finish(self) -> None:
        """Once the engine is closed, or the run has fallen apart: writes what is left, and that it is the end. Idempotent."""
        if self._book is not None and self._writer is not None:
            self._book.hand_on()
            self._writer.end(interrupted=not self.complete)
            self.problem = self._book.problem
        self._book = None
