"""The connector in vLLM's scheduler: what it answers, and what each step is to load and to save.

`Serving` calls a real `SchedulerSide` over a real store in vLLM's order: match, allocation, plan, report.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

# It imports all that is needed of vLLM, and keeps quiet about the warnings.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM is not importable", exc_type=ImportError)

from kvactors.core.layout import GroupKind, KVLayout
from kvactors.core.steps import NULL_BLOCK
from kvactors.devices import ManualClock
from kvactors.errors import ConfigError, LayoutError
from kvactors.vllm.loads import may_load_layerwise
from kvactors.vllm.messages import Handshake, Life, StepPlan
from kvactors.vllm.scheduler import SchedulerSide
from kvactors.vllm.settings import BOTH, CONSUMER, PRODUCER, ConnectorSettings
from tests.connector.rig import PATIENT_S, Serving, block_id, fine_hashes, full, group, loads, recurrent, saves, windowed

A = Life("a")
MISS = (0, False)


# -- a hit -------------------------------------------------------------------------------------------------------------


def test_a_hit_is_loaded_between_steps() -> None:
    with Serving(full()) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        assert vllm.ask(a) == (64, True)
        vllm.allocate(a, 64)
        plan = vllm.step()
        (load,) = plan.loads
        assert (load.life, load.hashes, load.problem) == (A, fine_hashes(4), "")
        assert list(load.groups[0].load) == [0, 1, 2, 3]
        assert list(load.groups[0].block_ids[:4]) == [block_id(0, i) for i in range(4)]
        assert (plan.requests, plan.ended, plan.runs) == ([], [], False)


def test_its_load_is_planned_once_and_the_rest_is_computed_and_saved() -> None:
    with Serving(full()) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        vllm.admit(a)
        assert loads(vllm.step()) == {}
        vllm.over(a)
        plan = vllm.step({"a": 36})
        assert (loads(plan), saves(plan), plan.runs) == ({}, {"a": {0: [4, 5]}}, True)


def test_layer_by_layer_a_hit_is_loaded_in_the_step_that_computes_the_rest() -> None:
    with Serving(full(), layerwise=True) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        assert vllm.ask(a) == (64, False)
        vllm.allocate(a, 64)
        a.num_computed_tokens = 64
        plan = vllm.step({"a": 36})
        assert plan.loads == []
        assert (loads(plan), saves(plan)) == ({"a": {0: [0, 1, 2, 3]}}, {"a": {0: [4, 5]}})
        assert plan.requests[0].hashes == fine_hashes(6)
        assert loads(vllm.step({"a": 1})) == {}


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_prompt_of_which_nothing_is_stored_is_computed(layerwise: bool) -> None:
    with Serving(full(), layerwise=layerwise) as vllm:
        a = vllm.request("a", 64)
        assert vllm.ask(a) == MISS
        vllm.allocate(a, 0)
        assert saves(vllm.step({"a": 64})) == {"a": {0: [0, 1, 2, 3]}}
        assert vllm.side.totals()["lookup_misses"] == 1


def test_a_hit_of_the_whole_prompt_leaves_a_token_to_compute() -> None:
    with Serving(full()) as vllm:
        vllm.put(64)
        assert vllm.ask(vllm.request("a", 64)) == (48, True)
        assert vllm.ask(vllm.request("b", 65)) == (64, True)


def test_scattered_blocks_that_cannot_be_used_are_no_hit() -> None:
    """vllm#28585: 4 blocks of 16 with a hole at block 1."""
    with Serving(full()) as vllm:
        vllm.put(64, only={0: [0, 2, 3]})
        assert vllm.ask(vllm.request("a", 100)) == (16, True)


def test_the_hit_that_all_groups_have_counts_and_not_the_longest() -> None:
    """vllm#46453: full has blocks 0 and 1, state 0 and 3."""
    with Serving(recurrent(256, 256), hash_tokens=256) as vllm:
        vllm.put(1024, only={0: [0, 1], 1: [0, 3]})
        assert vllm.ask(vllm.request("a", 1025)) == (256, True)


@pytest.mark.parametrize(("tokens", "hit"), [(4096, 0), (4097, 4096), (5083, 4096), (8193, 4096)])
def test_a_state_at_a_boundary_is_a_hit_for_every_prompt_that_goes_beyond(tokens: int, hit: int) -> None:
    """vllm-ascend#16317: full 1024 and state 4096, boundary 4096 stored."""
    with Serving(recurrent(1024, 4096), hash_tokens=1024) as vllm:
        vllm.put(4096)
        assert vllm.ask(vllm.request("a", tokens))[0] == hit


