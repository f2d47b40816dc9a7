"""Keys and segments that a client does not try again at once."""

from __future__ import annotations

import pytest

from kvactors.stores.mooncake.suspects import Segments, Suspects

HERE, THERE = frozenset({"here"}), frozenset({"there"})


@pytest.fixture
def suspects() -> Suspects:
    return Suspects(after_s=5.0, negative_s=30.0)


def fail(suspects: Suspects, key: str, segments: Segments, began: float, took: float) -> None:
    suspects.end(suspects.begin([segments], began), [(key, segments)], began + took)


def test_a_key_whose_read_failed_is_left_alone_for_a_while(suspects: Suspects) -> None:
    fail(suspects, "k", HERE, began=0.0, took=1.0)
    assert [suspects.key("k", now) for now in (1.0, 30.9, 31.0, 1.0)] == [True, True, False, False]
    assert not suspects.key("other", 2.0)


def test_a_read_that_fails_quickly_says_nothing_of_its_segment(suspects: Suspects) -> None:
    fail(suspects, "k", HERE, began=0.0, took=5.0)
    assert not suspects.any(5.0)


def test_a_read_that_fails_slowly_makes_its_segment_a_suspect(suspects: Suspects) -> None:
    fail(suspects, "k", HERE, began=0.0, took=6.0)
    assert [suspects.holds(HERE, now) for now in (6.0, 35.9, 36.0)] == [True, True, False]
    assert not suspects.holds(THERE, 6.0)


def test_a_slow_read_that_succeeds_leaves_no_suspect(suspects: Suspects) -> None:
    read = suspects.begin([HERE], 0.0)
    suspects.end(read, [], 100.0)
    assert not suspects.any(100.0)
    assert not suspects.key("k", 100.0)


def test_a_read_that_is_under_way_for_long_makes_its_segments_suspects_until_it_returns(suspects: Suspects) -> None:
    read = suspects.begin([HERE, THERE], 0.0)
    assert [suspects.any(now) for now in (5.0, 5.1)] == [False, True]
    assert suspects.holds(HERE | THERE, 6.0)
    suspects.end(read, [], 6.0)
    assert not suspects.any(6.0)


def test_an_object_with_a_replica_elsewhere_is_not_held_back(suspects: Suspects) -> None:
    fail(suspects, "k", HERE, began=0.0, took=6.0)
    assert not suspects.holds(HERE | THERE, 7.0)
    assert not suspects.holds(frozenset(), 7.0)
