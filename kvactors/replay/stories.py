"""Writes what happened to every request of a replay, while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvactors.core.story import StoryBook
from kvactors.engine import Engine
from kvactors.live.story_file import Sink, StoryWriter
from kvactors.replay.plan import Plan


class StoryLog:
    """Takes what the engine's book of stories has no room for, and at the end the rest."""

    def __init__(self, sink: Sink, plan: Plan) -> None:
        self._sink, self._plan = sink, plan
        self._book: StoryBook | None = None

    @contextlib.contextmanager
    def look(self, engine: Engine) -> Iterator[None]:
        """Has the engine keep stories from now on."""
        options = self._plan.options
        writer = StoryWriter(self._sink, f"{options.trace}, {options.layout.model}, {options.store}", engine.clock.now())
        self._book = engine.keep_stories()
        self._book.forgotten = writer.write
        yield

    def finish(self) -> None:
        """Once the engine is closed: writes what is left."""
        if self._book is not None:
            self._book.forget_all()
