"""Stories of requests: bounded in requests, in events each, and in events in all."""

from __future__ import annotations

import random

import pytest

from kvactors.core import story
from kvactors.core.story import MOST_EVENTS_EACH, MOST_LONG_TEXTS, MOST_REQUESTS, StoryBook
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


@pytest.mark.parametrize("often", [1, 7, 100_000])
def test_a_taker_gets_every_event_once(monkeypatch: pytest.MonkeyPatch, often: int) -> None:
    """In its request's order, whichever bound it was that made it go, and however often the rest is handed on; and the book
    keeps as much as it does without a taker."""
    monkeypatch.setattr(story, "MOST_EVENTS", 40)
    monkeypatch.setattr(story, "MOST_EVENTS_EACH", 8)
    monkeypatch.setattr(story, "MOST_REQUESTS", 6)
    rng, book, alone = random.Random(1), StoryBook(ManualClock()), StoryBook(ManualClock())
    noted: dict[str, list[int]] = {}
    handed: dict[str, list[int]] = {}
    book.hand_to(lambda request, events: handed.setdefault(request, []).extend(event.block_index for event in events))
    for n in range(2000):
        request = f"r{min(int(rng.expovariate(0.2)), 30)}"
        noted.setdefault(request, []).append(n)
        book.record(request, 0, n, "x")
        alone.record(request, 0, n, "x")
        if n % often == often - 1:
            book.hand_on()
            assert handed == noted
        assert {r: book.events(r) for r in book.requests()} == {r: alone.events(r) for r in alone.requests()}
    book.hand_on()
    assert handed == noted
    book.hand_on()
    assert handed == noted
    assert book.problem is None


def test_a_taker_that_raises_costs_the_book_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "MOST_REQUESTS", 2)
    book, asked = StoryBook(ManualClock()), []

    def raises(request: str, _: object) -> None:
        asked.append(request)
        raise RuntimeError("no")

    book.hand_to(raises)
    for request in ("a", "b", "c", "d"):
        book.record(request, 0, 0, "x")
    book.hand_on()
    assert (asked, book.requests(), str(book.problem)) == (["a"], ["c", "d"], "no")


def test_a_long_text_is_kept_once() -> None:
    """What a store said stands in the story of every block of its call."""
    book = StoryBook(ManualClock())
    for n in range(2):
        book.record("a", 0, n, "".join(["x"] * 200))
    for n in range(2 * MOST_LONG_TEXTS):
        book.record("b", 0, n, f"{n}" * 90)
    first, second = book.events("a")
    assert first.what is second.what
    assert len({event.what for event in book.events("b")}) == 2 * MOST_LONG_TEXTS
