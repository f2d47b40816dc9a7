"""The hand-off in a worker rank: what its plan says is done, and what came of it is reported once, by vLLM's own ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

# It imports all that is needed of vLLM, and keeps quiet about the warnings.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM is not importable", exc_type=ImportError)

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.devices import ManualClock
from kvactors.disagg.blocks import GroupBlocks, RequestBlocks
from kvactors.disagg.geometry import worker_geometry
from kvactors.disagg.messages import OutcomeKind, Source
from kvactors.vllm.handoff_worker import IDLE_WAIT_S, HandoffSide
from kvactors.vllm.messages import HandoffPlan, HeldPrefill, Pull, WorkerReport
from kvactors.vllm.pins import Pins
from tests.connector.rig import BlockPool
from tests.vllm.handoff_rig import FakeWorker

LAYOUT = KVLayout(
    "m",
    [
        Group(0, GroupKind.FULL, 16, {0: [CacheEntry("kv", 8)]}),
        Group(1, GroupKind.STATE, 16, {1: [CacheEntry("conv", 4), CacheEntry("ssm", 6)]}),
    ],
)
SOURCE = Source("t", "p", "http://127.0.0.1:8998")
BLOCKS = RequestBlocks(40, (GroupBlocks(0, (4, 5, 0)), GroupBlocks(2, (6,))))


class Rig:
    def __init__(self, *, early: bool = True) -> None:
        self.worker = FakeWorker()
        self.side = HandoffSide(cast(Any, self.worker), worker_geometry(LAYOUT, 0, 16, []), LAYOUT, early=early)
        self.pins, self.pool = Pins(ManualClock()), BlockPool()
        self.pins.pool = self.pool

    def step(self, *, runs: bool = True, **plan: Any) -> tuple[set[str], set[str], set[str]]:
        """A step as vLLM drives it, with its report to the scheduler's pins."""
        self.side.begin(HandoffPlan(**plan), runs=runs)
        self.side.start_loads()
        report = WorkerReport()
        found = self.side.finished(report)
        self.pins.update(report.held, report.returned)
        return found

    def pull(self, name: str = "d/1", blocks: RequestBlocks = BLOCKS) -> None:
        self.step(pulls=[Pull(name, name.partition("/")[0], SOURCE, blocks)])
        self.worker.take()


NOTHING: tuple[set[str], set[str], set[str]] = (set(), set(), set())


# -- prefill -----------------------------------------------------------------------------------------------------------


def test_what_prefill_holds_is_reported_by_its_own_request_id_once() -> None:
    rig = Rig()
    assert rig.step(requests=["t"]) == NOTHING
    assert rig.step(prefilled=[HeldPrefill("t", "p-1", BLOCKS)]) == NOTHING
    assert rig.worker.take() == [("request", "t"), ("prefilled", "t", BLOCKS)]
    rig.worker.free = {"t"}
    assert rig.step() == ({"p-1"}, set(), set())
    rig.worker.free = {"t"}
    assert rig.step() == NOTHING


def test_what_was_cancelled_is_not_reported() -> None:
    """vLLM has its blocks, and knows nothing of it any more: a report would end the engine."""
    rig = Rig()
    rig.step(requests=["t"], cancelled=[("t", "aborted")])
    assert rig.worker.take() == [("request", "t"), ("cancel", "t")]
    rig.worker.free = {"t"}
    assert rig.step() == NOTHING


# -- decode ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OutcomeKind.LOADED, OutcomeKind.ABORTED])
def test_what_is_over_is_reported_once(kind: OutcomeKind) -> None:
    rig = Rig()
    rig.pull()
    assert rig.step() == NOTHING
    rig.worker.tell("d/1", kind)
    assert rig.step() == (set(), {"d"}, set())
    assert rig.step() == NOTHING
    loaded = kind is OutcomeKind.LOADED
    totals = rig.side.totals()
    assert (totals["handoff_received"], totals["handoff_received_bytes"]) == (loaded, (2 * 8 + 10) * loaded)


def test_a_failure_is_in_both_sets_and_holds_nothing() -> None:
    rig = Rig()
    rig.pull()
    rig.worker.tell("d/1", OutcomeKind.FAILED)
    assert rig.step() == (set(), {"d"}, {"d"})
    assert rig.pool.held == []
    assert rig.side.totals()["handoff_failed"] == 1


