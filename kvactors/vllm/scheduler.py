"""The connector in vLLM's scheduler: how much of a prompt the store has, and what each step is to load and to save.

It reads vLLM's own accounts (computed tokens, block tables, block hashes) and keeps little of its own: per request, how far it
was saved, and how far it may still be loaded after a load failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from kvactors.core.clock import Clock
from kvactors.core.layout import KVLayout
from kvactors.core.lookup import KeySpace
from kvactors.core.reachability import Reachability
from kvactors.core.steps import NULL_BLOCK, GroupBlocks
from kvactors.core.store import Store
from kvactors.engine import BlockingEngine
from kvactors.errors import ConfigError
from kvactors.log import get_logger
from kvactors.vllm.loads import load_blocks
from kvactors.vllm.matching import Matches
from kvactors.vllm.messages import Event, Handshake, Life, LoadPlan, RequestPlan, StepPlan, WorkerReport, one_layout_per_stage
from kvactors.vllm.pins import Pins
from kvactors.vllm.saves import SavePlanner, local_ids, sparse_table
from kvactors.vllm.settings import ConnectorSettings
from kvactors.vllm.stores import Opener

log = get_logger("kvactors.vllm.scheduler", burst=10)


@dataclass(slots=True)
class Tracked:
    """One of vLLM's requests.

    Attributes:
        request: vLLM's own; its `block_hashes` grow as it does.
        prefill_end: tokens that count as its prompt: the prompt's, and after a preemption all there were.
        saved: boundary up to which its blocks were saved or came from the store.
        planned: boundary up to which saves were asked for.
        loaded: boundary up to which the store filled its blocks.
        limit: no more than so many tokens are matched again, after a load of it failed.
        sync_loads: what to load in the step that runs it first; group id -> block indices.
        sync_tables: its local blocks when they were allocated for that.
        waiting: tokens of a load that is not over.
    """

    request: Any
    life: Life
    prefill_end: int = 0
    saved: int = 0
    planned: int = 0
    loaded: int = 0
    limit: int | None = None
    sync_loads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    sync_tables: Mapping[int, list[int]] = field(default_factory=dict)
    waiting: int = 0


@dataclass(slots=True)
class Counters:
    """Since the start; the names are those of the statistics."""

    lookups: int = 0
    lookup_deferred: int = 0
    lookup_errors: int = 0
    lookup_misses: int = 0
    hit_tokens: int = 0
    """tokens that loads brought in whole, counted once each, when the bytes were there"""
    failed_loads: int = 0
    no_block_table: int = 0
    """requests whose save was skipped, because vLLM has no blocks for them any more"""


class SchedulerSide:
    """See the module.

    Args:
        role: vLLM's kv_role.
        layerwise: whether loads run inside the forward pass.
        retention: vLLM's prefix_cache_retention_interval, resolved.
        hash_tokens: tokens per fine hash of `Request.block_hashes`.
        opener: opens the store for lookups, once the layouts are known.
        events: whether KV cache events are wanted.
        plans_ahead: whether vLLM plans a step before it knows what came of the one before.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        clock: Clock,
        opener: Opener,
        *,
        role: str,
        layerwise: bool,
        retention: int | None,
        hash_tokens: int,
        events: bool = False,
        plans_ahead: bool = False,
    ) -> None:
        self.counters = Counters()
        self.pins = Pins(clock)
        self._settings, self._clock, self._opener = settings, clock, opener
        self._store: Store | None = None
        self._loads, self._saves = settings.loads(role), settings.saves(role)
        self._layerwise, self._retention, self._hash_tokens, self._events = layerwise, retention, hash_tokens, events
        self._ahead = plans_ahead
        self._engine: BlockingEngine | None = None
        self._matches: Matches | None = None
        self._planner: SavePlanner | None = None
        self._tracked: dict[str, Tracked] = {}
        self._offers: dict[str, int] = {}
        """request id -> tokens that vLLM itself had when it was told of a match"""
        self._block_tokens: dict[int, int] = {}
        self._storing_ranks: dict[int, int] = {}
        self._pending: list[LoadPlan] = []
        self._ended: list[Life] = []
        self._epoch = b""
        """goes into every name of a block, once the cache was reset"""
        self._reused: set[str] = set()
        """ids that were in use again before vLLM said that their first use had ended"""
        self._loading: dict[int, set[bytes]] = {}
        """fine hash index -> hashes of the first blocks that this step loads while it runs"""

    # -- start and end -------------------------------------------------------------------------------------------------

    def connect(self, handshakes: Mapping[tuple[int, int], Handshake]) -> None:
        """The workers' layouts are known: keys can be made and asked for.

        Raises:
            LayoutError, ConfigError: the ranks do not fit each other, or hash tokens differently.
        """
        stages = one_layout_per_stage(handshakes)
        if self._layerwise and not all(shake.all_report for shake in handshakes.values()):
            log.info("some caches are read without a word before: loads run between steps")
            self._layerwise = False
        units = {shake.hash_tokens for shake in handshakes.values()}
        if units != {self._hash_tokens}:
            raise ConfigError(f"workers hash every {sorted(units)} tokens, the scheduler every {self._hash_tokens}")
        if self._settings.backend == "memory" and {shake.process for shake in handshakes.values()} != {os.getpid()}:
            raise ConfigError(
                "backend 'memory': vLLM's worker is another process than its scheduler (always so for a server on a CPU), so "
                "nothing would ever be found; use backend 'mooncake', or keep both in one process "
                "(--distributed-executor-backend uni; with LLM on a CPU VLLM_ENABLE_V1_MULTIPROCESSING=0)"
            )
        groups = stages[0].groups
        self._block_tokens = {g.id: g.block_tokens for g in groups}
        self._storing_ranks = {g.id: KeySpace(stages).keys_per_block(g.id) for g in groups}
        self._planner = SavePlanner(Reachability(groups, self._hash_tokens), self._retention)
        if self._loads:
            self._store = self._opener()
            self._engine = _lookup_engine(self._store, stages, self._hash_tokens)
            self._matches = Matches(self._engine, self._clock, self._settings.lookup_budget_s)
        log.info(
            "connected",
            digest=stages[0].digest[:12],
            groups={g.id: f"{g.kind.value} {g.block_tokens}" for g in groups},
            boundary=self._planner.reachability.boundary_tokens,
            stages=len(stages),
            layerwise=self._layerwise,
        )

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._store is not None:
            self._store.close()

    # -- what the store has --------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A request came in: what the store has of it is asked for now, so that the answer is there when vLLM asks."""
        if self._matches is not None and not getattr(request, "skip_reading_prefix_cache", False):
            limit = self._limit(request)
            if limit > max(self._hash_tokens, self._settings.load_min_tokens):
                self._matches.ask(request.request_id, self._names(request.block_hashes), limit)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond vLLM's own that can be loaded, and whether that happens between steps; (None, False): ask later."""
        if self._matches is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if self._shares_a_load(request):
            return None, False
        limit = self._limit(request)
        if limit - 1 <= local_tokens or limit - 1 - local_tokens < self._settings.load_min_tokens:
            return 0, False
        found = self._matches.tokens(request.request_id, self._names(request.block_hashes), limit)
        if found is None:
            return None, False
        more = found - local_tokens
        if more <= 0 or more < self._settings.load_min_tokens:
            self._offers.pop(request.request_id, None)
            return 0, False
        self._offers[request.request_id] = local_tokens
        return more, not self._layerwise

    def _shares_a_load(self, request: Any) -> bool:
        """Whether the request would use blocks that another one only loads in this step.

        vLLM counts them as there already. If the load failed, both would have to start again, and vLLM lets the second go on
        before the first has computed them. So it waits for one step.
        """
        hashes = request.block_hashes
        return any(i < len(hashes) and bytes(hashes[i]) in first for i, first in self._loading.items())

    def _limit(self, request: Any) -> int:
        tracked = self._tracked.get(request.request_id)
        tokens = int(request.num_tokens)
        return tokens if tracked is None or tracked.limit is None else min(tokens, tracked.limit + 1)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """vLLM has blocks for the request; `external_tokens` of them are to be filled from the store."""
        if self._planner is None:
            return
        tracked = self._track(request)
        if not external_tokens:
            if not int(request.num_computed_tokens):  # else its load is over, and it goes on from there
                tracked.loaded = tracked.saved = tracked.planned = 0
            self._offers.pop(request.request_id, None)
            if self._matches is not None and self._matches.forget(request.request_id):
                self.counters.lookup_misses += 1
            return
        local = self._offers.pop(request.request_id, 0)
        if self._matches is not None:
            self._matches.forget(request.request_id)
        boundary = local + external_tokens
        wanted = self._to_load(local, boundary)
        tracked.loaded = tracked.saved = tracked.planned = boundary
        tracked.waiting = external_tokens
        tables = {g: local_ids(table) for g, table in enumerate(blocks.get_block_ids())}
        if self._layerwise:
            tracked.sync_loads, tracked.sync_tables = wanted, tables
            first = local // self._hash_tokens
            self._loading.setdefault(first, set()).add(bytes(request.block_hashes[first]))
            return
        groups, problem = load_blocks(tables, wanted)
        self._pending.append(LoadPlan(tracked.life, self._hashes(request, boundary), groups, problem))

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:  # an id may be used again before vLLM says that the first ended
            number = 0 if tracked is None else tracked.life.number + 1
            if tracked is not None:
                self._ended.append(tracked.life)
                self._reused.add(request.request_id)
            tracked = self._tracked[request.request_id] = Tracked(request, Life(request.request_id, number))
        tracked.sync_loads = {}
        tracked.prefill_end = max(int(request.num_prompt_tokens), int(request.num_tokens))
        return tracked

    def _to_load(self, local: int, boundary: int) -> dict[int, list[int]]:
        """Group id -> indices of the blocks that a hit of `boundary` tokens needs and that vLLM has not got."""
        assert self._planner is not None
        reach = self._planner.reachability
        wanted: dict[int, list[int]] = {}
        for group, mask in zip(reach.groups, reach.load_mask(boundary), strict=True):
            indices = [i for i in range(local // group.block_tokens, len(mask)) if mask[i]]
            if indices:
                wanted[group.id] = indices
        return wanted

    def _hashes(self, request: Any, tokens: int) -> list[bytes]:
        return list(self._names(request.block_hashes[: tokens // self._hash_tokens]))

    def _names(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The hashes by which the store knows these blocks: vLLM's own, until the first reset."""
        if not self._epoch:
            return [bytes(h) for h in hashes]
        return [sha256(self._epoch + h).digest() for h in hashes]

    def reset(self) -> None:
        """Nothing that was saved until now is ever found again by this instance; what others find is not touched.

        A pool may be shared, so nothing in it is removed; blocks get other names from now on, which nobody else uses.
        """
        self._epoch = os.urandom(16)
        if self._matches is not None:
            self._matches.forget_all()
        log.info("reset: blocks have other names from now on")

    # -- a step --------------------------------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepPlan:
        """What the step of a `SchedulerOutput` loads and saves; begins the next one's accounts."""
        if self._matches is not None:
            self._matches.new_step()
        self._loading = {}
        for request_id in output.finished_req_ids:
            self._finish(request_id)
        runs = output.total_num_scheduled_tokens > 0
        plan = StepPlan(loads=self._pending, ended=self._ended, runs=runs)
        self._pending, self._ended = [], []
        if self._planner is None:
            return plan
        state = output.kv_connector_block_state
        offers: Mapping[str, Sequence[tuple[int, int, int]]] = state.boundary_state_offloads
        for request_id in dict.fromkeys([*output.num_scheduled_tokens, *offers]):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                self.counters.no_block_table += 1
                continue
            scheduled = output.num_scheduled_tokens.get(request_id, 0)
            request = self._plan_request(tracked, scheduled, offers.get(request_id, ()), state)
            if request is not None:
                plan.requests.append(request)
        return plan

    def _plan_request(
        self, tracked: Tracked, scheduled: int, offers: Sequence[tuple[int, int, int]], state: Any
    ) -> RequestPlan | None:
        request, planner = tracked.request, self._planner
        assert planner is not None
        loads, tracked.sync_loads = tracked.sync_loads, {}
        known_tables, tracked.sync_tables = tracked.sync_tables, {}
        saves: dict[int, list[int]] = {}
        states: dict[int, dict[int, int]] = {}
        problem = ""
        known = len(request.block_hashes)
        until = known * self._hash_tokens if self._settings.save_decode_cache else tracked.prefill_end
        if self._saves and scheduled:
            computed = min(int(request.num_computed_tokens) + scheduled, until, known * self._hash_tokens)
            now = planner.aligned(computed)
            junction = int(getattr(request, "shared_prefix_boundary", 0) or 0)
            if now > tracked.planned:  # after a step that saved nothing, all is tried again with the next boundary
                saves = planner.completed(tracked.saved, now, tracked.prefill_end, junction)
                tracked.saved = tracked.planned = now
        if self._saves and offers:
            # Planned ahead, a state that decoding leaves may be gone by the time that its step runs.
            states = planner.states(offers, tracked.loaded, tracked.prefill_end if self._ahead else until, known)
        if not (loads or saves or states):
            return None
        groups: dict[int, GroupBlocks] = {g: GroupBlocks(sparse_table(b), save=sorted(b)) for g, b in states.items()}
        if loads or saves:
            found = state.get_block_ids(request.request_id)
            tables = known_tables if found is None else {g: local_ids(table) for g, table in enumerate(found)}
            if found is None:
                self.counters.no_block_table += 1
                log.warning("a request without a block table; nothing of it is saved", request=request.request_id)
                if not loads:
                    return None
                saves = {}
            for group_id in {*loads, *saves}:
                table = tables.get(group_id, [])
                groups[group_id] = GroupBlocks(
                    table,
                    load=tuple(loads.get(group_id, ())),
                    save=tuple(i for i in saves.get(group_id, ()) if i < len(table) and table[i] != NULL_BLOCK),
                )
            problem = load_blocks({g: b.block_ids for g, b in groups.items()}, loads)[1]
        tokens = max((max((*b.load, *b.save), default=-1) + 1) * self._block_tokens[g] for g, b in groups.items())
        event = None
        if self._events and any(b.save for b in groups.values()):
            lora = getattr(request, "lora_request", None)
            own = [bytes(h) for h in request.block_hashes[: tokens // self._hash_tokens]]
            event = Event(list(request.all_token_ids[:tokens]), own, None if lora is None else lora.lora_name)
        return RequestPlan(tracked.life, self._hashes(request, tokens), groups, event, problem)

    def _finish(self, request_id: str) -> None:
        if request_id in self._reused:  # this is the end of its first use
            self._reused.remove(request_id)
            return
        tracked = self._tracked.pop(request_id, None)
        self._offers.pop(request_id, None)
        if self._matches is not None:
            self._matches.forget(request_id)
        if tracked is not None:
            self._ended.append(tracked.life)

    # -- what the workers report ---------------------------------------------------------------------------------------

    def reported(self, report: WorkerReport | None, arrived: Iterable[str]) -> None:
        """Reports of all ranks, and the requests whose loads between steps are over on all of them."""
        whole = set(arrived)
        if report is not None:
            self.pins.update(report.held, report.returned)
            for life, first in report.failed.items():
                self._restart(life, first)
            for life in report.tainted - set(report.failed):
                self._restart(life, None)
            for life in report.unsaved:
                tracked = self._tracked.get(life.request_id)
                if tracked is not None:
                    tracked.saved = tracked.loaded
            if report.lost and self.pins.pool is not None:
                self.pins.pool.evict_blocks(report.lost)  # vLLM noted them as computed when it gave them out
            whole |= {life.request_id for life in report.arrived}
        for request_id in whole:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self.counters.hit_tokens += tracked.waiting
                tracked.waiting = 0

    def _restart(self, life: Life, first: int | None) -> None:
        """A load failed: what comes next is a new life, matched at most up to the first token that did not arrive."""
        tracked = self._tracked.get(life.request_id)
        if tracked is None:
            return
        if first is not None:
            self.counters.failed_loads += tracked.life == life
            tracked.limit = first if tracked.limit is None else min(tracked.limit, first)
            tracked.saved = tracked.loaded = tracked.planned = tracked.waiting = 0
        if tracked.life == life:
            self._ended.append(life)
            tracked.life = Life(life.request_id, life.number + 1)

    def totals(self) -> dict[str, float]:
        """The counters, with those that the engine and the open questions keep."""
        if self._matches is not None and self._engine is not None:
            self.counters.lookups = self._matches.asked
            self.counters.lookup_deferred = self._matches.deferred
            self.counters.lookup_errors = self._engine.lookup_errors
        return asdict(self.counters)

    @property
    def storing_ranks(self) -> dict[int, int]:
        """Group id -> how many ranks store a part of each of its blocks."""
        return dict(self._storing_ranks)

    @property
    def busy(self) -> bool:
        """Whether vLLM has to go on stepping, so that held blocks come back."""
        return self.pins.busy


def _lookup_engine(store: Store, stages: Sequence[KVLayout], hash_tokens: int) -> BlockingEngine:
    """An engine that only ever looks up: its memory has no addresses."""
    bases = {(g.id, layer, e.name): 0 for g in stages[0].groups for layer, entries in g.layers.items() for e in entries}
    return BlockingEngine(stages[0], store, bases, hash_tokens=hash_tokens, stages=stages)