def test_a_block_counts_if_every_head_of_every_stage_has_it() -> None:
    """vllm-ascend#4761."""
    stages = [KVLayout("m", [group(0, GroupKind.FULL, 16, [s], kv_heads=2)], tp_size=4, pp_size=2, pp_rank=s) for s in range(2)]
    with Serving(*stages) as vllm:
        assert vllm.side.storing_ranks == {0: 4}
        vllm.put(64)
        assert vllm.ask(vllm.request("a", 100))[0] == 64
        vllm.store.remove(stages[1].key(0, fine_hashes(1)[0], 1), force=True)
        assert vllm.ask(vllm.request("b", 100))[0] == 0


def test_a_request_that_is_not_to_read_caches_is_not_looked_up() -> None:
    with Serving(full()) as vllm:
        vllm.put(64)
        assert vllm.ask(vllm.request("a", 100, skip_reading_prefix_cache=True)) == MISS
        assert vllm.side.totals()["lookups"] == 0


@pytest.mark.parametrize("save_decode", [False, True])
def test_a_request_without_hashes_is_neither_found_nor_saved(save_decode: bool) -> None:
    """vLLM's prefix caching is off."""
    with Serving(recurrent(), save_decode_cache=save_decode) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100, hashed=False)
        assert vllm.admit(a) == 0
        assert saves(vllm.step({"a": 100}, offers={"a": [(1, 777, 96)]})) == {}


# -- what vLLM has itself ----------------------------------------------------------------------------------------------


def test_only_what_is_beyond_vllms_own_tokens_is_loaded() -> None:
    with Serving(full()) as vllm:
        vllm.put(96)
        a = vllm.request("a", 100)
        assert vllm.ask(a, local=48) == (48, True)
        assert loads(vllm.admitted(a, local=48)) == {"a": {0: [3, 4, 5]}}
        vllm.over(a)
        assert saves(vllm.step({"a": 4})) == {}


@pytest.mark.parametrize("local", [64, 80])
def test_a_hit_that_vllm_has_itself_is_none(local: int) -> None:
    with Serving(full()) as vllm:
        vllm.put(64)
        assert vllm.ask(vllm.request("a", 100), local) == MISS


def test_a_prompt_that_vllm_has_as_a_whole_is_not_looked_up() -> None:
    with Serving(full()) as vllm:
        assert vllm.ask(vllm.request("a", 65), local=64) == MISS
        assert vllm.side.totals()["lookups"] == 0


def test_what_is_loaded_goes_by_the_tokens_that_vllm_decided_on() -> None:
    with Serving(full()) as vllm:
        vllm.put(96)
        a = vllm.request("a", 100)
        assert vllm.ask(a) == (96, True)
        vllm.allocate(a, 32)
        plan = vllm.step()
        assert loads(plan) == {"a": {0: [0, 1]}}
        assert plan.loads[0].hashes == fine_hashes(2)


@pytest.mark.parametrize(
    ("local", "full_blocks", "window_blocks"),
    [(0, range(9), [6, 7, 8]), (80, range(5, 9), [6, 7, 8]), (112, [7, 8], [7, 8]), (128, [8], [8])],
)
def test_of_a_window_the_part_that_vllm_has_not_got_is_loaded(
    local: int, full_blocks: Sequence[int], window_blocks: list[int]
) -> None:
    with Serving(windowed(16, 48)) as vllm:
        vllm.put(144)
        a = vllm.request("a", 150)
        assert loads(vllm.admitted(a, local)) == {"a": {0: list(full_blocks), 1: window_blocks}}


def test_of_recurrent_states_the_last_is_loaded() -> None:
    with Serving(recurrent(16, 64)) as vllm:
        vllm.put(192)
        assert loads(vllm.admitted(vllm.request("a", 200))) == {"a": {0: list(range(12)), 1: [2]}}


# -- hits that are not worth it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stored", "local", "loaded"), [(32, 0, 0), (48, 0, 48), (64, 32, 0), (80, 32, 48)])
def test_a_load_that_saves_too_little_is_not_made(stored: int, local: int, loaded: int) -> None:
    with Serving(full(), load_min_tokens=33) as vllm:
        vllm.put(stored)
        assert vllm.ask(vllm.request("a", 200), local)[0] == loaded


def test_a_prompt_too_short_for_a_load_is_not_looked_up() -> None:
    with Serving(full(), load_min_tokens=64) as vllm:
        assert vllm.ask(vllm.request("a", 64)) == MISS
        assert vllm.ask(vllm.request("b", 100), local=48) == MISS
        assert vllm.side.totals()["lookups"] == 0


# -- lookups -----------------------------------------------------------------------------------------------------------