def test_the_blocks_of_a_fenced_failure_are_held_until_they_return() -> None:
    """The report that names them comes with the failure: vLLM frees them after it has read both."""
    rig = Rig()
    rig.pull()
    rig.worker.tell("d/1", OutcomeKind.FAILED, fenced=True)
    assert rig.step() == (set(), {"d"}, {"d"})
    assert rig.pool.held == [4, 5, 6]
    assert rig.pins.busy
    assert rig.step() == NOTHING
    rig.worker.tell("d/1", OutcomeKind.RETURNED)
    assert rig.step() == NOTHING
    assert rig.pool.held == []
    assert rig.side.totals()["handoff_fenced_blocks"] == 3


def test_failed_and_returned_within_one_step() -> None:
    rig = Rig()
    rig.pull()
    rig.worker.tell("d/1", OutcomeKind.FAILED, fenced=True)
    rig.worker.tell("d/1", OutcomeKind.RETURNED)
    assert rig.step() == (set(), {"d"}, {"d"})
    assert rig.pool.held == []


def test_a_request_that_is_given_up_is_reported_when_its_blocks_are_free() -> None:
    rig = Rig()
    rig.pull()
    assert rig.step(given_up=[("d/1", "aborted")]) == NOTHING
    assert rig.worker.take() == [("give_up", "d/1")]
    rig.worker.tell("d/1", OutcomeKind.ABORTED)
    assert rig.step() == (set(), {"d"}, set())


@pytest.mark.parametrize("kind", [OutcomeKind.LOADED, OutcomeKind.FAILED])
def test_what_is_over_is_not_given_up(kind: OutcomeKind) -> None:
    """vLLM aborts it before it has read the report; the report stands."""
    rig = Rig()
    rig.pull()
    rig.worker.tell("d/1", kind)
    rig.step()
    assert rig.step(given_up=[("d/1", "aborted")]) == NOTHING
    assert rig.worker.take() == []


def test_an_empty_pull_is_made_and_never_reported() -> None:
    rig = Rig()
    rig.step(pulls=[Pull("d/1", "d", SOURCE, RequestBlocks(40))])
    assert rig.worker.take() == [("receive", "d/1", True)]
    rig.worker.tell("d/1", OutcomeKind.LOADED)
    assert rig.step() == NOTHING


def test_a_request_id_that_is_used_again_while_its_first_blocks_are_fenced() -> None:
    rig = Rig()
    rig.pull()
    rig.worker.tell("d/1", OutcomeKind.FAILED, fenced=True)
    rig.step()
    rig.pull("d/2", RequestBlocks(16, (GroupBlocks(0, (7,)), GroupBlocks(0, (8,)))))
    rig.worker.tell("d/2", OutcomeKind.LOADED)
    assert rig.step() == (set(), {"d"}, set())
    assert rig.pool.held == [4, 5, 6]
    rig.worker.tell("d/1", OutcomeKind.RETURNED)
    rig.step()
    assert rig.pool.held == []


# -- when things are done ----------------------------------------------------------------------------------------------


def test_on_a_device_pulls_begin_when_the_forward_pass_is_on_its_way() -> None:
    rig = Rig(early=False)
    rig.side.begin(HandoffPlan(pulls=[Pull("d/1", "d", SOURCE, BLOCKS)]), runs=True)
    assert rig.worker.take() == []
    rig.side.start_loads()
    rig.side.start_loads()
    assert rig.worker.take() == [("receive", "d/1", False)]


def test_on_a_cpu_pulls_begin_before_the_forward_pass() -> None:
    rig = Rig()
    rig.side.begin(HandoffPlan(pulls=[Pull("d/1", "d", SOURCE, BLOCKS)]), runs=True)
    assert rig.worker.take() == [("receive", "d/1", False)]


@pytest.mark.parametrize(
    ("runs", "pending", "waited"), [(True, 1, []), (False, 0, []), (False, 1, [IDLE_WAIT_S])], ids=["runs", "rests", "waits"]
)
def test_only_a_step_that_computes_nothing_waits_and_only_for_hand_offs(runs: bool, pending: int, waited: list[float]) -> None:
    rig = Rig()
    rig.worker.pending = pending
    rig.step(runs=runs)
    assert rig.worker.waited == waited


