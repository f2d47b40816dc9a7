"""Store and hand-off side by side in `KVActorsConnector`, each also without the other: vLLM's calls, without an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

# It imports all that is needed of vLLM, and keeps quiet about the warnings.
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.utils", reason="vLLM is not importable", exc_type=ImportError)

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.disagg.geometry import worker_geometry
from kvactors.disagg.messages import OutcomeKind
from kvactors.errors import ConfigError, TransferPlanError
from kvactors.vllm import handoff_start
from kvactors.vllm.connector import KVActorsConnector
from kvactors.vllm.handoff_start import handoff_config, start_handoff
from kvactors.vllm.handoff_worker import HandoffSide
from kvactors.vllm.layouts import ModelFacts
from kvactors.vllm.messages import Handshake, StepPlan
from kvactors.vllm.settings import BOTH, CONSUMER, PRODUCER, ConnectorSettings
from tests.connector.rig import PATIENT_S, BlockState, SchedulerOutput, Tables
from tests.vllm.handoff_rig import DECODE, PREFILL, FakeWorker, ask, full

LAYOUT = KVLayout("m", [Group(0, GroupKind.FULL, 16, {0: [CacheEntry("kv", 8)]})])


def vllm_config(role: str, extra: dict[str, Any]) -> Any:
    parallel = SimpleNamespace(
        world_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVActorsConnector", kv_role=cast(Any, role), engine_id="e", kv_connector_extra_config=extra
        ),
        parallel_config=parallel,
        cache_config=SimpleNamespace(block_size=16, prefix_match_unit=None, enable_prefix_caching=True, cache_dtype="auto"),
        kv_events_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=True),
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(enforce_eager=True, hf_text_config=SimpleNamespace()),
    )


Make = Callable[..., KVActorsConnector]


@pytest.fixture
def scheduler() -> Iterator[Make]:
    """Makes a scheduler's connector whose workers have published what they have; closes it."""
    made: list[KVActorsConnector] = []

    def make(role: str, *, started: bool = True, **extra: Any) -> KVActorsConnector:
        given = {"backend": "none", "lookup_budget_s": PATIENT_S, **extra}
        one = KVActorsConnector(vllm_config(role, given), KVConnectorRole.SCHEDULER, full())
        made.append(one)
        one.bind_gpu_block_pool(BlockPool(32, enable_caching=True, hash_block_size=16))
        one.set_xfer_handshake_metadata({0: Handshake(LAYOUT, 16, hands_over=started)})
        return one

    yield make
    for one in made:
        one.shutdown()


def plan(one: KVActorsConnector, *finished: str) -> StepPlan:
    found = one.build_connector_meta(cast(Any, SchedulerOutput({}, BlockState({}), set(finished))))
    assert isinstance(found, StepPlan)
    return found


def blocks(one: KVActorsConnector, count: int) -> KVCacheBlocks:
    return KVCacheBlocks((one._pins.pool.get_new_blocks(count),))


def admit(one: KVActorsConnector, request: Request, given: KVCacheBlocks, local: int = 0) -> tuple[int | None, bool]:
    found = one.get_num_new_matched_tokens(request, local)
    one.update_state_after_alloc(request, given, found[0] or 0)
    return found


# -- which parts there are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "extra", "stores", "hands", "delivers"),
    [
        (PRODUCER, {"backend": "memory"}, True, True, True),
        (CONSUMER, {"backend": "memory"}, True, True, False),
        (BOTH, {"backend": "memory"}, True, False, False),
        (BOTH, {"backend": "memory", "handoff": True}, True, True, True),
        (PRODUCER, {"backend": "memory", "handoff": False}, True, False, False),
        (PRODUCER, {}, False, True, True),
        (CONSUMER, {}, False, True, False),
        (BOTH, {}, False, True, True),
    ],
)
def test_which_parts_a_role_has(
    scheduler: Make, role: str, extra: dict[str, Any], stores: bool, hands: bool, delivers: bool
) -> None:
    one = scheduler(role, **extra)
    assert (one._scheduler is not None, one._handing is not None) == (stores, hands)
    assert one.requires_kv_delivery is delivers