def test_a_lookup_that_ends_in_an_error_is_a_miss_and_counted() -> None:
    def broken() -> None:
        raise OSError("no route")

    with Serving(full(), lookup=broken) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        assert vllm.ask(a) == MISS
        vllm.allocate(a, 0)
        totals = vllm.side.totals()
        assert (totals["lookups"], totals["lookup_errors"], totals["lookup_misses"]) == (1, 1, 1)


def test_a_lookup_that_takes_too_long_is_asked_for_again_in_the_next_step() -> None:
    answered = threading.Event()
    with Serving(full(), lookup=lambda: answered.wait(20), lookup_budget_s=0.001) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        assert vllm.ask(a) == (None, False)
        vllm.step()
        assert vllm.ask(a) == (None, False)
        assert vllm.side.totals()["lookup_deferred"] == 2
        answered.set()
        while (found := vllm.ask(a)) == (None, False):
            vllm.step()
        assert found == (64, True)
        assert vllm.side.totals()["lookups"] == 1


def test_each_step_has_a_budget_for_all_its_lookups() -> None:
    gate = threading.Event()
    answers = iter([lambda: vllm.clock.advance(PATIENT_S), lambda: gate.wait(20)])
    with Serving(full(), lookup=lambda: next(answers)()) as vllm:
        vllm.put(64)
        assert vllm.ask(vllm.request("a", 100)) == (64, True)  # and the budget is used up
        b = vllm.request("b", 100)
        assert vllm.ask(b) == (None, False)
        vllm.step()
        threading.Timer(0.01, gate.set).start()
        assert vllm.ask(b) == (64, True)


# -- chunks, decoding --------------------------------------------------------------------------------------------------


def test_each_chunk_of_a_prefill_saves_the_blocks_that_it_completes() -> None:
    with Serving(full()) as vllm:
        vllm.admit(vllm.request("a", 150))
        found = [saves(vllm.step({"a": tokens})).get("a", {}).get(0) for tokens in (50, 50, 10, 40)]
        assert found == [[0, 1, 2], [3, 4, 5], None, [6, 7, 8]]


@pytest.mark.parametrize(("tokens", "block", "count", "hit"), [(18_000, 512, 35, 17_920), (24_576, 256, 96, 24_320)])
def test_no_block_of_a_long_prompt_is_lost(tokens: int, block: int, count: int, hit: int) -> None:
    """maru#57, vllm#53314: chunks of 8192."""
    with Serving(full(block), hash_tokens=block) as vllm:
        vllm.admit(vllm.request("a", tokens))
        saved: list[int] = []
        for start in range(0, tokens, 8192):
            saved += saves(vllm.step({"a": min(8192, tokens - start)}))["a"][0]
        assert saved == list(range(count))
        vllm.put(tokens)
        assert vllm.ask(vllm.request("b", tokens))[0] == hit


def decoded(vllm: Serving, prompt: int, made: int) -> list[dict[str, Any]]:
    """What the steps of a request save that makes so many tokens."""
    a = vllm.request("a", prompt)
    vllm.admit(a)
    plans = [saves(vllm.step({"a": prompt}))]
    for _ in range(made - 1):
        a.made += 1
        plans.append(saves(vllm.step({"a": 1})))
    return [plan for plan in plans if plan]


@pytest.mark.parametrize(("made", "objects"), [(8, []), (9, [{"a": {0: [0]}}])])
def test_a_block_that_decoding_fills_is_saved_if_it_is_asked_for(made: int, objects: list[Any]) -> None:
    """vllm#54853: the last token that was made is not computed yet."""
    with Serving(full(128), hash_tokens=128, save_decode_cache=True) as vllm:
        assert decoded(vllm, 120, made) == objects


def test_and_else_it_is_not() -> None:
    with Serving(full(128), hash_tokens=128) as vllm:
        assert decoded(vllm, 120, 20) == []


def test_tokens_that_are_only_guessed_fill_no_block() -> None:
    """With speculation a step computes more tokens than the request has."""
    with Serving(full(), save_decode_cache=True) as vllm:
        a = vllm.request("a", 60)
        vllm.admit(a)
        assert saves(vllm.step({"a": 60})) == {"a": {0: [0, 1, 2]}}
        a.made = 1
        assert saves(vllm.step({"a": 4})) == {}
        a.made, a.num_computed_tokens = 5, 64
        assert saves(vllm.step({"a": 1})) == {"a": {0: [3]}}


def test_blocks_without_memory_are_not_saved() -> None:
    """They left their window."""
    with Serving(windowed(16, 32)) as vllm:
        vllm.admit(vllm.request("a", 100), nulls={1: [0, 1, 2]})
        assert saves(vllm.step({"a": 100})) == {"a": {0: [0, 1, 2, 3, 4, 5], 1: [3, 4, 5]}}


