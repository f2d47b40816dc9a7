"""The connector in one worker rank: drives the engine through vLLM's steps, and reports what came of them.

Compute thread only. A step begins with its plan and ends in `wait_for_save`: every save and every load of it is over then, so
vLLM may give its blocks to others. Whatever breaks, the model goes on; what may be wrong is reported, and never published.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from kvactors.core.clock import Clock
from kvactors.core.events import DeviceEvent, Devices
from kvactors.core.steps import NULL_BLOCK, GroupBlocks, Phase, ReleaseReason, StepRequest
from kvactors.core.store import Store
from kvactors.engine import BlockingEngine, BlockingStep
from kvactors.errors import LoadFailedError
from kvactors.log import get_logger
from kvactors.vllm.agreement import Gather, agreed
from kvactors.vllm.between import LoadsBetween, blocks_from, load_places, loaded_from
from kvactors.vllm.hooks import LayerHooks
from kvactors.vllm.layouts import WorkerMemory
from kvactors.vllm.messages import RequestPlan, StepPlan, WorkerReport
from kvactors.vllm.settings import ConnectorSettings

log = get_logger("kvactors.vllm.worker", burst=10)

SAVE_PATIENCE_S = 5.0
"""How long the end of a step waits for saves that no worker has begun: where reads hang, they hold the workers."""

LATE_CALL_S = 60.0
"""How long the end of a step waits for a load that was given up: its request computes into the same blocks next."""

SETTLE_S = 0.25
"""How long the end of a step waits for its commits, so that the next request finds what this one saved."""

IDLE_WAIT_S = 0.003
"""How long a step that computes nothing waits for one of the loads under way to end. While all requests wait for loads, vLLM
steps as fast as it can; in one process that keeps Python's lock from the threads that load."""


@dataclass(slots=True)
class Counters:
    """Since the start; the names are those of the statistics."""

    exposed_wait_s: float = 0.0
    """time that layers waited for their loads"""
    save_wait_s: float = 0.0
    """time that steps waited at their end for their saves"""
    load_deadlines: int = 0
    recovered_loads: int = 0
    aborted_steps: int = 0


@dataclass(slots=True)
class OpenStep:
    """A step that is under way."""

    step: BlockingStep
    plan: StepPlan
    requests: dict[str, RequestPlan]
    loads: bool
    began_s: float
    deferred: list[int] = field(default_factory=list)
    """stage layers that are complete, but whose saves wait until the ranks have agreed"""
    error: BaseException | None = None
    """an exception that was being handled when the step began: not one of its own"""
    failed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """name of a life -> (stage layer, first token)"""
    recovered: set[str] = field(default_factory=set)
    fenced: set[tuple[int, int]] = field(default_factory=set)
    """(group id, local block id) that a lost call of a second load of a request may still write"""
    unended: set[tuple[int, int]] = field(default_factory=set)
    """those of second loads of which the engine says nothing more"""


class StoredBlock(NamedTuple):
    """A block that this rank committed."""

    request: RequestPlan
    group_id: int
    block_index: int


