"""Which requests may save again, and when (I12)."""

from __future__ import annotations

import pytest

from kvactors.core.layout import CacheEntry, Group, GroupKind
from kvactors.core.reachability import Reachability
from kvactors.core.steps import FailedLoad, GroupBlocks, StepRequest
from kvactors.core.taint import Taints

E = (CacheEntry("k", 8),)
GROUPS = [
    Group(0, GroupKind.FULL, 16, {0: E}),
    Group(1, GroupKind.SLIDING_WINDOW, 16, {1: E}, window=16),
    Group(2, GroupKind.STATE, 32, {2: E}),
]


def taints(first_wrong: int) -> Taints:
    t = Taints(Reachability(GROUPS, 16))
    t.add(FailedLoad("r", 0, first_wrong))
    return t


def request(at: int | None, full: str = "", window: str = "", state: str = "") -> StepRequest:
    blocks = {g: GroupBlocks(list(range(1, 9)), [int(c) for c in text]) for g, text in enumerate((full, window, state))}
    return StepRequest("r", [], blocks, at)


@pytest.mark.parametrize(
    ("first_wrong", "restart", "clean"),
    [
        (32, request(None, "0123", "3", "1"), False),  # not marked
        (32, request(32), True),  # before anything wrong
        (32, request(0), True),
        (32, request(64), False),  # nothing reloaded
        (32, request(64, "23", "3", "1"), True),  # all that boundary 64 needs from token 32 on
        (32, request(64, "23", "3"), False),  # the state is missing
        (32, request(64, "3", "3", "1"), False),
        (32, request(48, "2", "2", ""), False),  # no boundary
    ],
)
def test_a_verified_restart_clears_the_taint(first_wrong: int, restart: StepRequest, clean: bool) -> None:
    t = taints(first_wrong)
    assert t.check(restart) is not clean
    assert ("r" in t) is not clean


def test_the_earliest_wrong_token_counts() -> None:
    t = taints(32)
    t.add(FailedLoad("r", 0, 64))
    assert t.check(request(48))
    t.add(FailedLoad("r", 0, 0))
    assert t.check(request(32))
    assert not t.check(request(0))


def test_loads_outside_steps_count_until_the_next_failure() -> None:
    t = taints(32)
    t.loaded(request(None, "23", "3", "1"))
    t.add(FailedLoad("r", 0, 32))
    assert t.check(request(64))
    t.loaded(request(None, "23", "3", "1"))
    assert not t.check(request(64))


def test_others_and_the_forgotten_are_clean() -> None:
    t = taints(32)
    assert not t.check(StepRequest("other", [], {}))
    t.forget("r")
    assert not t.check(request(None))