# -- states ------------------------------------------------------------------------------------------------------------


def test_the_states_that_vllm_caches_are_saved_where_it_says() -> None:
    with Serving(recurrent()) as vllm:
        vllm.admit(vllm.request("a", 70))
        plan = vllm.step({"a": 70}, offers={"a": [(1, 777, 64)]})
        assert saves(plan) == {"a": {0: [0, 1, 2, 3], 1: [3]}}
        assert list(plan.requests[0].groups[1].block_ids) == [NULL_BLOCK] * 3 + [777]


def test_also_those_of_a_request_that_does_not_run_in_the_step() -> None:
    with Serving(recurrent()) as vllm:
        vllm.admit(vllm.request("a", 70))
        vllm.step({"a": 64})
        plan = vllm.step(offers={"a": [(1, 777, 64)]})
        assert saves(plan) == {"a": {1: [3]}}
        assert plan.requests[0].hashes == fine_hashes(4)


def test_a_state_that_came_from_the_store_is_not_saved_again() -> None:
    with Serving(recurrent()) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        vllm.admit(a)
        vllm.over(a)
        assert saves(vllm.step({"a": 36}, offers={"a": [(1, 777, 64), (1, 778, 96)]})) == {"a": {0: [4, 5], 1: [5]}}


def test_a_state_of_the_decode_is_saved_only_with_its_blocks() -> None:
    for save_decode, saved in ((False, {}), (True, {"a": {0: [4], 1: [4]}})):
        with Serving(recurrent(), save_decode_cache=save_decode) as vllm:
            a = vllm.request("a", 70)
            vllm.admit(a)
            vllm.step({"a": 70})
            a.made = 10
            a.num_computed_tokens = 79
            assert saves(vllm.step({"a": 1}, offers={"a": [(1, 777, 80)]})) == saved


# -- ends, preemption --------------------------------------------------------------------------------------------------


def test_a_request_that_ended_is_told_once() -> None:
    with Serving(full()) as vllm:
        vllm.admit(vllm.request("a", 32))
        vllm.step({"a": 32})
        assert vllm.step(finished=["a"]).ended == [A]
        assert vllm.step().ended == []


def test_one_that_was_aborted_before_it_had_blocks_leaves_nothing() -> None:
    with Serving(full()) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        vllm.ask(a)
        plan = vllm.step(finished=["a"])
        assert (plan.ended, plan.loads, plan.requests) == ([], [], [])
        vllm.lose(0, 2)
        assert vllm.ask(vllm.request("a", 100))[0] == 32  # a request of that name is asked for anew


def test_one_that_was_aborted_while_it_loads_ends_and_counts_for_nothing() -> None:
    """vllm-ascend#16662, vllm#56194."""
    with Serving(full()) as vllm:
        vllm.put(64)
        vllm.admit(vllm.request("a", 100))
        assert vllm.step(finished=["a"]).ended == [A]
        vllm.report(failed={A: 0}, over=["a"])
        vllm.side.reported(None, ["a"])
        plan = vllm.step()
        assert (plan.ended, plan.loads) == ([], [])
        totals = vllm.side.totals()
        assert (totals["hit_tokens"], totals["failed_loads"]) == (0, 0)


def test_a_request_that_was_preempted_begins_anew_with_all_its_tokens_for_a_prompt() -> None:
    with Serving(full()) as vllm:
        a = vllm.request("a", 100)
        vllm.admit(a)
        assert saves(vllm.step({"a": 100})) == {"a": {0: [0, 1, 2, 3, 4, 5]}}
        a.made = 20
        vllm.put(96)
        vllm.preempt(a)
        plan = vllm.admitted(a)
        assert (loads(plan), plan.loads[0].life, plan.ended) == ({"a": {0: [0, 1, 2, 3, 4, 5]}}, A, [])
        vllm.over(a)
        assert saves(vllm.step({"a": 24})) == {"a": {0: [6]}}


def test_one_whose_blocks_are_lost_to_the_store_too_saves_them_again() -> None:
    with Serving(full()) as vllm:
        a = vllm.request("a", 64)
        vllm.admit(a)
        vllm.step({"a": 64})
        vllm.preempt(a)
        assert vllm.admit(a) == 0
        assert saves(vllm.step({"a": 64})) == {"a": {0: [0, 1, 2, 3]}}


