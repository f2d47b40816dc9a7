"""The connector's side in a worker: steps as vLLM's runner drives them, over a store in memory."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvactors.core.config import EngineConfig
from kvactors.core.steps import GroupBlocks
from kvactors.core.store import Outcome
from kvactors.devices import MonotonicClock
from kvactors.errors import LoadFailedError
from kvactors.stores.fault_plan import Fault
from kvactors.stores.memory import MemoryStore

# It imports all that is needed of vLLM, and keeps quiet about the warnings.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM is not importable", exc_type=ImportError)

from kvactors.vllm import worker
from kvactors.vllm.messages import Event, Life, StepPlan
from kvactors.vllm.settings import ConnectorSettings
from kvactors.vllm.worker import IDLE_WAIT_S, WorkerSide
from tests.engine.rig import hashes
from tests.vllm.worker_rig import BLOCK, WorkerRig, full_layout, load, request, state_layout, window_layout

IDS = [3, 4, 5]
BACK = [10, 11, 12]
MORE = [20]


def save_all(rig: WorkerRig, name: str = "a", ids: list[int] = IDS, **more: Any) -> None:
    groups = [g.id for g in rig.layout.groups]
    plan = StepPlan([request(name, dict.fromkeys(groups, ids), save=dict.fromkeys(groups, range(len(ids))), **more)])
    rig.step(plan, compute=lambda _: None)


def saved(rig: WorkerRig) -> int:
    return sum(g.saved for g in rig.side.engine.stats().groups.values())


@pytest.fixture
def pool() -> MemoryStore:
    return MemoryStore()


class TestSaves:
    def test_a_step_saves_what_its_layers_wrote(self, pool: MemoryStore) -> None:
        with WorkerRig(full_layout(), store=pool) as rig:
            rig.write(IDS)
            wrote = rig.contents(IDS)
            save_all(rig)
            assert saved(rig) == 3
            rig.clear()
            plan = StepPlan([request("b", {0: BACK}, load={0: range(3)})])
            rig.step(plan)
            assert rig.contents(BACK) == wrote
            report = rig.side.report()
            assert report is not None
            assert report.arrived == {Life("b")}
            assert rig.side.invalid_blocks() == set()

    def test_nothing_is_left_open_when_the_step_is_over(self) -> None:
        with WorkerRig(window_layout()) as rig:
            rig.write(IDS)
            save_all(rig)
            engine = rig.side.engine
            assert engine.stats().sessions.open_now == 0
            while engine.pending_saves:  # a worker may take it off after the end
                engine.lookup(hashes(1, "nothing"), BLOCK + 1)

    def test_a_forward_pass_that_raises_publishes_nothing(self) -> None:
        def fail(name: str) -> None:
            if name == "l1":
                raise ZeroDivisionError

        with WorkerRig(full_layout(3)) as rig:
            plan = StepPlan([request("a", {0: IDS}, save={0: range(3)})])
            with pytest.raises(ZeroDivisionError):
                rig.step(plan, compute=fail)
            assert (saved(rig), rig.side.counters.aborted_steps) == (0, 1)
            assert rig.side.engine.stats().sessions.open_now == 0
            save_all(rig)
            assert saved(rig) == 3, "the next step goes on"

    def test_a_layer_that_does_not_report_makes_the_step_unpublished(self) -> None:
        with WorkerRig(full_layout(3)) as rig:
            rig.step(StepPlan([request("a", {0: IDS}, save={0: range(3)})]), layers=["l0", "l2"])
            assert (saved(rig), rig.side.counters.aborted_steps) == (0, 1)

    def test_a_backend_that_reports_no_layer_is_saved_at_the_end(self, pool: MemoryStore) -> None:
        with WorkerRig(full_layout(3), store=pool) as rig:
            rig.write(IDS)
            rig.step(StepPlan([request("a", {0: IDS}, save={0: range(3)})]), layers=[])
            assert saved(rig) == 3

    def test_a_state_layer_is_read_at_the_end_of_the_step(self, pool: MemoryStore) -> None:
        with WorkerRig(state_layout(), store=pool) as rig:
            plan = StepPlan([request("a", {0: IDS, 1: [-1, -1, 7]}, save={0: range(3), 1: [2]})])
            rig.side.begin(plan)
            rig.side.wait_layer("l1")
            rig.write(IDS)
            rig.side.layer_exit("l1")
            rig.write([7])  # the state is final only when the step is
            wrote = rig.contents([7])[1]
            rig.side.wait_for_save()
            assert saved(rig) == 4
            rig.clear()
            rig.side.start_loads(StepPlan(loads=[load("b", {1: [-1, -1, 9]}, {1: [2]})]))
            assert rig.side.between.wait(10.0)
            assert rig.contents([9])[1] == wrote

    def test_an_empty_step_has_no_layers(self) -> None:
        with WorkerRig(state_layout()) as rig:
            rig.write([7])
            plan = StepPlan([request("a", {1: [-1, -1, 7]}, save={1: [2]})], runs=False)
            rig.step(plan, layers=[])
            assert (saved(rig), rig.side.counters.aborted_steps) == (1, 0)

    def test_stored_blocks_are_told_once_they_are_committed(self) -> None:
        with WorkerRig(full_layout(), events=True) as rig:
            rig.write(IDS)
            save_all(rig, event=Event(list(range(48)), hashes(3)))
            told = rig.side.stored()
            assert [(b.request.life, b.group_id, b.block_index) for b in told] == [(Life("a"), 0, i) for i in range(3)]
            assert rig.side.stored() == []

    def test_saves_that_no_worker_can_begin_do_not_hold_the_step_up(
        self, pool: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Reads that hang hold every worker; the step's saves are given up, and tried again later."""
        monkeypatch.setattr(worker, "SAVE_PATIENCE_S", 0.05)
        faults = [Fault(what="freeze", call="get_open", gate=f"gate {i}", nth=i) for i in (1, 2, 3)]
        with WorkerRig(window_layout(), store=pool, faults=faults) as rig:
            for i in range(3):
                ids = [4 + i]
                rig.side.start_loads(StepPlan(loads=[load(f"l{i}", {0: ids, 1: ids}, {0: [0]}, prefix=f"p{i}")]))
            try:
                assert all(rig.faulty.gates[f"gate {i}"].arrived.wait(10.0) for i in (1, 2, 3))
                save_all(rig, "a", [20, 21], prefix="q")
                report = rig.side.report()
                assert report is not None
                assert (saved(rig), report.unsaved) == (0, {Life("a")})
            finally:
                for i in (1, 2, 3):
                    rig.faulty.release(f"gate {i}")
            assert rig.side.between.wait(10.0)
            save_all(rig, "a", [20, 21], prefix="q")
            assert saved(rig) == 4