def test_what_moved_is_told_once() -> None:
    rig = Rig()
    rig.step()
    assert not rig.side.take_moved()
    rig.pull()
    assert rig.side.take_moved()
    rig.step()
    assert not rig.side.take_moved()
    rig.worker.tell("d/1", OutcomeKind.LOADED)
    rig.step()
    assert rig.side.take_moved()


def test_closing() -> None:
    rig = Rig()
    rig.side.close()
    assert rig.worker.closed


# -- several ranks -----------------------------------------------------------------------------------------------------


def joined(aggregator: KVOutputAggregator, ranks: Sequence[tuple[set[str], set[str], set[str]]]) -> Any:
    """What vLLM's aggregator makes of the ranks' reports of one step."""
    outputs = []
    for sent, received, failed in ranks:
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        output.kv_connector_output = KVConnectorOutput(
            finished_sending=sent, finished_recving=received, failed_recving=failed, invalid_block_ids=set()
        )
        outputs.append(output)
    made = aggregator.aggregate(outputs)
    assert made is not None
    assert made.kv_connector_output is not None
    found = made.kv_connector_output
    return SimpleNamespace(
        sent=found.finished_sending or set(), received=found.finished_recving or set(), failed=found.failed_recving or set()
    )


def test_a_request_is_over_when_all_ranks_have_said_so() -> None:
    ranks, aggregator = [Rig(), Rig()], KVOutputAggregator(2)
    for rig in ranks:
        rig.pull()
        rig.step(prefilled=[HeldPrefill("t", "p-1", BLOCKS)])
    ranks[0].worker.tell("d/1", OutcomeKind.LOADED)
    ranks[1].worker.free = {"t"}
    found = joined(aggregator, [rig.step() for rig in ranks])
    assert (found.sent, found.received) == (set(), set())
    ranks[1].worker.tell("d/1", OutcomeKind.LOADED)
    ranks[0].worker.free = {"t"}
    found = joined(aggregator, [rig.step() for rig in ranks])
    assert (found.sent, found.received, found.failed) == ({"p-1"}, {"d"}, set())
    found = joined(aggregator, [rig.step() for rig in ranks])
    assert (found.sent, found.received) == (set(), set())


@pytest.mark.parametrize("first", [OutcomeKind.LOADED, OutcomeKind.FAILED])
def test_one_rank_fails_and_the_request_fails_when_the_other_is_over(first: OutcomeKind) -> None:
    second = OutcomeKind.FAILED if first is OutcomeKind.LOADED else OutcomeKind.LOADED
    ranks, aggregator = [Rig(), Rig()], KVOutputAggregator(2)
    for rig in ranks:
        rig.pull()
    ranks[0].worker.tell("d/1", first)
    found = joined(aggregator, [rig.step() for rig in ranks])
    assert (found.received, found.failed) == (set(), set())
    ranks[1].worker.tell("d/1", second)
    found = joined(aggregator, [rig.step() for rig in ranks])
    assert (found.received, found.failed) == ({"d"}, {"d"})


def test_blocks_that_two_ranks_fence_are_held_until_both_have_returned_them() -> None:
    ranks = [Rig(), Rig()]
    for rig in ranks:
        rig.pull()
        rig.worker.tell("d/1", OutcomeKind.FAILED, fenced=True)
    pins, pool = Pins(ManualClock()), BlockPool()
    pins.pool = pool

    def report() -> None:
        reports = [WorkerReport(), WorkerReport()]
        for rig, one in zip(ranks, reports, strict=True):
            rig.side.begin(HandoffPlan(), runs=True)
            rig.side.finished(one)
        both = reports[0].aggregate(reports[1])
        pins.update(both.held, both.returned)

    report()
    assert pool.held == [4, 5, 6]
    assert Counter(b.ref_cnt for b in pool.blocks)[1] == 3
    ranks[0].worker.tell("d/1", OutcomeKind.RETURNED)
    report()
    assert pool.held == [4, 5, 6]
    ranks[1].worker.tell("d/1", OutcomeKind.RETURNED)
    report()
    assert pool.held == []