@pytest.mark.parametrize("tokens", [128, 129])
def test_a_prompt_may_end_on_the_boundary_also_after_a_preemption(tokens: int) -> None:
    """vllm#53663: at least one token is left to run, each time."""
    with Serving(full(128), hash_tokens=128) as vllm:
        vllm.put(128)
        a = vllm.request("a", tokens)
        for _ in range(2):
            external = vllm.admit(a)
            assert external == (128 if tokens > 128 else 0)
            if external:
                vllm.over(a)
            vllm.step({"a": tokens - external})
            vllm.preempt(a)


# -- loads that fail ---------------------------------------------------------------------------------------------------


def test_what_comes_after_a_failed_load_is_another_life_that_is_matched_no_further() -> None:
    with Serving(full()) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        vllm.admit(a)
        vllm.report(failed={A: 32}, over=["a"])
        vllm.preempt(a)
        assert vllm.ask(a) == (32, True)
        vllm.allocate(a, 32)
        plan = vllm.step()
        assert plan.ended == [A]
        assert (plan.loads[0].life, loads(plan)) == (Life("a", 1), {"a#1": {0: [0, 1]}})


def attempts(vllm: Serving, tokens: int, fails_at: Any) -> list[int]:
    """Hits of a request until it is computed, when each load of it fails at `fails_at(hit)`."""
    a = vllm.request("a", tokens)
    hits: list[int] = []
    while external := vllm.admit(a):
        hits.append(external)
        assert len(hits) < 100, "it would load and fail for ever"
        life = vllm.plan.loads[0].life
        vllm.report(failed={life: fails_at(external)}, over=["a"])
        vllm.preempt(a)
    return hits


@pytest.mark.parametrize(
    ("layout", "fails_at", "hits"),
    [
        (full(), lambda hit: hit - 16, [96, 80, 64, 48, 32, 16]),
        (full(), lambda _: 0, [96]),
        (full(), lambda hit: hit - 1, [96, 80, 64, 48, 32, 16]),
        (windowed(16, 32), lambda hit: max(hit - 32, 0), [96, 64, 32]),
        (recurrent(16, 48), lambda hit: hit - 48, [96, 48]),
    ],
)
def test_every_retry_is_shorter_than_the_one_before_so_they_end(layout: KVLayout, fails_at: Any, hits: list[int]) -> None:
    with Serving(layout) as vllm:
        vllm.put(96)
        assert attempts(vllm, 100, fails_at) == hits
        totals = vllm.side.totals()
        assert (totals["failed_loads"], totals["hit_tokens"]) == (len(hits), 0)
        assert saves(vllm.step({"a": 100}))[f"a#{len(hits)}"][0] == list(range(6))


def test_loads_that_fail_are_no_hits() -> None:
    """dynamo#15079: every get fails."""
    with Serving(full()) as vllm:
        vllm.put(64)
        vllm.admit(vllm.request("a", 100))
        vllm.report(failed={A: 0}, over=["a"])
        vllm.side.reported(None, ["a"])
        totals = vllm.side.totals()
        assert (totals["hit_tokens"], totals["failed_loads"]) == (0, 1)


@pytest.mark.parametrize(("one", "other"), [(48, 16), (16, 48)])
def test_a_failure_that_a_second_rank_reports_later_ends_no_second_life(one: int, other: int) -> None:
    with Serving(full()) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        vllm.admit(a)
        vllm.report(failed={A: one})
        vllm.report(failed={A: other}, over=["a"])
        vllm.preempt(a)
        assert vllm.side.totals()["failed_loads"] == 1
        assert vllm.ask(a) == (16, True)
        vllm.allocate(a, 16)
        plan = vllm.step()
        assert (plan.ended, plan.loads[0].life) == ([A], Life("a", 1))


def test_a_load_inside_a_step_that_failed_is_repeated_from_its_first_token() -> None:
    """vLLM sets the request back and goes on, without another match."""
    with Serving(full(), layerwise=True) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        vllm.admit(a)
        vllm.step({"a": 36})
        vllm.report(failed={A: 32})
        a.num_computed_tokens = 32
        plan = vllm.step({"a": 68})
        assert plan.ended == [A]
        assert (loads(plan), saves(plan)) == ({}, {"a#1": {0: [0, 1, 2, 3, 4, 5]}})


def test_a_request_that_recovered_by_itself_goes_on_as_another_life_with_its_hit() -> None:
    """What was saved under the old life stops there; nothing is matched shorter."""
    with Serving(full(), layerwise=True) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        vllm.admit(a)
        vllm.step({"a": 30})
        vllm.report(arrived={A}, tainted={A})
        plan = vllm.step({"a": 6})
        assert (plan.ended, saves(plan)) == ([A], {"a#1": {0: [5]}})
        totals = vllm.side.totals()
        assert (totals["hit_tokens"], totals["failed_loads"]) == (64, 0)
        vllm.preempt(a)
        assert vllm.ask(a)[0] == 64