class TestLoadsInside:
    def fail_gets(self, times: int | None = None) -> Fault:
        return Fault(what="outcome", call="get_ranges", outcome=Outcome.TRANSFER_FAILED, times=times)

    def test_a_load_that_goes_well_the_second_time_is_whole(self, pool: MemoryStore) -> None:
        with WorkerRig(full_layout(), store=pool) as other:
            other.write(IDS)
            wrote = other.contents(IDS)
            save_all(other)
        with WorkerRig(full_layout(), store=pool, faults=[self.fail_gets(times=1)]) as rig:
            rig.step(StepPlan([request("b", {0: BACK}, load={0: range(3)})]))
            report = rig.side.report()
            assert report is not None
            assert (report.failed, report.tainted) == ({}, {Life("b")})
            assert rig.contents(BACK) == wrote
            assert rig.side.counters.recovered_loads == 1

    @pytest.mark.parametrize("lost", [1, 3])
    def test_blocks_that_a_lost_call_may_still_write_are_not_used(
        self, pool: MemoryStore, lost: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of the first load (call 1), which then is not made good by a second; or of the second (call 3)."""
        monkeypatch.setattr(ConnectorSettings, "engine", lambda _: EngineConfig(call_deadline_s=0.2, workers=2))
        monkeypatch.setattr("kvactors.vllm.worker.LATE_CALL_S", 0.01)
        with WorkerRig(full_layout(), store=pool) as other:
            other.write(IDS)
            save_all(other)
        faults = [Fault(what="freeze", call="get_ranges", nth=lost)]
        if lost > 1:
            faults.append(self.fail_gets(times=1))
        with WorkerRig(full_layout(), store=pool, faults=faults, clock=MonotonicClock()) as rig:
            with pytest.raises(LoadFailedError, match="3 blocks may still be written"):
                rig.step(StepPlan([request("b", {0: BACK}, load={0: range(3)})]))
            assert rig.side.counters.recovered_loads == 0
            rig.faulty.release()

    def test_a_second_load_does_not_make_good_a_call_of_the_first_that_is_lost_later(
        self, pool: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ConnectorSettings, "engine", lambda _: EngineConfig(call_deadline_s=0.2, workers=2))
        with WorkerRig(full_layout(), store=pool) as other:
            other.write(IDS)
            save_all(other)
        faults = [self.fail_gets(times=1), Fault(what="freeze", call="get_ranges", nth=2)]
        with WorkerRig(full_layout(), store=pool, faults=faults, clock=MonotonicClock()) as rig:

            def compute(name: str) -> None:
                if name == "l1":  # now the late call writes what is being computed with
                    rig.faulty.release()
                    assert rig.side.engine.wait_unfenced({(0, block) for block in BACK}, 10.0)

            rig.step(StepPlan([request("b", {0: BACK}, load={0: range(3)})]), compute=compute)
            report = rig.side.report()
            assert report is not None
            assert (report.failed, report.arrived) == ({Life("b"): 0}, set())

    def test_one_that_fails_for_good_names_its_blocks_and_saves_nothing(self, pool: MemoryStore) -> None:
        with WorkerRig(full_layout(), store=pool) as other:
            other.write(IDS)
            save_all(other)
        with WorkerRig(full_layout(), store=pool, faults=[self.fail_gets()]) as rig:
            ids = [*BACK, 13]
            rig.step(StepPlan([request("b", {0: ids}, load={0: range(3)}, save={0: [3]})]))
            report = rig.side.report()
            assert report is not None
            assert report.failed == {Life("b"): 0}
            assert rig.side.invalid_blocks() == set(BACK)
            assert saved(rig) == 0

    def test_what_lies_before_a_failed_block_may_be_used(self, pool: MemoryStore) -> None:
        """vLLM computes from the first block that it is told of: those before it must be there."""
        with WorkerRig(full_layout(), store=pool) as other:
            other.write(IDS)
            wrote = other.contents(IDS[:2])
            save_all(other)
            bad = other.layout.key(0, hashes(3)[2])
        pool.remove(bad, force=True)
        with WorkerRig(full_layout(), store=pool) as rig:
            rig.step(StepPlan([request("b", {0: [*BACK, 13]}, load={0: range(3)})]))
            report = rig.side.report()
            assert report is not None
            assert (report.failed, rig.side.invalid_blocks()) == ({Life("b"): 32}, {12})
            assert report.lost == {12, 13}, "also what the step computed from there on"
            assert rig.contents(BACK[:2]) == wrote

    def test_several_groups_can_only_stop(self, pool: MemoryStore) -> None:
        with WorkerRig(window_layout(), store=pool) as other:
            other.write(IDS)
            save_all(other)
        with WorkerRig(window_layout(), store=pool, faults=[self.fail_gets()]) as rig:
            plan = StepPlan([request("b", {0: BACK, 1: BACK}, load={0: range(3), 1: [2]})])
            with pytest.raises(LoadFailedError, match="use_layerwise"):
                rig.step(plan)
            assert rig.side.invalid_blocks() == set(), "vLLM takes none with several groups"

    def test_a_load_past_its_deadline_fails_and_its_request_with_it(self, pool: MemoryStore) -> None:
        with WorkerRig(full_layout(), store=pool) as other:
            other.write(IDS)
            save_all(other)
        frozen = Fault(what="freeze", call="get_ranges", times=1)
        with WorkerRig(full_layout(), store=pool, faults=[frozen], load_deadline_s=0.05, clock=MonotonicClock()) as rig:

            def thaw(_name: str) -> None:
                rig.faulty.release("gate")

            rig.step(StepPlan([request("b", {0: BACK}, load={0: range(3)})]), compute=thaw)
            report = rig.side.report()
            assert report is not None
            assert report.failed == {Life("b"): 0}
            assert rig.side.invalid_blocks() == set(BACK)

    def test_a_load_without_memory_is_refused_before_anything_moves(self, pool: MemoryStore) -> None:
        with WorkerRig(full_layout(), store=pool) as rig:
            bad = request("b", {0: [10, -1, 12]}, load={0: range(3)})
            bad.problem = "group 0: blocks [1] are to be loaded, and vLLM has no memory for them"
            rig.step(StepPlan([bad]))
            report = rig.side.report()
            assert report is not None
            assert report.failed == {Life("b"): 0}
            assert rig.side.invalid_blocks() == {10, 12}


class TestRanks:
    """Two ranks of one instance: a load that fails on one of them spoils what both compute."""

    def run(self, pool: MemoryStore, faults: list[Fault]) -> list[tuple[dict[Life, int], int, set[int]]]:
        layout = full_layout()
        from kvactors.core.layout import KVLayout

        both = KVLayout(layout.model, layout.groups, tp_size=2)
        barrier = threading.Barrier(2)
        values: list[Any] = [None, None]

        def gather(rank: int) -> Callable[[Any], list[Any]]:
            def of(value: Any) -> list[Any]:
                values[rank] = value
                barrier.wait(20)
                found = list(values)
                barrier.wait(20)
                return found

            return of

        results: list[Any] = [None, None]

        def rank(number: int) -> None:
            with WorkerRig(
                both, store=pool, faults=faults if number == 0 else [], gather=gather(number), tp_rank=number
            ) as rig:
                rig.write(IDS)
                save_all(rig)
                before = saved(rig)
                rig.step(StepPlan([request("b", {0: [*BACK, 13]}, load={0: range(3)}, save={0: [3]})]))
                report = rig.side.report()
                failed = {} if report is None else report.failed
                results[number] = (failed, saved(rig) - before, rig.side.invalid_blocks())

        threads = [threading.Thread(target=rank, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    def test_both_save_when_both_loads_went_well(self, pool: MemoryStore) -> None:
        assert self.run(pool, []) == [({}, 1, set()), ({}, 1, set())]

    def test_both_report_the_same_failure_and_neither_publishes(self, pool: MemoryStore) -> None:
        fault = Fault(what="outcome", call="get_ranges", outcome=Outcome.LEASE_EXPIRED)
        expected = ({Life("b"): 0}, 0, set(BACK))
        assert self.run(pool, [fault]) == [expected, expected]


class TestLoadsBetween:
    def ready(self, pool: MemoryStore) -> list[bytes]:
        with WorkerRig(window_layout(), store=pool) as rig:
            rig.write(IDS)
            save_all(rig)
            return rig.contents(IDS)

    def plan(self) -> StepPlan:
        return StepPlan(loads=[load("b", {0: BACK, 1: BACK}, {0: range(3), 1: range(3)})], runs=False)

    def test_it_is_reported_once_when_everything_arrived(self, pool: MemoryStore) -> None:
        wrote = self.ready(pool)
        with WorkerRig(window_layout(), store=pool) as rig:
            rig.step(self.plan(), layers=[])
            assert rig.side.between.wait(10.0)
            assert rig.side.finished_loads() == ({"b"}, set())
            assert rig.side.finished_loads() == (set(), set())
            assert rig.contents(BACK) == wrote

    def test_a_failed_group_fails_the_request(self, pool: MemoryStore) -> None:
        self.ready(pool)
        fault = Fault(what="outcome", call="get_ranges", key="group:1", outcome=Outcome.TRANSFER_FAILED)
        with WorkerRig(window_layout(), store=pool, faults=[fault]) as rig:
            rig.step(self.plan(), layers=[])
            assert rig.side.between.wait(10.0)
            assert rig.side.finished_loads() == ({"b"}, {"b"})
            report = rig.side.report()
            assert report is not None
            assert report.failed == {Life("b"): 0}

    def test_past_its_deadline_its_blocks_are_held_until_the_call_returns(self, pool: MemoryStore) -> None:
        self.ready(pool)
        frozen = Fault(what="freeze", call="get_ranges", key="group:0", times=1)
        with WorkerRig(window_layout(), store=pool, faults=[frozen], load_deadline_s=2.0) as rig:
            rig.step(self.plan(), layers=[])
            assert rig.faulty.gates["gate"].arrived.wait(10.0)
            assert rig.side.finished_loads() == (set(), set())
            rig.clock.advance(2.5)
            assert rig.side.finished_loads() == ({"b"}, {"b"})
            report = rig.side.report()
            assert report is not None
            assert set(report.held) == set(BACK)
            assert not report.returned
            assert rig.side.finished_loads() == (set(), set()), "it is told once"
            rig.faulty.release("gate")
            assert rig.side.between.wait(10.0)
            assert rig.side.finished_loads() == (set(), set())
            report = rig.side.report()
            assert report is not None
            assert set(report.returned) == set(BACK)
            assert rig.side.totals()["load_deadlines"] == 1

    def test_an_aborted_request_is_reported_once_its_blocks_are_free(self, pool: MemoryStore) -> None:
        self.ready(pool)
        frozen = Fault(what="freeze", call="get_ranges", times=1)
        with WorkerRig(window_layout(), store=pool, faults=[frozen]) as rig:
            rig.step(self.plan(), layers=[])
            assert rig.faulty.gates["gate"].arrived.wait(10.0)
            rig.step(StepPlan(ended=[Life("b")], runs=False), layers=[])
            assert rig.side.finished_loads() == (set(), set()), "a call may still write its blocks"
            rig.faulty.release("gate")
            assert rig.side.between.wait(10.0)
            over, _ = rig.side.finished_loads()
            assert over == {"b"}

    def test_one_that_cannot_be_made_fails_at_once(self, pool: MemoryStore) -> None:
        with WorkerRig(window_layout(), store=pool) as rig:
            plan = self.plan()
            plan.loads[0].problem = "group 1: blocks [2] are to be loaded, and vLLM has no memory for them"
            rig.step(plan, layers=[])
            assert rig.side.finished_loads() == ({"b"}, {"b"})

    # -- several in one plan: they share one load of the engine ------------------------------------------------------------

    def two(self) -> StepPlan:
        """`b` loads all of what `ready` saved, `c` a block of another prompt."""
        plan = self.plan()
        return StepPlan(loads=[*plan.loads, load("c", {0: MORE, 1: MORE}, {0: [0], 1: [0]}, "q")], runs=False)

    def two_ready(self, pool: MemoryStore) -> list[bytes]:
        with WorkerRig(window_layout(), store=pool) as rig:
            save_all(rig, "q", IDS[:1], prefix="q")
        return self.ready(pool)

    def test_loads_of_a_plan_share_their_calls(self, pool: MemoryStore) -> None:
        wrote = self.two_ready(pool)
        with WorkerRig(window_layout(), store=pool, faults=[Fault(what="latency", latency_s=1e-6)]) as rig:
            rig.step(self.two(), layers=[])
            assert rig.side.between.wait(10.0)
            assert rig.side.finished_loads() == ({"b", "c"}, set())
            assert rig.contents(BACK) == wrote
            calls = Counter(i.call for i in rig.faulty.injections)
            assert (calls["get_open"], calls["get_ranges"]) == (2, 3)

    def test_one_that_fails_leaves_the_other_alone(self, pool: MemoryStore) -> None:
        wrote = self.two_ready(pool)
        missing = Fault(what="outcome", call="get_open", key=hashes(1, "q")[0].hex(), outcome=Outcome.NOT_FOUND)
        with WorkerRig(window_layout(), store=pool, faults=[missing]) as rig:
            rig.step(self.two(), layers=[])
            assert rig.side.between.wait(10.0)
            assert rig.side.finished_loads() == ({"b", "c"}, {"c"})
            report = rig.side.report()
            assert report is not None
            assert report.failed == {Life("c"): 0}
            assert rig.contents(BACK) == wrote

    @pytest.mark.parametrize("makes_sense", [True, False])
    def test_one_that_cannot_be_made_leaves_the_other_alone(self, pool: MemoryStore, makes_sense: bool) -> None:
        wrote = self.two_ready(pool)
        with WorkerRig(window_layout(), store=pool) as rig:
            plan = self.two()
            if makes_sense:
                plan.loads[1].problem = "vLLM has no memory for it"
            else:
                plan.loads[1].groups[0] = GroupBlocks([BACK[0]], (0,))  # where the other one loads
            rig.step(plan, layers=[])
            assert rig.side.between.wait(10.0)
            assert rig.side.finished_loads() == ({"b", "c"}, {"c"})
            assert rig.contents(BACK) == wrote

    def test_an_abort_concerns_one_of_them(self, pool: MemoryStore) -> None:
        wrote = self.two_ready(pool)
        frozen = Fault(what="freeze", call="get_ranges", times=1)
        with WorkerRig(window_layout(), store=pool, faults=[frozen]) as rig:
            rig.step(self.two(), layers=[])
            assert rig.faulty.gates["gate"].arrived.wait(10.0)
            rig.step(StepPlan(ended=[Life("c")], runs=False), layers=[])
            assert rig.side.finished_loads() == (set(), set()), "a call may still write its blocks"
            rig.faulty.release("gate")
            assert rig.side.between.wait(10.0)
            assert rig.side.finished_loads() == ({"b", "c"}, {"c"})
            assert rig.contents(BACK) == wrote

    def test_past_their_deadline_the_blocks_of_each_are_held(self, pool: MemoryStore) -> None:
        self.two_ready(pool)
        frozen = Fault(what="freeze", call="get_ranges", key="group:0", times=1)
        with WorkerRig(window_layout(), store=pool, faults=[frozen], load_deadline_s=2.0) as rig:
            rig.step(self.two(), layers=[])
            assert rig.faulty.gates["gate"].arrived.wait(10.0)
            rig.clock.advance(2.5)
            assert rig.side.finished_loads() == ({"b", "c"}, {"b", "c"})
            report = rig.side.report()
            assert report is not None
            assert report.failed == {Life("b"): 0, Life("c"): 0}
            assert report.held == Counter([*BACK, MORE[0]])
            rig.faulty.release("gate")
            assert rig.side.between.wait(10.0)
            assert rig.side.finished_loads() == (set(), set())
            report = rig.side.report()
            assert report is not None
            assert report.returned == Counter([*BACK, MORE[0]])
            assert rig.side.totals()["load_deadlines"] == 2

    def test_a_step_that_computes_nothing_waits_for_the_end_of_a_load(
        self, pool: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.ready(pool)
        monkeypatch.setattr("kvactors.vllm.worker.IDLE_WAIT_S", 10.0)
        frozen = Fault(what="freeze", call="get_ranges", times=1)
        with WorkerRig(window_layout(), store=pool, faults=[frozen]) as rig:
            rig.step(self.plan(), layers=[])
            assert rig.faulty.gates["gate"].arrived.wait(10.0)
            rig.step(StepPlan([request("r", {0: IDS, 1: IDS})]))
            began = time.perf_counter()
            assert rig.side.finished_loads() == (set(), set()), "a step that computes does not wait"
            rig.step(StepPlan(runs=False), layers=[])
            threading.Timer(0.05, rig.faulty.release, ["gate"]).start()
            assert rig.side.finished_loads() == ({"b"}, set())
            rig.step(StepPlan(runs=False), layers=[])
            assert rig.side.finished_loads() == (set(), set()), "nothing is under way"
            assert time.perf_counter() - began < 5.0

    def test_a_step_that_computes_nothing_waits_no_longer_than_it_may(self, pool: MemoryStore) -> None:
        self.ready(pool)
        with WorkerRig(window_layout(), store=pool, faults=[Fault(what="freeze", call="get_ranges", times=1)]) as rig:
            rig.step(self.plan(), layers=[])
            began = time.perf_counter()
            assert rig.side.finished_loads() == (set(), set())
            assert time.perf_counter() - began >= IDLE_WAIT_S
            rig.faulty.release("gate")


def test_a_store_that_is_down_leaves_the_steps_alone() -> None:
    with WorkerRig(window_layout(), faults=[Fault(what="kill", nth=1, raises=True)]) as rig:
        for number in range(3):
            save_all(rig, f"r{number}")
        assert saved(rig) == 0
        rig.step(StepPlan(loads=[load("b", {0: BACK, 1: BACK}, {0: range(3), 1: range(3)})], runs=False), layers=[])
        assert rig.side.between.wait(10.0)
        assert rig.side.finished_loads() == ({"b"}, {"b"})


def test_closing_ends_a_step_that_is_open() -> None:
    rig = WorkerRig(full_layout())
    rig.side.begin(StepPlan([request("a", {0: IDS}, save={0: range(3)})]))
    rig.side.close()
    assert rig.side.counters.aborted_steps == 1
    assert isinstance(rig.side, WorkerSide)
