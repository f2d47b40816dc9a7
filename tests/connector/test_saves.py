"""Which blocks a step completes: all that a later request can reach, each once, whatever the chunks of the prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvactors.core.layout import GroupKind, KVLayout
from kvactors.core.reachability import Reachability
from kvactors.core.steps import NULL_BLOCK
from kvactors.vllm.saves import SavePlanner, local_ids, sparse_table
from tests.connector.rig import full, group, recurrent, windowed


def planner(layout: KVLayout, hash_tokens: int = 16, retention: int | None = None) -> SavePlanner:
    return SavePlanner(Reachability(layout.groups, hash_tokens), retention)


def chunks(tokens: int, chunk: int) -> Iterator[int]:
    """Where each step of a prefill ends."""
    yield from range(chunk, tokens, chunk)
    yield tokens


def saved(plan: SavePlanner, tokens: int, chunk: int, **more: Any) -> dict[int, list[int]]:
    """Group -> indices of all blocks that the steps of a prefill save, in their order."""
    done = 0
    found: dict[int, list[int]] = {}
    for end in chunks(tokens, chunk):
        now = plan.aligned(end)
        for group_id, indices in plan.completed(done, now, tokens, **more).items():
            found.setdefault(group_id, []).extend(indices)
        done = max(done, now)
    return found


# -- chunks of a prefill (maru#57, vllm#53314) -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "block", "chunk", "count", "then_hit"),
    [(18_000, 512, 8192, 35, 17_920), (24_576, 256, 8192, 96, 24_320), (24_576, 256, 2500, 96, 24_320)],
)
def test_no_block_is_lost_where_chunks_meet(tokens: int, block: int, chunk: int, count: int, then_hit: int) -> None:
    plan = planner(full(block), block)
    assert saved(plan, tokens, chunk) == {0: list(range(count))}
    assert plan.reachability.longest_hit([b"h"] * count, tokens, lambda *_: True).tokens == then_hit


@pytest.mark.parametrize("layout", [full(), windowed(), windowed(window=100), KVLayout("m", [group(0, GroupKind.FULL, 32)])])
@pytest.mark.parametrize("retention", [None, 0, 64])
def test_the_chunks_of_a_prefill_change_nothing_of_what_is_saved(layout: KVLayout, retention: int | None) -> None:
    plan = planner(layout, retention=retention)
    whole = saved(plan, 333, 333)
    for chunk in (16, 17, 50, 128):
        assert saved(plan, 333, chunk) == whole


@pytest.mark.parametrize(("computed", "objects"), [(120 + 7, 0), (120 + 8, 1)])
def test_a_decode_step_that_fills_a_block_saves_it(computed: int, objects: int) -> None:
    """vllm#54853: 8 tokens were made when 127 are computed, the 9th is made from 128."""
    plan = planner(full(128), 128)
    assert sum(map(len, plan.completed(0, plan.aligned(computed), 120).values())) == objects


def test_a_step_that_fills_no_block_saves_nothing() -> None:
    plan = planner(full(128), 128)
    assert plan.completed(128, plan.aligned(255), 300) == {}
    assert plan.completed(0, 0, 300) == {}


def test_what_is_behind_the_point_that_was_saved_is_not_saved_again() -> None:
    """vLLM may set a request back (preemption, failed loads)."""
    assert planner(full()).completed(64, 32, 100) == {}


def test_a_group_of_small_blocks_is_saved_at_the_boundary_of_all() -> None:
    layout = KVLayout("m", [group(0, GroupKind.FULL, 16), group(1, GroupKind.FULL, 48)])
    plan = planner(layout)
    assert plan.aligned(95) == 48
    assert plan.completed(0, 48, 95) == {0: [0, 1, 2], 1: [0]}
    assert plan.completed(48, 96, 96) == {0: [3, 4, 5], 1: [1]}


# -- windows and retention ---------------------------------------------------------------------------------------------


def test_without_retention_a_window_is_saved_wherever_a_hit_may_end() -> None:
    assert saved(planner(windowed(16, 32)), 128, 128) == {0: list(range(8)), 1: list(range(8))}


def test_a_window_of_small_blocks_is_saved_in_front_of_each_boundary_alone() -> None:
    layout = KVLayout("m", [group(0, GroupKind.FULL, 64), group(1, GroupKind.SLIDING_WINDOW, 16, window=32)])
    assert saved(planner(layout), 128, 128) == {0: [0, 1], 1: [2, 3, 6, 7]}