def test_one_that_failed_as_well_counts_as_failed() -> None:
    with Serving(full(), layerwise=True) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        vllm.admit(a)
        vllm.step({"a": 36})
        vllm.report(failed={A: 0}, tainted={A}, arrived={A})
        assert vllm.side.totals()["hit_tokens"] == 0
        assert vllm.step().ended == [A]
        vllm.preempt(a)
        assert vllm.ask(a) == MISS


# -- blocks without memory, tables -------------------------------------------------------------------------------------


def test_a_load_into_a_block_without_memory_is_not_made_and_says_so() -> None:
    with Serving(windowed(16, 32)) as vllm:
        vllm.put(96)
        (load,) = vllm.admitted(vllm.request("a", 100), nulls={0: [2], 1: [4]}).loads
        assert load.groups == {}
        assert "group 0: blocks [2]" in load.problem
        assert "group 1: blocks [4]" in load.problem


def test_blocks_outside_of_a_window_need_none() -> None:
    with Serving(windowed(16, 32)) as vllm:
        vllm.put(96)
        (load,) = vllm.admitted(vllm.request("a", 100), nulls={1: [0, 1, 2, 3]}).loads
        assert load.problem == ""
        assert list(load.groups[1].load) == [4, 5]
        assert list(load.groups[1].block_ids[:4]) == [NULL_BLOCK] * 4


def test_also_inside_of_a_step() -> None:
    with Serving(full(), layerwise=True) as vllm:
        vllm.put(64)
        vllm.admit(vllm.request("a", 100), nulls={0: [1]})
        (request,) = vllm.step({"a": 36}).requests
        assert "group 0: blocks [1] are to be loaded" in request.problem


def test_a_request_without_a_block_table_is_skipped_and_counted_and_the_others_go_on() -> None:
    """vllm#54870."""
    with Serving(full()) as vllm:
        vllm.admit(vllm.request("a", 64))
        vllm.admit(vllm.request("b", 64, prompt="q"))
        plan = vllm.step({"a": 64, "b": 64}, without_table=["a"])
        assert saves(plan) == {"b": {0: [0, 1, 2, 3]}}
        assert vllm.side.totals()["no_block_table"] == 1


def test_a_request_that_nobody_knows_is_skipped_and_counted() -> None:
    with Serving(recurrent()) as vllm:
        vllm.admit(vllm.request("b", 64))
        plan = vllm.step({"left": 5, "b": 64}, offers={"left too": [(1, 7, 16)]})
        assert saves(plan) == {"b": {0: [0, 1, 2, 3]}}
        assert vllm.side.totals()["no_block_table"] == 2


def test_a_load_of_a_request_without_a_block_table_goes_where_it_was_allocated() -> None:
    with Serving(full(), layerwise=True) as vllm:
        vllm.put(64)
        vllm.admit(vllm.request("a", 100))
        plan = vllm.step({"a": 36}, without_table=["a"])
        assert [(r.life, r.groups[0].load, r.problem) for r in plan.requests] == [(A, (0, 1, 2, 3), "")]
        assert list(plan.requests[0].groups[0].block_ids[:4]) == [100, 101, 102, 103]


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_table_without_one_of_the_groups_is_an_error_of_that_request_alone(layerwise: bool) -> None:
    with Serving(windowed(), layerwise=layerwise) as vllm:
        vllm.admit(vllm.request("a", 64))
        vllm.admit(vllm.request("b", 64, prompt="q"))
        del vllm.tables["a"].of_group[1]
        assert saves(vllm.step({"a": 64, "b": 64}))["b"] == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


# -- requests that share blocks ----------------------------------------------------------------------------------------


def test_who_shares_what_a_step_only_loads_waits_for_the_next() -> None:
    """vLLM takes blocks for computed once they are allocated; if the load failed, the second would go on with nothing."""
    with Serving(full(), layerwise=True) as vllm:
        vllm.put(64)
        vllm.admit(vllm.request("a", 100))
        twin, other = vllm.request("b", 90), vllm.request("c", 90, prompt="q")
        assert vllm.ask(twin, local=64) == (None, False)
        assert vllm.ask(other) == (0, False)
        vllm.step({"a": 36})
        assert vllm.ask(twin, local=64) == (0, False)


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_step_that_loads_nothing_names_only_those_who_save(layerwise: bool) -> None:
    with Serving(windowed(), layerwise=layerwise) as vllm:
        vllm.admit(vllm.request("b", 10, prompt="q"))
        vllm.admit(vllm.request("a", 100))
        assert [r.life.name for r in vllm.step({"a": 100, "b": 10}).requests] == ["a"]


# -- a reset -----------------------------------------------------------------------------------------------------------


