"""What crosses between scheduler and workers: it survives pickling, and the reports of several ranks add up."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest

# It imports all that is needed of vLLM, and keeps quiet about the warnings.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM is not importable", exc_type=ImportError)

from kvactors.core.layout import GroupKind, KVLayout
from kvactors.core.steps import GroupBlocks
from kvactors.errors import LayoutError
from kvactors.vllm.messages import Event, Handshake, Life, LoadPlan, RequestPlan, StepPlan, WorkerReport, one_layout_per_stage
from tests.connector.rig import fine_hashes, full, group

A, B = Life("a"), Life("b")


def test_the_engine_knows_a_life_by_its_request_and_by_how_often_that_failed() -> None:
    assert [Life("a", n).name for n in range(3)] == ["a", "a#1", "a#2"]


def test_messages_survive_pickling() -> None:
    blocks = {0: GroupBlocks([5, -1], load=(0,), save=(1,))}
    plan = StepPlan(
        [RequestPlan(A, fine_hashes(2), blocks, Event([1, 2], [b"h"], "lora"))],
        [LoadPlan(B, [b"x"], blocks, "why")],
        [A],
        runs=False,
    )
    report = WorkerReport({A: 16}, {B}, {A}, Counter([3]), Counter([5]))
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert pickle.loads(pickle.dumps(report)) == report
    shake = pickle.loads(pickle.dumps(Handshake(full(), 16)))
    assert (shake.layout.digest, shake.hash_tokens) == (full().digest, 16)


def test_a_request_without_blocks_to_load_loads_nothing() -> None:
    assert RequestPlan(A, [], {0: GroupBlocks([1], save=(0,)), 1: GroupBlocks([1], load=(0,))}).loads
    assert not RequestPlan(A, [], {0: GroupBlocks([1], save=(0,))}).loads


# -- reports -----------------------------------------------------------------------------------------------------------


def test_reports_of_ranks_add_up() -> None:
    one = WorkerReport({A: 32, B: 0}, {B}, {A}, {A}, {8}, Counter([3, 5]), Counter([7]))
    other = WorkerReport({A: 16}, {A}, {B}, {B}, {9}, Counter([5]), Counter([7, 9]))
    both = WorkerReport({A: 16, B: 0}, {A, B}, {A, B}, {A, B}, {8, 9}, Counter([3, 5, 5]), Counter([7, 7, 9]))
    assert one.aggregate(other) == both == other.aggregate(one)


def test_adding_up_leaves_the_reports_as_they_are() -> None:
    one = WorkerReport({A: 32}, held=Counter([3]))
    one.aggregate(WorkerReport({A: 16}, held=Counter([3])))
    assert one == WorkerReport({A: 32}, held=Counter([3]))


@pytest.mark.parametrize(
    "told", [{"failed": {A: 0}}, {"arrived": {A}}, {"tainted": {A}}, {"held": Counter([3])}, {"returned": Counter([3])}]
)
def test_a_report_is_true_if_it_says_anything(told: dict[str, Any]) -> None:
    assert WorkerReport(**told)
    assert not WorkerReport()


# -- handshakes --------------------------------------------------------------------------------------------------------


def stage(number: int, stages: int = 2, *, layers: int = 1, tp: int = 1) -> KVLayout:
    found = group(0, GroupKind.FULL, 16, [number * 10 + i for i in range(layers)])
    return KVLayout("m", [found], tp_size=tp, pp_rank=number, pp_size=stages)


def shakes(*layouts: tuple[tuple[int, int], KVLayout]) -> dict[tuple[int, int], Handshake]:
    return {at: Handshake(layout, 16) for at, layout in layouts}


def test_each_stage_has_one_layout_first_stage_first() -> None:
    found = one_layout_per_stage(shakes(((1, 0), stage(1)), ((0, 1), stage(0)), ((0, 0), stage(0)), ((1, 1), stage(1))))
    assert found == [stage(0), stage(1)]


def test_one_worker_is_one_stage() -> None:
    assert one_layout_per_stage(shakes(((0, 0), full()))) == [full()]


def test_ranks_of_a_stage_must_have_the_same_caches() -> None:
    with pytest.raises(LayoutError, match=r"TP rank 1 of stage 1 has the layout .*, another rank .*; all ranks") as error:
        one_layout_per_stage(shakes(((0, 0), stage(0)), ((1, 0), stage(1)), ((1, 1), stage(1, layers=2))))
    assert stage(1).digest[:12] in str(error.value)
    assert stage(1, layers=2).digest[:12] in str(error.value)


@pytest.mark.parametrize(("there", "missing"), [([0], "[1, 2]"), ([0, 2], "[1]"), ([1, 2], "[0]")])
def test_every_stage_must_have_published_its_layout(there: list[int], missing: str) -> None:
    with pytest.raises(LayoutError) as error:
        one_layout_per_stage(shakes(*(((n, 0), stage(n, 3)) for n in there)))
    assert f"stages {missing} of 3 did not publish their layouts" in str(error.value)


def test_nobody_published_anything() -> None:
    with pytest.raises(LayoutError, match="no worker published its layout"):
        one_layout_per_stage({})