def test_the_scheduler_says_once_that_this_vllm_was_not_tried(
    scheduler: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvactors.vllm.connector.vllm_version", "0.34.0")
    scheduler(BOTH, backend="memory")
    (told,) = (message for message in caplog.messages if "was not tried with this vLLM" in message)
    assert "version='0.34.0'" in told


def test_where_a_worker_could_not_start_requests_are_plain(scheduler: Make) -> None:
    one = scheduler(CONSUMER, backend="memory", started=False)
    request = ask("d", 40, DECODE)
    one.on_new_request(request)
    assert not request.kv_transfer_params["do_remote_prefill"]
    assert one.get_num_new_matched_tokens(request, 0) == (0, False)
    assert one.request_finished_all_groups(request, ([],)) == (False, None)


# -- decode ------------------------------------------------------------------------------------------------------------


def test_a_hand_off_at_decode(scheduler: Make) -> None:
    one = scheduler(CONSUMER)
    request, given = ask("d", 40, DECODE), blocks(one, 3)
    one.on_new_request(request)
    assert admit(one, request, given) == (40, True)
    assert one.get_loaded_kv_cache_group_ids(request) == (0,)
    assert one.has_pending_push_work()
    (pull,) = plan(one).handoff.pulls
    assert list(pull.blocks.groups[0].ids) == [b.block_id for b in given.blocks[0]]
    assert not one.has_pending_push_work()
    one.update_connector_output(KVConnectorOutput(finished_recving={"d"}))
    assert one.request_finished_all_groups(request, given.get_block_ids()) == (False, None)
    assert not plan(one, "d").handoff


def test_a_request_that_is_handed_over_does_not_ask_the_store(scheduler: Make) -> None:
    one = scheduler(CONSUMER, backend="memory")
    handed, other = ask("d", 40, DECODE), ask("o", 40, None)
    one.on_new_request(handed)
    assert admit(one, handed, blocks(one, 3)) == (40, True)
    assert one.scheduler_side.totals()["lookups"] == 0
    one.on_new_request(other)
    assert admit(one, other, blocks(one, 3)) == (0, False)
    assert one.scheduler_side.totals()["lookups"] == 1
    assert len(plan(one).handoff.pulls) == 1


def test_after_a_failure_the_store_is_asked(scheduler: Make) -> None:
    one = scheduler(CONSUMER, backend="memory")
    request = ask("d", 40, DECODE)
    one.on_new_request(request)
    admit(one, request, blocks(one, 3))
    plan(one)
    one.update_connector_output(KVConnectorOutput(finished_recving={"d"}, failed_recving={"d"}))
    request.num_computed_tokens = 0
    assert admit(one, request, blocks(one, 3)) == (0, False)
    assert one.scheduler_side.totals()["lookups"] == 1
    assert not plan(one).handoff


@pytest.mark.parametrize("backend", ["none", "memory"])
def test_blocks_of_a_fenced_failure_stay_out_of_the_pool(scheduler: Make, backend: str) -> None:
    """vLLM reads the report before it frees the blocks of the request."""
    one = scheduler(CONSUMER, backend=backend)
    pool, request, given = one._pins.pool, ask("d", 40, DECODE), blocks(one, 3)
    one.on_new_request(request)
    admit(one, request, given)
    worker, fake = worker_connector()
    worker.bind_connector_metadata(plan(one))
    worker.start_load_kv(None)
    (name,) = [call[1] for call in fake.take()]
    free = pool.get_num_free_blocks()

    def step() -> None:
        results = worker.get_transfer_results(set())
        meta = worker.build_connector_worker_meta()
        one.update_connector_output(
            KVConnectorOutput(
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=meta,
            )
        )

    fake.tell(name, OutcomeKind.FAILED, fenced=True)
    step()
    pool.free_blocks(given.blocks[0])
    assert pool.get_num_free_blocks() == free
    assert one.has_pending_push_work()
    fake.tell(name, OutcomeKind.RETURNED)
    step()
    assert pool.get_num_free_blocks() == free + 3
    assert not one.has_pending_push_work()


# -- prefill -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["none", "memory"])
def test_a_hand_off_at_prefill(scheduler: Make, backend: str) -> None:
    one = scheduler(PRODUCER, backend=backend)
    request, given = ask("p", 40, PREFILL), blocks(one, 3)
    one.on_new_request(request)
    assert admit(one, request, given) == (0, False)
    tables = {"p": Tables([list(given.get_block_ids()[0])])}
    made = one.build_connector_meta(cast(Any, SchedulerOutput({"p": 40}, BlockState(tables))))
    assert isinstance(made, StepPlan)
    assert made.handoff.requests == ["t"]
    assert [r.life.name for r in made.requests] == (["p"] if backend == "memory" else [])
    request.num_computed_tokens = 40
    request.append_output_token_ids(5)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert one.request_finished_all_groups(request, given.get_block_ids()) == (True, None)
    (held,) = plan(one, "p").handoff.prefilled
    assert (held.request_id, held.blocks.tokens) == ("p", 40)
    one.update_connector_output(KVConnectorOutput(finished_sending={"p"}))
    assert not one.has_pending_push_work()


def test_prefill_asks_the_store_with_what_it_keeps(scheduler: Make) -> None:
    """A window's edge: the hash of a block that the cut token completed is gone before anything is looked up."""
    one = scheduler(PRODUCER, backend="memory")
    assert one._handing is not None
    one._handing._stops_early = True
    request = ask("p", 32, PREFILL)
    one.on_new_request(request)
    assert (request.num_tokens, len(request.block_hashes)) == (31, 1)
    assert one.get_num_new_matched_tokens(request, 0) == (0, False)


# -- a worker ----------------------------------------------------------------------------------------------------------


def worker_connector() -> tuple[KVActorsConnector, FakeWorker]:
    """One without a store."""
    one = KVActorsConnector(vllm_config(BOTH, {"backend": "none"}), KVConnectorRole.WORKER, full())
    fake = FakeWorker()
    one._handoff = HandoffSide(cast(Any, fake), worker_geometry(LAYOUT, 0, 32, []), LAYOUT, early=True)
    return one, fake


def test_a_worker_without_a_store_goes_through_a_step(scheduler: Make) -> None:
    one, fake = worker_connector()
    shake = one.get_handshake_metadata()
    assert isinstance(shake, Handshake)
    assert (shake.layout, shake.hands_over) == (LAYOUT, True)
    both = scheduler(BOTH)
    both.on_new_request(ask("p", 40, PREFILL))
    one.bind_connector_metadata(plan(both))
    one.start_load_kv(None)
    one.wait_for_layer_load("model.layers.0.self_attn.attn")
    one.save_kv_layer("model.layers.0.self_attn.attn", None, None)
    one.wait_for_save()
    assert fake.take() == [("request", "t")]
    results = one.get_transfer_results(set())
    assert not any((results.finished_sending, results.finished_recving, results.failed_recving))
    assert one.get_finished(set()) == (None, None)
    assert one.get_block_ids_with_load_errors() == set()
    assert one.build_connector_worker_meta() is None
    assert one.get_kv_connector_kv_cache_events() is None
    one.get_kv_connector_stats()
    assert one.get_kv_connector_stats() is None
    one.shutdown()
    assert fake.closed


def test_what_was_handed_over_is_counted() -> None:
    one, fake = worker_connector()
    fake.sent = cast(Any, SimpleNamespace(sends=2, bytes=64, expired=1))
    request = ask("d", 40, DECODE)
    side = KVActorsConnector(vllm_config(BOTH, {"backend": "none"}), KVConnectorRole.SCHEDULER, full())
    side.bind_gpu_block_pool(BlockPool(32, enable_caching=True, hash_block_size=16))
    side.on_new_request(request)
    admit(side, request, blocks(side, 3))
    one.bind_connector_metadata(plan(side))
    (call,) = fake.take()
    fake.tell(call[1], OutcomeKind.LOADED)
    one.get_transfer_results(set())
    stats = one.get_kv_connector_stats()
    assert stats is not None
    assert {k: v for k, v in stats.data.items() if k.startswith("handoff")} == {
        "handoff_sent": 2,
        "handoff_sent_bytes": 64,
        "handoff_expired": 1,
        "handoff_received": 1,
        "handoff_received_bytes": 24,
    }


# -- how a worker starts -----------------------------------------------------------------------------------------------

FACTS = ModelFacts(model="m", hidden_layers=1, kv_heads=1)


@pytest.mark.parametrize("error", [TransferPlanError("no"), ImportError("no"), OSError("no")])
def test_what_cannot_be_started_is_a_warning_unless_it_was_asked_for(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(handoff_start, "_start", fail)
    monkeypatch.setattr(handoff_start, "transfer_memory", lambda *_: None)
    given = (vllm_config(PRODUCER, {}), full(), {}, FACTS)
    with caplog.at_level(logging.WARNING):
        assert start_handoff(*given, ConnectorSettings.of({})) is None
    assert "no prefill/decode hand-off" in caplog.text
    for extra in ({"handoff": True}, {"backend": "none"}):
        with pytest.raises(ConfigError, match="cannot be started: no"):
            start_handoff(*given, ConnectorSettings.of(extra))


def parallel(**more: Any) -> Any:
    return SimpleNamespace(
        **{"local_engines_only": False, "data_parallel_index": 0, "data_parallel_master_ip": "10.0.0.9", **more}
    )


@pytest.mark.parametrize(
    ("extra", "ranks", "facts", "bootstrap", "serves", "dp_rank"),
    [
        ({}, {}, {}, ("127.0.0.1", 8998), True, 0),
        ({"bootstrap_port": 9000}, {}, {}, ("127.0.0.1", 9000), True, 0),
        ({"handoff_host": "10.0.0.2"}, {}, {}, ("10.0.0.2", 8998), True, 0),
        ({"bootstrap_server_address": "10.0.0.3:77"}, {}, {}, ("10.0.0.3", 77), False, 0),
        ({}, {}, {"tp_size": 2, "tp_rank": 1}, ("127.0.0.1", 8998), False, 0),
        ({}, {}, {"pp_size": 2, "pp_rank": 1}, ("127.0.0.1", 8998), False, 0),
        ({}, {"data_parallel_index": 1}, {}, ("127.0.0.1", 8998), False, 1),
        ({"handoff_host": "10.0.0.2"}, {"data_parallel_index": 1}, {}, ("10.0.0.9", 8998), False, 1),
        (
            {"handoff_host": "10.0.0.2"},
            {"data_parallel_index": 3, "local_engines_only": True, "data_parallel_rank_local": 0},
            {},
            ("10.0.0.2", 8998),
            True,
            0,
        ),
    ],
)
def test_where_a_worker_listens_and_registers(
    extra: dict[str, Any],
    ranks: dict[str, Any],
    facts: dict[str, Any],
    bootstrap: tuple[str, int],
    serves: bool,
    dp_rank: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", raising=False)
    given = ModelFacts(**{"model": "m", "hidden_layers": 1, "kv_heads": 2, **facts})
    settings = ConnectorSettings.of(extra)
    found = handoff_config(parallel(**ranks), given, settings, serves=True)
    assert (found.bootstrap, found.serve_bootstrap, found.dp_rank) == (bootstrap, serves, dp_rank)
    assert found.host == settings.handoff_host
    assert found.public is (settings.handoff_host != "127.0.0.1")
    assert not handoff_config(parallel(**ranks), given, settings, serves=False).serve_bootstrap


def test_the_port_of_vllms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", "9001")
    assert handoff_config(parallel(), FACTS, ConnectorSettings(), serves=True).bootstrap[1] == 9001
    assert handoff_config(parallel(), FACTS, ConnectorSettings(bootstrap_port=5), serves=True).bootstrap[1] == 5
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", "http")
    with pytest.raises(ConfigError, match="VLLM_MOONCAKE_BOOTSTRAP_PORT"):
        handoff_config(parallel(), FACTS, ConnectorSettings(), serves=True)


@pytest.mark.parametrize(
    ("extra", "abort", "deadline"),
    [({}, 480.0, 480.0), ({"abort_timeout_s": 60}, 60.0, 60.0), ({"handoff_deadline_s": 5}, 480.0, 5.0)],
)
def test_how_long_the_two_sides_wait(extra: dict[str, Any], abort: float, deadline: float) -> None:
    found = handoff_config(parallel(), FACTS, ConnectorSettings.of(extra), serves=True)
    assert (found.abort_timeout_s, found.deadline_s) == (abort, deadline)