def test_after_a_reset_nothing_of_before_is_found_and_blocks_have_other_names() -> None:
    with Serving(full(), events=True) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        assert vllm.ask(a) == (64, True)
        vllm.side.reset()
        assert vllm.ask(a) == (0, False), "also for one that was answered before"
        b = vllm.request("b", 100)
        assert vllm.ask(b)[0] == 0
        vllm.allocate(b, 0)
        (request,) = vllm.step({"b": 100}).requests
        assert request.event is not None
        assert list(request.event.hashes) == fine_hashes(6), "routers know vLLM's own"
        assert not set(request.hashes) & set(fine_hashes(6))
        assert len(set(request.hashes)) == 6
        names = list(request.hashes)
        vllm.side.reset()
        vllm.allocate(vllm.request("c", 100), 0)
        assert not set(vllm.step({"c": 100}).requests[0].hashes) & set(names), "each reset has names of its own"


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_hits_are_counted_once_and_when_they_are_there() -> None:
    """vllm#30522: 1000 tokens, 600 local, 200 external; allocation fails three times."""
    with Serving(full(200), hash_tokens=200) as vllm:
        vllm.put(800)
        a = vllm.request("a", 1000)
        for _ in range(4):
            assert vllm.ask(a, local=600) == (200, True)
            vllm.step()
        vllm.allocate(a, 200)
        a.num_computed_tokens = 800
        vllm.step()
        assert vllm.side.totals()["hit_tokens"] == 0
        vllm.over(a)
        vllm.side.reported(None, ["a"])
        totals = vllm.side.totals()
        assert (totals["lookups"], totals["hit_tokens"], totals["lookup_misses"]) == (1, 200, 0)


def test_hits_inside_of_a_step_are_counted_by_the_workers_report() -> None:
    with Serving(full(), layerwise=True) as vllm:
        vllm.put(64)
        vllm.admit(vllm.request("a", 100))
        vllm.step({"a": 36})
        assert vllm.side.totals()["hit_tokens"] == 0
        for _ in range(2):
            vllm.report(arrived={A})
        assert vllm.side.totals()["hit_tokens"] == 64


def test_a_request_that_comes_back_may_hit_again() -> None:
    with Serving(full()) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        for _ in range(2):
            vllm.admit(a)
            vllm.over(a)
            vllm.preempt(a)
        assert vllm.side.totals()["hit_tokens"] == 128


# -- roles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "settings", "hit", "saved"),
    [
        (BOTH, {}, 64, [4, 5]),
        (PRODUCER, {}, 64, [4, 5]),
        (CONSUMER, {}, 64, None),
        (CONSUMER, {"consumer_is_to_put": True}, 64, [4, 5]),
        (CONSUMER, {"consumer_is_to_load": False, "consumer_is_to_put": True}, 0, [0, 1, 2, 3, 4, 5]),
        (CONSUMER, {"consumer_is_to_load": False}, 0, None),
    ],
)
def test_an_instance_loads_and_saves_as_its_role_says(
    role: str, settings: dict[str, bool], hit: int, saved: list[int] | None
) -> None:
    with Serving(full(), role=role, **settings) as vllm:
        vllm.put(64)
        a = vllm.request("a", 100)
        assert vllm.admit(a) == hit
        if hit:
            vllm.over(a)
        assert saves(vllm.step({"a": 100 - hit})).get("a", {}).get(0) == saved
        assert vllm.opened == (1 if hit else 0)


def test_states_go_by_the_role_too() -> None:
    with Serving(recurrent(), role=CONSUMER) as vllm:
        vllm.admit(vllm.request("a", 70))
        assert saves(vllm.step({"a": 70}, offers={"a": [(1, 777, 64)]})) == {}


# -- KV cache events ---------------------------------------------------------------------------------------------------


def test_events_carry_the_tokens_of_what_is_saved_and_the_loras_name() -> None:
    with Serving(full(), events=True) as vllm:
        vllm.admit(vllm.request("a", 100, lora_request=SimpleNamespace(lora_name="french")))
        vllm.step({"a": 40})
        (request,) = vllm.step({"a": 60}).requests
        assert request.event.token_ids == list(range(1000, 1096))
        assert request.event.lora_name == "french"
        assert request.hashes == fine_hashes(6)


@pytest.mark.parametrize(("events", "tokens"), [(False, 100), (True, 10)])
def test_where_they_are_not_wanted_or_nothing_is_saved_there_are_none(events: bool, tokens: int) -> None:
    with Serving(full(), layerwise=True, events=events) as vllm:
        vllm.put(64, prompt="q")
        vllm.admit(vllm.request("a", tokens))
        vllm.admit(vllm.request("b", 65, prompt="q"))
        assert {r.event for r in vllm.step({"a": tokens, "b": 1}).requests} == {None}