class WorkerSide:
    """See the module.

    Args:
        memory: this rank's caches.
        store: opened; the memory is registered with it here.
        reporting: names of the caches whose layers vLLM reports.
        gather: collects a value from all TP ranks; None where there is one.
        events: whether `stored` is asked for.
        several_groups: vLLM's cache groups are more than one, and it takes no block ids of failed loads.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        memory: WorkerMemory,
        store: Store,
        *,
        hash_tokens: int,
        devices: Devices,
        clock: Clock,
        reporting: Collection[str],
        tp_rank: int = 0,
        gather: Gather | None = None,
        several_groups: bool,
        events: bool = False,
    ) -> None:
        self.memory, self.counters = memory, Counters()
        self._settings, self._clock, self._devices, self._gather = settings, clock, devices, gather
        self._several = several_groups
        self._store = store
        for address, nbytes in memory.regions:
            store.register(address, nbytes)
        self.hooks = LayerHooks.of(memory.layout, memory.names, reporting)
        self.engine = BlockingEngine(
            memory.layout,
            store,
            memory.bases,
            settings.engine(),
            clock=clock,
            devices=devices,
            hookless_layers=sorted(self.hooks.hookless),
            hash_tokens=hash_tokens,
            tp_rank=tp_rank,
        )
        self.between = LoadsBetween(self.engine, clock, settings.load_deadline_s, several_groups=several_groups)
        self._block_tokens = {g.id: g.block_tokens for g in memory.layout.groups}
        self._open: OpenStep | None = None
        self._invalid: set[int] = set()
        self._report = WorkerReport()
        self._told_silent = False
        self._moved = False
        self._events = events
        self._unsettled: list[OpenStep] = []
        self._idle = False
        """whether the step computes nothing"""

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """The step's plan is here: puts are opened, and loads inside the step start."""
        self._drop_open("a new step began before the last one had ended")
        self._idle = not plan.runs
        for life in plan.ended:
            self.between.cancel(life)
            self.engine.forget(life.name)
        self.hooks.new_step()
        if not plan.requests:
            return
        self._moved = True
        requests: dict[str, RequestPlan] = {}
        asked: list[StepRequest] = []
        for request in plan.requests:
            if request.problem:
                self._refuse(request)
            requests[request.life.name] = request
            asked.append(StepRequest(request.life.name, request.hashes, request.groups))
        step = self.engine.begin_step(asked)
        loads = any(r.loads for r in plan.requests)
        self._open = OpenStep(step, plan, requests, loads, self._clock.now(), error=sys.exc_info()[1])

    def _refuse(self, request: RequestPlan) -> None:
        log.error("a load that cannot be made", request=request.life.request_id, problem=request.problem)
        self._report.failed[request.life] = 0
        self._invalid.update(int(b) for blocks in request.groups.values() for b in blocks.block_ids if b != NULL_BLOCK)
        request.groups = {g: GroupBlocks(b.block_ids) for g, b in request.groups.items()}

    def start_loads(self, plan: StepPlan) -> None:
        """The loads between steps that came with this plan."""
        if plan.loads:
            self.between.start(plan.loads)

    # -- layers --------------------------------------------------------------------------------------------------------

    def wait_layer(self, name: str) -> None:
        """The layer's loads have arrived or failed. Never raises for a failed load: other ranks would wait for this one."""
        now = self._open
        layer = self.hooks.stage_layers.get(name)
        if now is None or layer is None or not now.loads:
            return
        began = time.perf_counter()
        left = now.began_s + self._settings.load_deadline_s - self._clock.now()
        failed = now.step.wait_layer(layer, max(left, 0.001))
        self.counters.exposed_wait_s += time.perf_counter() - began
        for life in failed & now.recovered:  # a call of the first load was under way meanwhile, and is lost: it may still write
            if load_places(now.requests[life].groups) & now.step.fenced_blocks:
                now.recovered.discard(life)
        for life in failed - set(now.failed) - now.recovered:
            self._load_failed(now, life, layer)

    def _load_failed(self, now: OpenStep, life: str, layer: int) -> None:
        failure = now.step.failures[life]
        request = now.requests.get(life)
        if request is None or (life not in now.failed and self._recovered(now, request, layer)):
            return
        log.warning(
            "a load failed inside a step",
            request=life,
            layer=layer,
            first_token=failure.first_token,
            blocks={g: len(b) for g, b in failure.blocks.items()},
            reason=failure.reason,
        )
        now.failed[life] = (layer, failure.first_token)

    def _recovered(self, now: OpenStep, request: RequestPlan, layer: int) -> bool:
        """Loads the request once more, whole, while its layer waits. What it computes is right then; it is not saved. Not if a
        call of the first load was lost: it could write while the request computes.
        """
        left = now.began_s + self._settings.load_deadline_s - self._clock.now()
        places = load_places(request.groups)
        if left <= 0 or places & now.step.fenced_blocks:
            return False
        again = self.engine.load(
            request.life.name,
            {g: GroupBlocks(b.block_ids, load=b.load) for g, b in request.groups.items() if b.load},
            request.hashes,
        )
        if not again.wait(left):
            self.engine.release(request.life.name, ReleaseReason.ABORTED, wait=False)
            if not again.wait(self.engine.patience_s):
                now.unended |= places
            now.fenced |= places & self.engine.fenced_blocks
            return False
        if again.result().failure is not None:
            now.fenced |= places & self.engine.fenced_blocks
            return False
        log.info("a load failed, and went well the second time", request=request.life.name, layer=layer)
        now.recovered.add(request.life.name)
        self.counters.recovered_loads += 1
        self._report.tainted.add(request.life)
        return True

    def layer_entry(self, name: str, event: DeviceEvent | None = None) -> None:
        """The attention caches of the layer are written once `event` fires; states are not."""
        now = self._open
        layer = self.hooks.stage_layers.get(name)
        if now is not None and layer in self.hooks.expected and not self._defers(now):
            assert layer is not None
            now.step.layer_ready(layer, event, Phase.ENTRY)

    def layer_exit(self, name: str, event: DeviceEvent | None = None) -> None:
        """The layer was computed: it is saved once `event` fires (None: once what is queued now is done)."""
        now = self._open
        if now is None:
            return
        layer = self.hooks.report(name)
        if layer is None:
            return
        if self._defers(now):
            now.deferred.append(layer)
            now.step.layer_ready(layer, event, Phase.EXIT, save=False)
            return
        now.step.layer_ready(layer, event, Phase.EXIT)
        now.step.checkpoint(layer)

    def checkpoint(self, name: str) -> None:
        """Waits while too many saves are unfinished."""
        layer = self.hooks.stage_layers.get(name)
        if self._open is not None and layer is not None:
            self._open.step.checkpoint(layer)

    def _defers(self, now: OpenStep) -> bool:
        """With several ranks a rank whose load failed spoils what all of them compute: nobody saves before all have agreed."""
        return self._gather is not None and now.loads

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def wait_for_save(self, doubt: str = "") -> None:
        """Every save and load of the step is over when this returns; if the forward pass failed, nothing of it is published.

        Args:
            doubt: why the step must not be published, if whoever reports the layers knows one.

        Raises:
            LoadFailedError: a load of several groups failed inside the step: vLLM cannot be told which requests to repeat.
        """
        now, self._open = self._open, None
        if now is None:
            return
        began = time.perf_counter()
        problem = doubt or self._problem(now)
        if problem:
            self.counters.aborted_steps += 1
            log.warning("a step is aborted; nothing of it is saved", problem=problem)
            now.step.abort(problem)
            now.step.settled_within(SETTLE_S)
            now.failed.update({life: (0, 0) for life, request in now.requests.items() if request.loads})
            self._report.unsaved |= {r.life for r in now.requests.values() if r.saves}
            self._tell_failures(now, raising=sys.exc_info()[1] is now.error)
            return
        self._note_failures(now)
        if self._defers(now):
            self._agree(now)
        for layer in now.deferred:
            now.step.layer_ready(layer, None, Phase.EXIT)
        if self.hooks.silent:
            for layer in self.hooks.expected:
                now.step.layer_ready(layer, None, Phase.EXIT)
        if not now.step.end(patience_s=SAVE_PATIENCE_S):
            self.counters.aborted_steps += 1
            self._report.unsaved |= {r.life for r in now.requests.values() if r.saves}
            log.warning("saves took too long; the rest of the step is not saved", step=now.step.id)
        if now.step.passed_through:
            self._report.unsaved |= {r.life for r in now.requests.values() if r.saves}
        if not now.step.settled_within(SETTLE_S):
            log.info("commits of a step go on after its end", step=now.step.id)
        if self._events:
            self._unsettled.append(now)
        self.counters.save_wait_s += time.perf_counter() - began
        self._tell_failures(now, raising=True)

    def _problem(self, now: OpenStep) -> str:
        """Why nothing of the step may be published; empty if all is well."""
        error = sys.exc_info()[1]
        if error is not None and error is not now.error:
            return f"the forward pass raised {type(error).__name__}"
        if not now.plan.runs:
            return ""
        missing = self.hooks.missing()
        if not missing:
            return ""
        if not self.hooks.silent:
            return f"stage layers {missing} were not reported"
        if now.loads:
            return "no layer was reported, so none waited for its loads"
        if not self._told_silent:
            self._told_silent = True
            log.warning("layers are not reported by this model or backend; they are saved at the end of each step")
        return ""

    @staticmethod
    def _note_failures(now: OpenStep) -> None:
        """Every load of the step has been waited for: what failed by now is all."""
        for life, failure in now.step.failures.items():
            if life not in now.recovered:
                layer, first = now.failed.get(life, (failure.layer, failure.first_token))
                now.failed[life] = (min(layer, failure.layer), min(first, failure.first_token))

    def _agree(self, now: OpenStep) -> None:
        assert self._gather is not None
        for life, (layer, first) in agreed(now.failed, self._gather).items():
            if now.failed.get(life) != (layer, first) and life in now.requests:
                now.step.fail(life, layer, "another rank's load of it failed")
                now.failed[life] = (layer, first)

    def _tell_failures(self, now: OpenStep, *, raising: bool) -> None:
        """Reports what failed inside the step. What vLLM cannot be told ends the engine, unless it is ending already."""
        fenced = (now.step.fenced_blocks | now.fenced) & self.engine.fenced_blocks
        free = not now.unended and (not fenced or self.engine.wait_unfenced(fenced, LATE_CALL_S))
        if not free and raising:
            count = len(fenced | now.unended)
            raise LoadFailedError(
                f"{count} blocks may still be written by store calls that did not return; they cannot be used again"
            )
        for life, (_, first) in now.failed.items():
            request = now.requests[life]
            self._report.failed[request.life] = first
            self._invalid |= loaded_from(request.groups, first, self._block_tokens)
            self._report.lost |= blocks_from(request.groups, first, self._block_tokens)
        if now.failed and self._several and raising:
            raise LoadFailedError(
                f"loads of {sorted(now.failed)} failed inside a step; with several cache groups vLLM cannot repeat single "
                "requests. Leave use_layerwise out, so that they load between steps"
            )
        for life, request in now.requests.items():
            if request.loads and life not in now.failed:
                self._report.arrived.add(request.life)

    def _drop_open(self, reason: str) -> None:
        now, self._open = self._open, None
        if now is not None:
            self.counters.aborted_steps += 1
            now.step.abort(reason)

    # -- what is reported ----------------------------------------------------------------------------------------------

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads between steps are over, and those of them that failed as a whole."""
        if self._idle:
            self.between.wait_any(IDLE_WAIT_S)
        over, failed, invalid = self.between.poll(self._report)
        self._invalid |= invalid
        self._moved = self._moved or bool(over)
        return over, failed

    def invalid_blocks(self) -> set[int]:
        """Local blocks whose loads failed; vLLM takes them with one cache group only."""
        invalid, self._invalid = self._invalid, set()
        return set() if self._several else invalid

    def stored(self) -> list[StoredBlock]:
        """Blocks that were committed since the last call, by their requests; only with `events`."""
        found: list[StoredBlock] = []
        for past in [p for p in self._unsettled if p.step.settled_within(0)]:
            self._unsettled.remove(past)
            found += [StoredBlock(past.requests[o.request_id], o.group_id, o.block_index) for o in past.step.saved]
        return found

    def take_moved(self) -> bool:
        """Whether anything was saved, loaded or begun since the last call: else there is nothing to count."""
        moved, self._moved = self._moved, False
        return moved

    def totals(self) -> dict[str, float]:
        """The counters since the start."""
        own = asdict(self.counters)
        own["load_deadlines"] = self.between.deadlines
        return own

    def report(self) -> WorkerReport | None:
        """What happened since the last report; None: nothing."""
        report, self._report = self._report, WorkerReport()
        return report if report else None

    def close(self) -> None:
        self._drop_open("the worker is shutting down")
        self.engine.close()
        self._store.close()