def test_without_further_retention_a_window_is_saved_in_front_of_the_replay_boundary_alone() -> None:
    """The same prompt again is matched up to one token before its end."""
    assert saved(planner(windowed(16, 32), retention=0), 100, 100) == {0: list(range(6)), 1: [4, 5]}
    assert saved(planner(windowed(16, 32), retention=0), 96, 96) == {0: list(range(6)), 1: [3, 4]}


def test_and_where_a_shared_prefix_ends() -> None:
    found = saved(planner(windowed(16, 32), retention=0), 200, 200, junction=64)
    assert found[1] == [2, 3, 10, 11]


def test_a_junction_that_no_hit_can_end_on_changes_nothing() -> None:
    plan = planner(windowed(16, 32), retention=0)
    assert saved(plan, 200, 200, junction=63) == saved(plan, 200, 200)


def test_with_a_retention_interval_windows_are_saved_once_in_each() -> None:
    assert saved(planner(windowed(16, 32), retention=64), 128, 128)[1] == [2, 3, 5, 6, 7]


@pytest.mark.parametrize("retention", [None, 0, 64])
def test_full_attention_is_saved_whole_whatever_the_retention(retention: int | None) -> None:
    assert saved(planner(full(), retention=retention), 130, 50) == {0: list(range(8))}


# -- states ------------------------------------------------------------------------------------------------------------


def test_states_are_never_saved_by_position() -> None:
    assert planner(recurrent()).completed(0, 64, 64) == {0: [0, 1, 2, 3]}


def states(
    offers: Sequence[tuple[int, int, int]], *, after: int = 0, until: int = 1000, units: int = 100, state_tokens: int = 16
) -> dict[int, dict[int, int]]:
    return planner(recurrent(16, state_tokens)).states(offers, after, until, units)


def test_a_state_that_vllm_caches_is_saved_at_the_block_that_ends_on_its_boundary() -> None:
    assert states([(1, 7, 16), (1, 9, 64)]) == {1: {0: 7, 3: 9}}
    assert states([(1, 7, 192)], state_tokens=64) == {1: {2: 7}}


@pytest.mark.parametrize(
    ("offer", "limits"),
    [
        pytest.param((1, 0, 64), {}, id="the null block"),
        pytest.param((1, 7, 63), {}, id="off the boundary: a partial tail"),
        pytest.param((1, 7, 16), {"state_tokens": 64}, id="off the states' own block"),
        pytest.param((1, 7, 64), {"until": 63}, id="past the prefill"),
        pytest.param((1, 7, 64), {"after": 64}, id="where the load ended: it came from the store"),
        pytest.param((1, 7, 64), {"after": 80}, id="before the load's end"),
        pytest.param((1, 7, 64), {"units": 3}, id="without a hash"),
        pytest.param((1, 7, 0), {}, id="before the first token"),
        pytest.param((0, 7, 64), {}, id="not a state"),
        pytest.param((5, 7, 64), {}, id="a group that is never keyed"),
    ],
)
def test_a_state_that_no_hit_can_use_is_left(offer: tuple[int, int, int], limits: dict[str, int]) -> None:
    assert states([offer], **limits) == {}


@pytest.mark.parametrize("limits", [{"until": 64}, {"after": 48}, {"units": 4}])
def test_the_limits_themselves_are_inside(limits: dict[str, int]) -> None:
    assert states([(1, 7, 64)], **limits) == {1: {3: 7}}


def test_one_offer_that_is_left_does_not_take_the_others_with_it() -> None:
    assert states([(1, 0, 16), (1, 7, 32), (1, 8, 33), (1, 9, 48)]) == {1: {1: 7, 2: 9}}


def test_states_of_several_groups_are_kept_apart() -> None:
    layout = KVLayout("m", [group(0, GroupKind.FULL, 16), *[group(g, GroupKind.STATE, 16, [g]) for g in (1, 2, 3)]])
    found = planner(layout).states([(1, 7, 16), (2, 8, 16), (3, 9, 32)], 0, 100, 100)
    assert found == {1: {0: 7}, 2: {0: 8}, 3: {1: 9}}


# -- tables ------------------------------------------------------------------------------------------------------------


def test_vllms_block_for_none_is_no_block_for_the_engine() -> None:
    assert local_ids([0, 5, 0, 7]) == [NULL_BLOCK, 5, NULL_BLOCK, 7]


def test_a_sparse_table_names_its_blocks_by_index() -> None:
    assert sparse_table({2: 7, 0: 5}) == [5, NULL_BLOCK, 7]