# -- held blocks -------------------------------------------------------------------------------------------------------


def test_blocks_that_may_still_be_written_are_held_and_vllm_goes_on_stepping() -> None:
    with Serving(full()) as vllm:
        assert not vllm.side.busy
        vllm.report(held=[5, 7])
        assert vllm.pool.held == [5, 7]
        assert vllm.side.busy
        vllm.report(returned=[7])
        assert vllm.side.busy
        vllm.report(returned=[5])
        assert (vllm.pool.held, vllm.side.busy) == ([], False)


# -- start -------------------------------------------------------------------------------------------------------------


def unconnected(**more: Any) -> SchedulerSide:
    def nothing() -> Any:
        raise AssertionError("the store is opened when the layouts are known")

    arguments: dict[str, Any] = {"role": BOTH, "layerwise": False, "retention": 0, "hash_tokens": 16, **more}
    return SchedulerSide(ConnectorSettings.of({"backend": "memory"}), ManualClock(), nothing, **arguments)


def test_before_the_workers_have_published_anything_nothing_is_found_or_saved() -> None:
    side = unconnected()
    request = SimpleNamespace(request_id="a", num_tokens=100, block_hashes=fine_hashes(6))
    assert side.matched(request, 0) == MISS
    side.allocated(request, None, 0)
    output = SimpleNamespace(finished_req_ids=set(), total_num_scheduled_tokens=100)
    assert side.plan(output) == StepPlan(runs=True)
    assert side.totals()["lookups"] == 0
    side.close()


def test_a_store_in_memory_needs_the_worker_in_the_schedulers_process() -> None:
    """Else every lookup would be a miss, without a word."""
    with pytest.raises(ConfigError, match="another process"):
        unconnected().connect({(0, 0): Handshake(full(16), 16, process=os.getpid() + 1)})


def test_workers_that_hash_other_units_are_refused_with_both_numbers() -> None:
    """vllm#42895."""
    with pytest.raises(ConfigError, match=r"workers hash every \[32\] tokens, the scheduler every 16"):
        unconnected().connect({(0, 0): Handshake(full(32), 32)})


def test_ranks_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(LayoutError, match="must have the same caches"):
        unconnected().connect({(0, 0): Handshake(full(16), 16), (0, 1): Handshake(full(32), 16)})


def test_a_draft_re_reads_the_last_block_of_a_hit() -> None:
    with Serving(full(speculative=True)) as vllm:
        vllm.put(64)
        assert vllm.ask(vllm.request("a", 200))[0] == 48


def test_also_where_the_draft_is_on_another_stage_than_the_first() -> None:
    """vLLM marks a group only on the stages that have a layer of it."""
    first = KVLayout("m", [group(0, GroupKind.FULL, 16, [0]), group(1, GroupKind.FULL, 16, [])], pp_size=2)
    last = KVLayout(
        "m",
        [group(0, GroupKind.FULL, 16, [1]), group(1, GroupKind.FULL, 16, [2], speculative=True)],
        pp_size=2,
        pp_rank=1,
    )
    with Serving(first, last) as vllm:
        vllm.put(64)
        assert vllm.ask(vllm.request("a", 200))[0] == 48


FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.STATE


@pytest.mark.parametrize(
    ("kinds", "settings", "facts", "layerwise"),
    [
        ([FULL], {}, {}, True),
        ([FULL], {"use_layerwise": False}, {}, False),
        ([FULL], {"load_async": True}, {}, False),
        ([FULL], {"load_async": True, "use_layerwise": True}, {}, False),
        ([FULL], {"load_async": False}, {}, True),
        ([FULL], {}, {"stages": 2}, False),
        ([FULL], {"use_layerwise": True}, {"stages": 2}, False),
        ([FULL], {}, {"ahead": True}, False),
        ([FULL], {"use_layerwise": True}, {"drafts": True}, False),
        ([FULL], {}, {"groups": 2}, False),
        ([FULL, WINDOW], {}, {}, False),
        ([FULL, WINDOW], {"use_layerwise": True}, {}, True),
        ([STATE], {}, {}, False),
        ([FULL, STATE], {"use_layerwise": True}, {}, False),
    ],
)
def test_loads_run_inside_the_forward_pass_where_that_is_right(
    kinds: list[GroupKind], settings: dict[str, bool], facts: dict[str, Any], layerwise: bool
) -> None:
    asked = {"groups": len(kinds), **facts}
    assert may_load_layerwise(kinds, ConnectorSettings.of(settings), **asked) is layerwise
