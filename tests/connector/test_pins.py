"""Blocks that a late store call may still write: vLLM's pool gives them to nobody until the call returned."""

from __future__ import annotations

from collections import Counter

from kvactors.devices import ManualClock
from kvactors.vllm.pins import Pins
from tests.connector.rig import BlockPool


def pins() -> tuple[Pins, BlockPool]:
    found, pool = Pins(ManualClock()), BlockPool()
    found.pool = pool
    return found, pool


def test_a_block_is_held_from_its_report_to_its_return() -> None:
    held, pool = pins()
    held.update(Counter([3, 5]), Counter())
    assert (pool.held, len(held)) == ([3, 5], 2)
    held.update(Counter(), Counter([3]))
    assert (pool.held, len(held)) == ([5], 1)
    held.update(Counter(), Counter([5]))
    assert (pool.held, len(held)) == ([], 0)


def test_a_step_in_which_nothing_happened_changes_nothing() -> None:
    held, pool = pins()
    held.update(Counter([3]), Counter())
    for _ in range(3):
        held.update(Counter(), Counter())
    assert [b.ref_cnt for b in pool.blocks[:5]] == [0, 0, 0, 1, 0]


def test_a_block_that_two_ranks_hold_is_taken_once_and_given_back_by_the_last() -> None:
    held, pool = pins()
    held.update(Counter([3, 3]), Counter())
    assert pool.blocks[3].ref_cnt == 1
    held.update(Counter(), Counter([3]))
    assert pool.held == [3]
    held.update(Counter(), Counter([3]))
    assert pool.held == []


def test_ranks_may_report_a_block_in_different_steps() -> None:
    held, pool = pins()
    held.update(Counter([3]), Counter())
    held.update(Counter([3]), Counter([3]))  # one returned, the other has just begun to hold it
    assert pool.blocks[3].ref_cnt == 1
    held.update(Counter(), Counter([3]))
    assert pool.held == []


def test_a_call_that_was_late_and_returned_within_one_report_holds_nothing() -> None:
    """Reports add up: what stands first in one is not said."""
    held, pool = pins()
    held.update(Counter([3]), Counter([3]))
    assert (pool.held, len(held)) == ([], 0)
    held.update(Counter([3, 3]), Counter([3]))
    assert (pool.held, len(held)) == ([3], 1)


def test_a_block_that_is_in_use_keeps_its_other_references() -> None:
    held, pool = pins()
    pool.touch([pool.blocks[3]])
    held.update(Counter([3]), Counter())
    held.update(Counter(), Counter([3]))
    assert pool.blocks[3].ref_cnt == 1


def test_without_a_pool_nothing_is_taken_and_the_counts_go_on() -> None:
    held = Pins(ManualClock())
    held.update(Counter([3]), Counter())
    assert len(held) == 1
    held.update(Counter(), Counter([3]))
    assert len(held) == 0


def test_a_rank_whose_return_is_seen_before_its_hold_leaves_nothing_held() -> None:
    held, pool = pins()
    held.update(Counter(), Counter([3]))
    held.update(Counter([3]), Counter())
    assert pool.held == []
