"""`KVActorsConnector`: vLLM's connector interface, each call handed to the side that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvactors.devices import MonotonicClock, devices_for
from kvactors.engine import BlockingEngine
from kvactors.errors import ConfigError, LayoutError
from kvactors.live import LiveView, live_address, view_of_rank
from kvactors.live.address import SCHEDULER
from kvactors.log import get_logger
from kvactors.vllm.agreement import tp_gather
from kvactors.vllm.ascend_hooks import AscendLayers
from kvactors.vllm.ascend_windows import ascend_layers
from kvactors.vllm.handoff_blocks import handoff_groups
from kvactors.vllm.handoff_start import receives, sends, start_handoff
from kvactors.vllm.handoff_worker import HandoffSide
from kvactors.vllm.layouts import ModelFacts, group_kind, model_name, worker_memory
from kvactors.vllm.loads import may_load_layerwise
from kvactors.vllm.pins import Pins
from kvactors.vllm.scheduler import SchedulerSide
from kvactors.vllm.settings import ConnectorSettings
from kvactors.vllm.stores import lookup_store, worker_store
from kvactors.vllm.support import VERSIONS, device_type, require_supported, require_validated, warn_of_version
from kvactors.vllm.worker import WorkerSide

try:
    from vllm import __version__ as vllm_version
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    from kvactors.vllm.events import ConnectorEvents, EventTeller
    from kvactors.vllm.handoff_scheduler import HandoffScheduler, refuse_all
    from kvactors.vllm.messages import Handshake, StepPlan, WorkerReport
    from kvactors.vllm.stats import Collector, ConnectorPromMetrics, ConnectorStats, build_prom_metrics
except ImportError as error:
    raise ConfigError(
        f"this vLLM has no connector interface that KVActorsConnector knows ({error}); it is made for vLLM {VERSIONS}"
    ) from error

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = get_logger("kvactors.vllm")


class KVActorsConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc, unused-ignore]
    """Use it with `--kv-transfer-config '{"kv_connector": "KVActorsConnector", "kv_connector_module_path": "kvactors.vllm",
    "kv_role": "kv_both"}'`; docs/vllm.md has the keys of `kv_connector_extra_config`.

    Raises:
        ConfigError: a key, or the model's caches or parallelism, cannot be served; names all that stands against it.
    """

    accepts_strided_kv_cache = True
    """It takes addresses, strides and payloads from the tensors it is given (see `kvactors.vllm.ascend_support`)."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self.settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        require_supported(vllm_config, kv_cache_config, self.settings)
        _, self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        events = vllm_config.kv_events_config
        self._events_wanted = bool(events and events.enable_kv_cache_events)
        self._collector = Collector(None)
        self._teller: EventTeller | None = None
        self._ascend: AscendLayers | None = None
        self._stored: ConnectorEvents | None = None
        self._role_name = str(transfer.kv_role)
        self._hands_over = self.settings.hands_over(self._role_name)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._handing: HandoffScheduler | None = None
        self._handoff: HandoffSide | None = None
        self._pins = Pins(MonotonicClock())
        self._live: LiveView | None = None
        self._late = WorkerReport()
        """blocks that a hand-off which failed may still write, to be reported"""
        if role is KVConnectorRole.SCHEDULER:
            warn_of_version(vllm_version)  # by one of an engine's processes
            if self.settings.stores:
                self._scheduler = self._new_scheduler(vllm_config, kv_cache_config)
                self._pins = self._scheduler.pins
                self._live = self._view(None, SCHEDULER, self._scheduler.totals, lambda: {"pinned": len(self._pins)})
            if self._hands_over:
                self._handing = self._new_handing(vllm_config, kv_cache_config)

    def _view(
        self,
        engine: BlockingEngine | None,
        rank: str,
        totals: Callable[[], Mapping[str, float]],
        gauges: Callable[[], Mapping[str, float]] | None = None,
    ) -> LiveView | None:
        """This side's live view, if one was asked for."""
        if live_address(self.settings.live) is None:
            return None
        config, parallel = self._vllm_config, self._vllm_config.parallel_config
        return view_of_rank(
            self.settings.live,
            engine,
            rank,
            ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            replica=parallel.data_parallel_rank,
            name=f"{model_name(config.model_config.model)} {self._role_name}",
            totals=totals,
            gauges=gauges,
        )

    def _new_handing(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> HandoffScheduler | None:
        try:
            groups = handoff_groups(kv_cache_config)
        except LayoutError as error:
            if self.settings.must_hand_over:
                raise ConfigError(f"the prefill/decode hand-off cannot be started: {error}") from error
            return None  # its workers say so
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        return HandoffScheduler(
            groups,
            hash_tokens=self._hash_tokens,
            sends=sends(self._role_name),
            receives=receives(self._role_name),
            replays=any(getattr(spec, "prefix_replay_tokens", 0) for spec in specs),
            lookahead=int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0)),
        )

    def _new_scheduler(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SchedulerSide:
        groups = [kv_cache_config.kv_cache_groups[g] for g in kv_cache_config.prefix_cacheable_group_ids]
        kinds = [group_kind(group.kv_cache_spec) for group in groups]
        ahead = bool(vllm_config.scheduler_config.async_scheduling)
        return SchedulerSide(
            self.settings,
            MonotonicClock(),
            lookup_store(self.settings),
            role=self._role_name,
            layerwise=may_load_layerwise(
                kinds,
                self.settings,
                groups=len(kv_cache_config.kv_cache_groups),
                stages=vllm_config.parallel_config.pipeline_parallel_size,
                ahead=ahead,
                drafts=vllm_config.speculative_config is not None,
            ),
            plans_ahead=ahead,
            retention=kv_cache_config.prefix_cache_retention_interval,
            hash_tokens=self._hash_tokens,
            events=self._events_wanted,
        )

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "this connector is a worker's"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker is not None, "no caches are registered, or this connector is the scheduler's"
        return self._worker

    # -- worker: start and end -----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        config, parallel = self._vllm_config, self._vllm_config.parallel_config
        modules = config.compilation_config.static_forward_context
        require_validated(config, _backends(modules, kv_caches), self.settings)
        tp, pp = get_tp_group(), get_pp_group()
        facts = ModelFacts(
            model=model_name(config.model_config.model),
            hidden_layers=int(config.model_config.get_total_num_hidden_layers()),
            kv_heads=int(config.model_config.get_total_num_kv_heads()),
            tp_size=parallel.tensor_parallel_size,
            tp_rank=tp.rank_in_group,
            pp_size=parallel.pipeline_parallel_size,
            pp_rank=pp.rank_in_group,
        )
        rank = facts.pp_rank * facts.tp_size + facts.tp_rank
        self._collector = Collector(rank)
        if self.settings.stores:
            self._start_storing(kv_caches, facts, rank)
        if self._hands_over:
            stored = None if self._worker is None else self._worker.memory
            self._handoff = start_handoff(config, self._kv_cache_config, kv_caches, facts, self.settings, stored)
        self._live = self._view(None if self._worker is None else self._worker.engine, str(rank), self._worker_totals)

    def _start_storing(self, kv_caches: dict[str, torch.Tensor], facts: ModelFacts, rank: int) -> None:
        config = self._vllm_config
        modules = config.compilation_config.static_forward_context
        memory = worker_memory(self._kv_cache_config, kv_caches, facts, self.settings.namespace)
        reporting = {name for name in memory.names if _reports(modules.get(name))}
        devices = devices_for(device_type(config))
        self._worker = WorkerSide(
            self.settings,
            memory,
            worker_store(self.settings)(),
            hash_tokens=self._hash_tokens,
            devices=devices,
            clock=MonotonicClock(),
            reporting=reporting,
            tp_rank=facts.tp_rank,
            gather=tp_gather if facts.tp_size > 1 else None,
            several_groups=len(self._kv_cache_config.kv_cache_groups) > 1,
            events=self._events_wanted,
        )
        if device_type(config) == "npu":
            self._ascend = ascend_layers(self._worker, devices, memory.names, reporting)
        self._teller = EventTeller(self._kv_cache_config, memory.layout, self._hash_tokens, rank)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._worker is not None:
            layout, reports = self._worker.memory.layout, self._worker.hooks.all_report
        elif self._handoff is not None:
            layout, reports = self._handoff.layout, True
        else:
            return None
        return Handshake(layout, self._hash_tokens, reports, hands_over=self._handoff is not None)

    def shutdown(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.close()
        handoff, self._handoff = self._handoff, None
        if handoff is not None:  # before the caches that it writes to are gone
            handoff.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # -- worker: a step ------------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._handoff is not None and isinstance(connector_metadata, StepPlan):
            self._handoff.begin(connector_metadata.handoff, runs=connector_metadata.runs)
        if self._worker is not None and isinstance(connector_metadata, StepPlan):
            self._worker.begin(connector_metadata)
            if self._ascend is not None and connector_metadata.runs:
                self._ascend.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's interface
        plan = self._connector_metadata
        if self._handoff is not None:
            self._handoff.start_loads()
        if self._worker is not None and isinstance(plan, StepPlan):
            self._worker.start_loads(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._ascend is not None:
            self._ascend.wait_for_layer_load(layer_name)
        elif self._worker is not None:
            self._worker.wait_layer(layer_name)

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        """vLLM-Ascend: the layer's caches are written, its attention comes next."""
        if self._ascend is not None:
            self._ascend.on_kv_cache_written(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._ascend is not None:
            self._ascend.save_kv_layer(layer_name)
        elif self._worker is not None:
            self._worker.layer_exit(layer_name)

    def wait_for_save(self) -> None:
        doubt = "" if self._ascend is None else self._ascend.end_step()
        if self._worker is not None:
            self._worker.wait_for_save(doubt)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        over, failed = self.worker_side.finished_loads() if self._worker is not None else (set(), set())
        sent: set[str] = set()
        if self._handoff is not None:
            sent, received, lost = self._handoff.finished(self._late)
            over, failed = over | received, failed | lost
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=over, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        mine, self._late = self._late, WorkerReport()
        stored = None if self._worker is None else self._worker.report()
        if stored is not None and mine:
            return stored.aggregate(mine)
        return stored or mine or None

    def get_kv_connector_kv_cache_events(self) -> ConnectorEvents | None:
        if self._worker is None or self._teller is None or not self._events_wanted:
            return None
        return self._teller.events(self._worker.stored())

    # -- both ----------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        if self._scheduler is not None:
            return self._collector.collect(None, self._scheduler.totals())
        moved = self._handoff is not None and self._handoff.take_moved()
        if self._worker is None:
            return self._collector.collect(None, self._worker_totals()) if moved else None
        if not (self._worker.take_moved() or moved or not self._collector.at_rest):
            return None
        engine = self._worker.engine
        now = engine.stats()
        stats = self._collector.collect(now, self._worker_totals(), now.queued, engine.pending_saves)
        if self._live is not None and stats is not None:
            self._live.note_waits(stats.data)
        return stats

    def _worker_totals(self) -> dict[str, float]:
        worker, handoff = self._worker, self._handoff
        return ({} if worker is None else worker.totals()) | ({} if handoff is None else handoff.totals())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- scheduler -----------------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A store is a cache: a save that is lost is a miss later, and nobody waits for it. Decode does wait for a hand-off."""
        return self._hands_over and sends(self._role_name)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        handshakes = {at: m for at, m in metadata.items() if isinstance(m, Handshake)}
        if not handshakes:
            log.error("no worker published its layout (another connector's did?); nothing is loaded, saved or handed over")
            self._handing = None
            return
        if self._scheduler is not None:
            self._scheduler.connect(handshakes)
            self._stored = ConnectorEvents(self._scheduler.storing_ranks)
        if self._handing is not None and not all(shake.hands_over for shake in handshakes.values()):
            log.warning("not every worker could start the hand-off: there is none")
            self._handing = None

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): m for rank, m in metadata.items()})

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pins.pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        if self._handing is None:
            refuse_all(request)
        else:
            self._handing.arrived(request)  # first: what is cut here is not looked up
            if self._handing.expects(request):
                return
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        if self._handing is not None and self._handing.loads(request):
            return tuple(self._kv_cache_config.transfer_group_ids)
        return tuple(super().get_loaded_kv_cache_group_ids(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._handing is not None and (found := self._handing.matched(request, num_computed_tokens)) is not None:
            return found
        return (0, False) if self._scheduler is None else self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        handed = self._handing is not None and self._handing.allocated(request, blocks, num_external_tokens)
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, 0 if handed else num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is not None:
            plan = self._scheduler.plan(scheduler_output)
        else:
            plan = StepPlan(runs=scheduler_output.total_num_scheduled_tokens > 0)
        if self._handing is not None:
            plan.handoff = self._handing.plan()
        return plan

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        report = meta if isinstance(meta, WorkerReport) else None
        received = connector_output.finished_recving or ()
        if self._handing is not None:
            self._handing.reported(received, connector_output.finished_sending or ())
        if self._scheduler is not None:
            self._scheduler.reported(report, received)
        elif report is not None:
            self._pins.update(report.held, report.returned)
        if self._stored is not None and connector_output.kv_cache_events is not None:
            self._stored.merge_from(connector_output.kv_cache_events)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._stored is None else self._stored.pop_stored()

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its saves were over when its last step ended; what decode is to fetch is kept until it was."""
        return self._handing is not None and self._handing.finished(request, block_ids), None

    def reset_cache(self) -> bool | None:
        """After a change of weights, or before sleep: nothing that was saved until now is found any more."""
        if self._scheduler is None:
            return None
        self._scheduler.reset()
        return True

    def has_pending_push_work(self) -> bool:
        return self._pins.busy or (self._handing is not None and self._handing.busy)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("use_layerwise"))


def _reports(module: Any) -> bool:
    """Whether vLLM calls the connector around a layer: around those whose operator is its own attention's."""
    return bool({"Attention", "MLAAttention"} & {c.__name__ for c in type(module).__mro__})


def _backends(modules: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        get = getattr(modules.get(name), "get_attn_backend", None)
        if get is not None:
            found[name] = str(get().get_name())
    return found
