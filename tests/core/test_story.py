"""Stories of requests: bounded in requests, in events each, and in events in all."""

from __future__ import annotations

import pytest

from kvactors.core import story
from kvactors.core.story import MOST_EVENTS_EACH, MOST_REQUESTS, StoryBook
from kvactors.devices import ManualClock


def test_stories_are_bounded() -> None:
    book = StoryBook(ManualClock())
    for n in range(MOST_EVENTS_EACH + 5):
        book.record("long", 0, n, "x")
    assert len(book.tell("long")) == MOST_EVENTS_EACH
    for n in range(MOST_REQUESTS):
        book.record(f"r{n}", 0, 0, "x")
    assert book.tell("long") == []
    assert book.tell("r0") != []
    assert book.tell(f"r{MOST_REQUESTS - 1}") == ["+0.000000s group 0 block 0: x"]


def test_the_request_that_was_silent_longest_is_dropped_first() -> None:
    book = StoryBook(ManualClock())
    for n in range(MOST_REQUESTS):
        book.record(f"r{n}", 0, 0, "x")
    book.record("r0", 0, 0, "again")
    book.record("new", 0, 0, "x")
    assert len(book.tell("r0")) == 2
    assert book.tell("r1") == []
    assert book.tell("r2") != []


def test_all_events_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "MOST_EVENTS", 10)
    book = StoryBook(ManualClock())
    for request in ("a", "b", "c"):
        for n in range(4):
            book.record(request, 0, n, "x")
    assert book.requests() == ["b", "c"]
    assert [len(book.events(request)) for request in book.requests()] == [4, 4]
